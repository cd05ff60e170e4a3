"""The README and CONTRIBUTING say what the program does: their files, keys and commands."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_lite.config.keys import KEYS

ROOT = Path(__file__).parents[2]
README, CONTRIBUTING = ((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))


@pytest.mark.parametrize("page", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    named = set(
        re.findall(r"(?:train_configs|scripts|docs|tests|torchtitan_lite)/[\w./-]*\w", page)
    )
    assert named, "the page names no file"
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_file_of_where_would_i_change_exists() -> None:
    table = CONTRIBUTING.partition("| To change |")[2].partition("\n\n")[0]
    files = re.findall(r"`((?:\w+/)?\w+\.py)`", table)
    assert len(files) >= 12
    assert [name for name in files if not (ROOT / "torchtitan_lite" / name).is_file()] == []


def test_overrides_in_commands_are_keys() -> None:
    used = set(re.findall(r"--(\w+\.\w+)", README))
    assert used and used <= {*KEYS, "job.config_file"}


def test_the_plan_prints_the_lines_that_the_readme_shows() -> None:
    command = re.search(r"^torchtitan-lite (plan .*)$", README, flags=re.MULTILINE)
    shown = re.search(r"^```text\n(.*?)\n```$", README, flags=re.MULTILINE | re.DOTALL)
    assert command and shown
    words = [sys.executable, "-m", "torchtitan_lite", *shlex.split(command[1])]
    result = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    assert set(shown[1].splitlines()) <= set(result.stdout.splitlines())
