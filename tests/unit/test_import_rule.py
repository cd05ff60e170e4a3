"""The floors of the house: imports point down, and rooms on one floor do not import each other.

A room is a folder or a file of the package. CONTRIBUTING.md has the same list.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchtitan_lite"
SOURCES = sorted(PACKAGE.rglob("*.py"))
FLOORS = [
    {"__main__"},
    {"cli"},
    {"agent", "bench", "evaluate", "launch", "train"},
    {"trainer"},
    {"build", "build_model", "samples"},
    {"convert_hf", "doctor", "generate", "planner", "status"},
    {"checkpoint", "data", "float8", "metrics", "optim", "parallel", "profiling", "run_folder"},
    {"job"},
    {"config"},
    {"models"},
    {"collectives", "documents"},
    {"errors", "files", "logger", "lr_schedule", "patches", "tables", "torchao_types"},
]
"""Rooms, from the top floor to the ground."""
TABLES = {"models.flavors", "float8.recipes", "data.datasets", "parallel.schedules"}
"""Modules of upper rooms that stand on the ground: tables of data, against which configs are
checked."""
SEE_THE_JOB = {
    "bench",
    "build",
    "build_model",
    "cli",
    "config",
    "convert_hf",
    "evaluate",
    "job",
    "launch",
    "planner",
    "samples",
    "train",
}
SEE_THE_JOB |= {"trainer"}
"""Rooms that may handle the whole Config or Job. All others take a section or plain values."""
WITHOUT_TORCH = {
    "config",
    "errors",
    "files",
    "job",
    "logger",
    "lr_schedule",
    "run_folder",
    "status",
    "tables",
}


def module_name(path: Path) -> str:
    """Return the name within the package: models.llama3, train, config."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def room(module: str) -> str:
    return module.partition(".")[0]


def floor(module: str) -> int:
    """Return the height of a module: 0 is the ground."""
    if any(f"{module}.".startswith(f"{table}.") for table in TABLES):
        return 0
    (level,) = (level for level, rooms in enumerate(reversed(FLOORS)) if room(module) in rooms)
    return level


def allowed(module: str, target: str) -> bool:
    """Return whether `module` of the package may import `target` of the package."""
    return room(module) == room(target) or floor(module) > floor(target)


def imported(tree: ast.AST, folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield the full name of each import in a source file of `folder`, and whether it is relative.

    `from x import y` yields x.y.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = folder.parents[node.level - 2] if node.level > 1 else folder
            origin = [*base.relative_to(ROOT).parts] if node.level else []
            for alias in node.names:
                name = ".".join([*origin, *filter(None, [node.module]), alias.name])
                yield name, node.level > 0


def own(names: Iterator[tuple[str, bool]]) -> list[str]:
    """Keep the imports of this package, without its name."""
    prefix = "torchtitan_lite."
    return [name.removeprefix(prefix) for name, _ in names if name.startswith(prefix)]


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_point_down(path: Path) -> None:
    module, names = module_name(path), own(imported(ast.parse(path.read_text()), path.parent))
    assert [target for target in names if not allowed(module, target)] == []


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_are_relative_within_a_room_and_absolute_across(path: Path) -> None:
    here = f"torchtitan_lite.{room(module_name(path))}."
    wrong = [
        name
        for name, relative in imported(ast.parse(path.read_text()), path.parent)
        if name.startswith("torchtitan_lite.")
        and relative != (name.startswith(here) and path.parent != PACKAGE)
    ]
    assert wrong == []


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_only_some_rooms_see_the_whole_job(path: Path) -> None:
    names = own(imported(ast.parse(path.read_text()), path.parent))
    whole = {"config.Config", "config.sections.Config", "job.Job"} & set(names)
    assert not whole or room(module_name(path)) in SEE_THE_JOB


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_an_import_in_a_function_is_of_a_heavy_dependency(path: Path) -> None:
    if room(module_name(path)) == "cli":
        pytest.skip("a command's help does not wait for what the command needs")
    functions = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
    ]
    assert [name for node in functions for name in own(imported(node, path.parent))] == []


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in SOURCES
        if room(module_name(path)) in WITHOUT_TORCH or module_name(path) in TABLES
    ],
    ids=module_name,
)
def test_rooms_that_judge_a_config_import_no_torch(path: Path) -> None:
    names = [name for name, _ in imported(ast.parse(path.read_text()), path.parent)]
    assert {name.partition(".")[0] for name in names} & {"torch", "torchao", "numpy"} == set()


