"""The README and CONTRIBUTING name files, keys and commands that exist."""

import re
import shlex
from pathlib import Path

import pytest

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


def test_the_plan_prints_the_lines_that_the_readme_shows(monkeypatch, capsys):
    command = re.search(r"^torchtitan-lite (plan .*)$", README, flags=re.MULTILINE)
    shown = re.search(r"^```text\n(.*?)\n```$", README, flags=re.MULTILINE | re.DOTALL)
    assert command and shown
    monkeypatch.chdir(ROOT)
    run_command(shlex.split(command[1]))
    assert set(shown[1].splitlines()) <= set(capsys.readouterr().out.splitlines())
