"""The README says what the program does: its config table, its files and its commands."""

import re
from pathlib import Path

from torchtitan_lite.config import format_config_table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_config_table_is_the_one_of_the_sections() -> None:
    assert format_config_table() in README


def test_every_file_that_the_readme_names_exists() -> None:
    named = set(
        re.findall(r"(?:train_configs|scripts|docs|tests|torchtitan_lite)/[\w./-]*\w", README)
    )
    assert named, "the README names no file"
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_module_stands_in_the_file_tree() -> None:
    missing = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "torchtitan_lite").rglob("*.py")
        if path.name != "__init__.py" and not re.search(rf"\b{path.stem}\b", README)
    ]
    assert missing == []


def test_overrides_in_commands_are_keys() -> None:
    keys = set(re.findall(r"`(\w+\.\w+)`", format_config_table())) | {"job.config_file"}
    used = set(re.findall(r"--(\w+\.\w+)", README))
    assert used and used <= keys
