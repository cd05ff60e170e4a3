"""Which module imports which: the floors of CONTRIBUTING.md. A room is a folder or a file of the
package; imports point down, and rooms on one floor do not import each other."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchtitan_lite"
PREFIX = "torchtitan_lite."
SOURCES = sorted(PACKAGE.rglob("*.py"))
RULE = (ROOT / "CONTRIBUTING.md").read_text().partition("## Floors\n")[2].partition("\n## ")[0]
FLOORS = [set(re.findall(r"`(\w+)`", line)) for line in re.findall(r"^\d+\. .*$", RULE, re.M)]
"""Rooms, from the top floor to the ground."""
SEE_THE_JOB = {"__init__", "config", "planner", "tools", "train", "training"}
"""Rooms that may handle the whole Config or Job. All others take a section or plain values."""
LATE = {
    ("checkpoint.checkpointer", "checkpoint.hf_folder.load_hf"),
    ("checkpoint.checkpointer", "checkpoint.torchtitan_folder.load_torchtitan"),
    ("data.corpus", "data.store_writer.open_cached"),
    ("models.hf_float8", "float8.blockwise.scale_blocks"),
    ("parallel.parallelize", "float8.weights.WeightCaster"),
    ("parallel.parallelize", "parallel.context_parallel.apply_context_parallel"),
    ("parallel.parallelize", "parallel.tensor_parallel.apply_tensor_parallel"),
    ("parallel.parallelize", "parallel.tensor_parallel.enable_async_tensor_parallel"),
    ("run.launch", "run.agent.Task"),
    ("run.launch", "run.agent.main"),
    ("training.build", "metrics.stage_times.StageTimes"),
    ("training.model", "float8.graph_passes.add_passes"),
    ("training.model", "parallel.pipeline.PipelinedMicrobatches"),
    ("training.model", "parallel.tensor_parallel.float8_gathers"),
    ("training.optim", "training.bfloat16_adamw.BFloat16AdamW"),
    ("training.optim", "training.muon.Muon"),
    ("training.trainer", "checkpoint.hf_export"),
    ("training.trainer", "float8.numerics.NumericsMonitor"),
    ("training.trainer", "training.profiling.Profiler"),
    ("training.trainer", "training.samples.Samples"),
}
"""Imports in a function: the launcher checks a config without torch; a run on a token store loads
no code that makes one, and a run without pipeline, traces, another project's weights and the like
not theirs."""
WITHOUT_TORCH = ["base.files", "base.jsonfile", "base.terminal", "config", "config.job"]
WITHOUT_TORCH += [f"catalog.{path.stem}" for path in PACKAGE.glob("catalog/[a-z]*.py")]
WITHOUT_TORCH += ["run.launch", "tools.runs"]


def module_name(path: Path) -> str:
    """Return the name within the package: models.llama3, train, config."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def room(module: str) -> str:
    return module.partition(".")[0]


def floor(module: str) -> int:
    """Return the height of a module: 0 is the ground."""
    (level,) = (level for level, rooms in enumerate(reversed(FLOORS)) if room(module) in rooms)
    return level


def allowed(module: str, target: str) -> bool:
    """Return whether `module` of the package may import `target` of the package."""
    if module == "__init__":  # the library's names, of every floor
        return True
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


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports() -> list[tuple[str, str, bool]]:
    """Return the module of each import in the package, its target, and whether it is relative."""
    return [
        (module_name(path), name, relative)
        for path in SOURCES
        for name, relative in imported(parse(path), path.parent)
    ]


def own(names: Iterable[str]) -> list[str]:
    """Keep the imports of this package, without its name."""
    return [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]


# ----- CONTRIBUTING -----


def test_every_room_has_a_floor():
    assert set().union(*FLOORS) == {room(module_name(path)) for path in SOURCES} - {"", "__init__"}


def test_imports_point_down():
    pairs = [(module, target) for module, name, _ in imports() for target in own([name])]
    assert [pair for pair in pairs if not allowed(*pair)] == []


def test_imports_are_relative_within_a_room_and_absolute_across():
    folders = {module_name(path) for path in SOURCES if path.parent != PACKAGE}
    wrong = [
        (module, target)
        for module, name, relative in imports()
        for target in own([name])
        if relative != (module in folders and target.startswith(f"{room(module)}."))
    ]
    assert wrong == []


def test_only_some_rooms_see_the_whole_job():
    whole = {"config.Config", "config.sections.Config", "config.job.Job"}
    seen = {room(module) for module, name, _ in imports() if whole & {*own([name])}}
    assert seen - SEE_THE_JOB == set()


def test_an_import_in_a_function_is_late_or_of_a_heavy_dependency():
    found = {
        (module_name(path), name)
        for path in SOURCES
        if room(module_name(path)) != "cli"  # a command's help does not wait for its imports
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef)
        for name in own(name for name, _ in imported(node, path.parent))
    }
    assert found == LATE


def test_a_script_imports_no_other_script():
    paths = sorted(ROOT.glob("scripts/*.py"))
    scripts = {path.stem for path in paths} | {"scripts"}
    found = {room(name) for path in paths for name, _ in imported(parse(path), path.parent)}
    assert scripts & found == set()


def test_the_rule():
    """Rooms of one floor are apart."""
    may = [("train", "training"), ("metrics.flops", "catalog.recipes"), ("planner.a", "planner.b")]
    may_not = [("training", "train"), ("float8.convert", "metrics.flops"), ("base", "catalog.x")]
    may_not += [("config.checks", "data.sources"), ("catalog.flavors", "base.errors")]
    assert [allowed(*pair) for pair in may + may_not] == [True] * 3 + [False] * 5


# ----- config, launch, cli, train: what they load -----


LOADED = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(f"torchtitan_lite.{name}")
print({"torch", "torchao", "numpy"} & {*sys.modules})
from torchtitan_lite.cli import *
format_commands(), [build_parser(name).format_help() for name in COMMANDS]
print({"torch", "torchao"} & {*sys.modules})
"""
TRAIN = """
import gc, runpy, sys
seen = []
sys.addaudithook(lambda event, args: event == "import" and args[0] == "torch.distributed"
                 and seen.append(gc.isenabled()))
sys.argv = ["train", "--help"]
runpy.run_module("torchtitan_lite.train", run_name="__main__")
heavy = {"torchao", "torch._inductor.compile_fx", "torch._functorch.partitioners", "networkx",
         "tensorboard", "wandb", "safetensors"}
heavy |= {f"torchtitan_lite.data.{name}" for name in ("store_writer", "sources", "rows")}
heavy |= {f"torchtitan_lite.{name}" for name in ("training.profiling", "training.samples",
          "models.generate", "parallel.pipeline", "training.bfloat16_adamw", "float8.numerics",
          "float8.graph_passes", "metrics.stage_times", "parallel.context_parallel",
          "parallel.tensor_parallel", "models.hf_llama")}
heavy |= {"torch.distributed.pipelining.schedules"}
print(heavy & {*sys.modules}, seen[0], gc.isenabled(), gc.get_freeze_count() > 100_000)
"""


def printed(code: str, *args: str) -> list[str]:
    """Return the lines that Python code prints."""
    command = [sys.executable, "-c", code, *args]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return result.stdout.splitlines()


def test_configs_are_checked_and_help_is_printed_without_torch():
    assert printed(LOADED, *WITHOUT_TORCH) == ["set()", "set()"]


def test_train_loads_nothing_slow_and_collects_no_garbage_while_it_loads():
    assert printed(TRAIN)[-1] == "set() False True True"
