"""The README and CONTRIBUTING name files, keys and commands that exist."""

import json
import re
import shlex
from pathlib import Path

import pytest
from common import Ratios
from waits import table

from torchtitan_lite.cli import run_command
from torchtitan_lite.config.keys import KEYS

ROOT = Path(__file__).parents[2]
README, CONTRIBUTING = ((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))

# ----- README, CONTRIBUTING -----


@pytest.mark.parametrize("page", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_every_file_that_a_page_names_exists(page):
    folders = "train_configs|scripts|docs|tests|torchtitan_lite"
    named = set(re.findall(rf"(?:{folders})/[\w./-]*\w", page))
    assert named, "the page names no file"
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_file_to_change_exists():
    table = CONTRIBUTING.partition("| To change |")[2].partition("\n\n")[0]
    files = re.findall(r"`((?:\w+/)?\w+\.py)`", table)
    assert len(files) >= 12
    assert [name for name in files if not (ROOT / "torchtitan_lite" / name).is_file()] == []


def test_overrides_in_commands_are_keys():
    used = set(re.findall(r"--(\w+\.\w+)", README))
    assert used and used <= {*KEYS, "job.config_file"}


def test_the_pages_have_the_figures_that_were_measured_against_peers():
    results = json.loads((ROOT / "scripts/benchmarks/waits.json").read_text())
    assert table(results) in (ROOT / "docs/performance.md").read_text()

    figures = {each["name"]: each for each in results["launch"]["figures"]}

    def median(name):
        ratios = Ratios.of(figures[name]["ours"], figures[name]["theirs"])
        return f"{ratios.quartiles[1]:.2f}"

    (row,) = re.findall(r"^\| Debug model in bf16 .*$", README, flags=re.MULTILINE)
    shown = [
        median(f"5.9M, {case}: {figure}")
        for figure in ("tokens/s", "launch to the end of step 1, s")
        for case in ("eager", "compiled, empty cache")
    ]
    assert re.findall(r"\d\.\d\d", row) == shown


def test_the_readme_counts_the_published_runs_as_their_page_does():
    page = (ROOT / "docs/published.md").read_text()
    counts = re.findall(
        r"^\| tokens/s, all \| (\d+) .* (\d+) within 20 %", page, flags=re.MULTILINE
    )
    assert re.findall(r"Of (\d+) rates .* (\d+) are within 20 %", README) == counts != []


def test_the_plan_prints_the_lines_that_the_readme_shows(monkeypatch, capsys):
    command = re.search(r"^torchtitan-lite (plan .*)$", README, flags=re.MULTILINE)
    shown = re.search(r"^```text\n(.*?)\n```$", README, flags=re.MULTILINE | re.DOTALL)
    assert command and shown
    monkeypatch.chdir(ROOT)
    run_command(shlex.split(command[1]))
    assert set(shown[1].splitlines()) <= set(capsys.readouterr().out.splitlines())
