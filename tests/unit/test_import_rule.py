"""Hub and spokes: the hubs import everyone and nobody but scripts and hubs imports them; a spoke, a
folder or a file of the package, imports only what all share and itself."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchtitan_lite"
SOURCES = sorted(PACKAGE.rglob("*.py"))
HUBS = {"launch", "train", "trainer", "plan", "bench", "benchmarks", "build", "meta", "convert_hf"}
COMMON = {
    "patches",
    "config",
    "errors",
    "logger",
    "files",
    "collectives",
    "tables",
    "torchao_types",
}
OURS = {  # what a part of the package may import of it, besides itself
    "config": {"errors", "logger", "models.flavors"},
    "errors": set(),
    "logger": set(),
    "files": set(),
    "tables": set(),
    "torchao_types": set(),
    "collectives": {"errors"},
    "models": set(),
}
THIRD_PARTIES = {  # what it may import of others, where that is not left open
    "config": {"pydantic", "pydantic_core", "tomli", "tomli_w"},
    "errors": set(),
    "logger": set(),
    "files": set(),
    "tables": set(),
    "torchao_types": {"torchao"},
    "collectives": {"torch"},
    "models": {"torch"},
    "models.flavors": set(),
    "run_folder": set(),
}


def module_name(path: Path) -> str:
    """Name within the package: models.llama3, train, config."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def part(module: str) -> str:
    """The folder, or the file beside the folders, that holds a module of the package."""
    return module.partition(".")[0]


def imported(tree: ast.AST, folder: Path) -> Iterator[str]:
    """Full name of what each import in a source file of `folder` names; `from x import y` names
    x.y."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = folder.parents[node.level - 2] if node.level > 1 else folder
            origin = [*base.relative_to(ROOT).parts] if node.level else []
            yield from (
                ".".join([*origin, *filter(None, [node.module]), alias.name])
                for alias in node.names
            )


def own(names: Iterator[str]) -> list[str]:
    """Those of `names` that are of the package, without its name."""
    return [
        name.removeprefix("torchtitan_lite.")
        for name in names
        if name.startswith("torchtitan_lite.")
    ]


def allowed(module: str, target: str) -> bool:
    """Whether `module` of the package may import `target` of it."""
    if part(target) == part(module):
        return True
    if part(module) in HUBS:
        # What hubs share; and what is measured is the main job itself.
        return part(target) not in HUBS - {"build", "meta"} or (part(module), part(target)) in {
            ("bench", "benchmarks"),
            ("benchmarks", "trainer"),
            ("benchmarks", "train"),
            ("train", "trainer"),
        }
    return any(f"{target}.".startswith(f"{name}.") for name in OURS.get(part(module), COMMON))


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_a_module_imports_only_what_its_place_allows(path: Path) -> None:
    module = module_name(path)
    names = list(imported(ast.parse(path.read_text()), path.parent))
    assert [target for target in own(iter(names)) if not allowed(module, target)] == []
    others = {part(name) for name in names} - sys.stdlib_module_names - {"torchtitan_lite"}
    third_parties = THIRD_PARTIES.get(module, THIRD_PARTIES.get(part(module)))
    assert third_parties is None or others <= third_parties


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_no_import_of_our_own_hides_in_a_function(path: Path) -> None:
    functions = (
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert [name for function in functions for name in own(imported(function, path.parent))] == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("scripts/*.py")), ids=lambda path: path.stem)
def test_a_script_imports_no_other_script(path: Path) -> None:
    scripts = {script.stem for script in ROOT.glob("scripts/*.py")} | {"scripts"}
    assert scripts.isdisjoint(
        part(name) for name in imported(ast.parse(path.read_text()), path.parent)
    )


@pytest.mark.parametrize(
    ("module", "target", "verdict"),
    [
        ("train", "data.sources.build_source", True),
        ("plan", "train.Trainer", False),
        ("float8.convert", "train.Trainer", False),
        ("float8.convert", "float8.selection.Choice", True),
        ("float8.convert", "config.Float8Config", True),
        ("float8.convert", "metrics.flops.count_flops", False),
        ("optim", "run_folder.report_failure", False),
        ("models.llama3", "models.flavors.ModelArgs", True),
        ("models.llama3", "config.ModelConfig", False),
        ("config.checks", "models.flavors.FLAVORS", True),
        ("config.checks", "models.llama3.Transformer", False),
        ("logger", "errors.RunError", False),
    ],
)
def test_the_rule(module: str, target: str, verdict: bool) -> None:
    assert allowed(module, target) is verdict


def test_imports_are_found_in_each_form() -> None:
    source = "import a.b\nfrom c import d\nfrom . import e\nfrom .f import g\nfrom ..h import i\n"
    assert list(imported(ast.parse(source), PACKAGE / "data")) == [
        "a.b",
        "c.d",
        "torchtitan_lite.data.e",
        "torchtitan_lite.data.f.g",
        "torchtitan_lite.h.i",
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
        "import gc, runpy, sys; seen = []; sys.addaudithook(lambda event, args: event == 'import' and "
        "args[0] == 'torch.distributed' and seen.append(gc.isenabled())); sys.argv = ['train', '--help']; "
        "runpy.run_module('torchtitan_lite.train', run_name='__main__'); "
        "print(seen[0], gc.isenabled(), gc.get_freeze_count() > 100_000)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "False True True"