def test_contributing_lists_the_floors() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    listed = [set(re.findall(r"`(\w+)`", line)) for line in re.findall(r"^\d+\. .*$", text, re.M)]
    assert listed == FLOORS
    tables = {f"{table.replace('.', '/')}.py" for table in TABLES}
    assert tables <= set(re.findall(r"`([\w/]+\.py)`", text))


def test_every_room_has_a_floor() -> None:
    rooms = {room(module_name(path)) for path in SOURCES} - {"", "__init__"}
    assert rooms == set().union(*FLOORS)


@pytest.mark.parametrize("path", sorted(ROOT.glob("scripts/*.py")), ids=lambda path: path.stem)
def test_a_script_imports_no_other_script(path: Path) -> None:
    scripts = {script.stem for script in ROOT.glob("scripts/*.py")} | {"scripts"}
    names = imported(ast.parse(path.read_text()), path.parent)
    assert scripts.isdisjoint(name.partition(".")[0] for name, _ in names)


@pytest.mark.parametrize(
    ("module", "target", "verdict"),
    [
        ("train", "trainer.Trainer", True),
        ("trainer", "train.run", False),
        ("build", "planner.plan.make_plan", True),
        ("planner.plan", "float8.selection.Choice", True),
        ("float8.convert", "metrics.flops.count_flops", False),
        ("metrics.flops", "float8.recipes.RECIPES", True),
        ("config.checks", "models.flavors.FLAVORS", True),
        ("config.checks", "data.datasets.DATASETS", True),
        ("config.checks", "data.sources.build_source", False),
        ("models.llama3", "config.ModelConfig", False),
        ("models.flavors", "errors.RunError", False),
        ("job", "config.Config", True),
        ("logger", "errors.RunError", False),
    ],
)
def test_the_rule(module: str, target: str, verdict: bool) -> None:
    assert allowed(module, target) is verdict


def test_imports_are_found_in_each_form() -> None:
    source = "import a.b\nfrom c import d\nfrom . import e\nfrom .f import g\nfrom ..h import i\n"
    assert list(imported(ast.parse(source), PACKAGE / "data")) == [
        ("a.b", False),
        ("c.d", False),
        ("torchtitan_lite.data.e", True),
        ("torchtitan_lite.data.f.g", True),
        ("torchtitan_lite.h.i", True),
    ]


def test_the_config_is_checked_without_torch() -> None:
    code = "import sys, torchtitan_lite.config; print({'torch', 'torchao'} & sys.modules.keys())"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "set()\n"


def test_training_loads_what_is_slow_to_load_where_it_is_used_only() -> None:
    heavy = {
        "torchao",
        "torch._inductor.compile_fx",
        "torch._functorch.partitioners",
        "networkx",
        "tensorboard",
        "wandb",
    }
    code = f"import sys, torchtitan_lite.train; print({heavy} & sys.modules.keys())"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "set()\n"


def test_the_main_job_is_imported_without_the_garbage_collector_which_is_on_afterwards() -> None:
    code = (
        "import gc, runpy, sys; seen = []; sys.addaudithook(lambda event, args: event == 'import' "
        "and "
        "args[0] == 'torch.distributed' and seen.append(gc.isenabled())); sys.argv = ['train', "
        "'--help']; "
        "runpy.run_module('torchtitan_lite.train', run_name='__main__'); "
        "print(seen[0], gc.isenabled(), gc.get_freeze_count() > 100_000)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "False True True"
