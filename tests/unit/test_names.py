"""Tests are found by the name of what they test."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
SECTION = re.compile(r"^# -----(.*)-----$")


@cache
def defined_names() -> frozenset[str]:
    """Return what a test can be about: functions, classes, methods, fields (config keys are some),
    constants and modules of the package, its scripts and the tests' helpers; commands, pages,
    configs and scripts."""
    names = {"readme", "contributing"}
    helpers = [path for path in TESTS.rglob("*.py") if not path.name.startswith("test_")]
    folders = [
        ROOT / name for name in ("torchtitan_lite", "scripts", "docs", "train_configs", "examples")
    ]
    for path in (*helpers, *(path for folder in folders for path in folder.rglob("*.*"))):
        names |= {path.stem, path.name, path.parent.name}
        if path.suffix == ".py":
            names |= names_in(ast.parse(path.read_text()))
    return frozenset(name.lower() for name in names if len(name) > 2)


def names_in(node: ast.Module | ast.ClassDef) -> set[str]:
    """Return the functions, classes and variables of a module or class, nested ones too."""
    names = set()
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            names.add(child.name)
        if isinstance(child, ast.ClassDef):
            names |= names_in(child)
        targets = (
            child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
        )
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def not_found(path: Path) -> list[str]:
    """Return the tests of a file whose section (`# ----- names -----`) has no defined name, and
    whose own name has none after `test_`."""
    source = path.read_text()
    sections = {
        number: match[1].lower()
        for number, line in enumerate(source.splitlines(), start=1)
        if (match := SECTION.match(line))
    }
    missing = []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        words = node.name.split("_")[1:]
        starts = {"_".join(words[:count]) for count in range(1, len(words) + 1)}
        above = [line for line in sections if line < node.lineno]
        section = sections[max(above)] if above else ""
        if not defined_names() & {*starts, *re.findall(r"[\w.-]*\w", section)}:
            missing.append(f"{path.relative_to(TESTS)}:{node.lineno} {node.name}")
    return missing


@pytest.mark.parametrize("folder", ["unit", "distributed", "gpu", "deviceless"])
def test_names_of_tests_or_their_sections(folder: str) -> None:
    files = sorted((TESTS / folder).glob("test_*.py"))
    assert [missing for path in files for missing in not_found(path)] == []
