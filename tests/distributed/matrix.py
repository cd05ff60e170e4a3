"""Runs that are to train as one process does: every recipe, layout, activation checkpointing and
mode; the same with ranks that share sequences, and with pipelines of every schedule; and
vocabularies under tensor parallelism. The tests train few of each.

`python tests/distributed/matrix.py FOLDER` trains all of them in about two hours on two cores, but
only few of those with shared sequences or pipelines, in which every pair of values occurs, and
prints the table of docs/float8_matrix.md. Started again, it goes on in FOLDER."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product
from pathlib import Path
from types import MappingProxyType

from launching import FOLDER, read_records, torchrun

from torchtitan_lite.catalog import schedules

FLOAT8 = "--float8.enable_float8_linear"
FLOAT8_GATHER = (FLOAT8, "--float8.enable_fsdp_float8_all_gather")
PRECOMPUTE = "--float8.precompute_float8_dynamic_scale_for_fsdp"
RECIPES = {
    "bf16": (),
    "tensorwise": (FLOAT8,),
    "all_gather": (*FLOAT8_GATHER, PRECOMPUTE),
    "rowwise": (FLOAT8, "--float8.recipe_name=rowwise"),
    "rowwise_with_gw_hp": (FLOAT8, "--float8.recipe_name=rowwise_with_gw_hp"),
}
MXFP8 = (FLOAT8, "--float8.recipe_name=mxfp8")
BLOCKWISE = (
    *(FLOAT8, "--float8.recipe_name=blockwise"),
    *("--model.flavor=blocks", "--training.seq_len=256", "--optimizer.lr=5e-4"),
)
"""Of a model and of sequences whose parts on two ranks are multiples of 128. A higher learning rate
magnifies rounding."""
DOCUMENTS = (
    "--training.document_mask",
    "--training.dataset_path=tests/distributed/documents.jsonl",
)
"""Of a few tokens each, which begin and end anywhere in a sequence."""
MUON = {
    "Muon": ("--optimizer.name=Muon",),
    "Muon all_gather": ("--optimizer.name=Muon", *RECIPES["all_gather"]),
}
"""An optimizer, like a recipe."""
CP = "--parallelism.context_parallel_degree"
TP = "--parallelism.tensor_parallel_degree"
HSDP = "--parallelism.data_parallel_replicate_degree=2"
TWO = "--training.local_batch_size=2"  # half of the sequences: fewer microbatches cost less
LAYOUTS = {
    "FSDP": {1: (), 2: (), 4: ()},
    "HSDP": {2: (HSDP,), 4: (HSDP,)},
    "TP": {2: (f"{TP}=2", TWO), 4: (f"{TP}=4", TWO)},
    "FSDP x TP": {4: (f"{TP}=2", TWO)},
}
"""Overrides by the number of processes."""
MORE_LAYOUTS = {"HSDP x TP": {4: (f"{TP}=2", HSDP, TWO)}}
"""Tested, but not in the table."""
CONTEXT_LAYOUTS = {
    "CP": {2: (f"{CP}=2", TWO), 4: (f"{CP}=4", TWO)},
    "CP x TP": {4: (f"{CP}=2", f"{TP}=2", TWO)},
    "FSDP x CP": {4: (f"{CP}=2",)},
    "HSDP x CP": {4: (f"{CP}=2", HSDP)},
}
PP = "--parallelism.pipeline_parallel_degree"
MICROBATCH = "--parallelism.pipeline_parallel_microbatch_size"
EVENLY = tuple(
    f"--parallelism.pipeline_parallel_{end}_stage_less_layers=0" for end in ("first", "last")
)
"""As many blocks in the first and the last stage of a pipeline as in the others."""
PIPELINE_LAYOUTS = {
    "PP 2": (2, (f"{PP}=2",)),
    "PP 4": (4, (f"{PP}=4",)),
    "PP 2 x FSDP": (4, (f"{PP}=2",)),
    "PP 2 x TP": (4, (f"{PP}=2", f"{TP}=2")),
    "PP 2 x CP": (4, (f"{PP}=2", f"{CP}=2")),
}
"""The number of processes, and overrides."""
MORE_PIPELINE_LAYOUTS = {"PP 2 x HSDP": (4, (f"{PP}=2", HSDP))}
"""Tested, but not in the table."""
PIPELINE_MODEL = ("--model.n_layers=8", "--optimizer.lr=5e-4")
"""Two blocks in each of 4 stages, or one in each of 8, which 4 ranks of a looped schedule have; and
half of LR, as more blocks magnify rounding more."""
SCHEDULES = {
    name: (f"--parallelism.pipeline_parallel_schedule={name}",) for name in schedules.SCHEDULES
}
AC = "--activation_checkpoint.mode"
CHECKPOINTING = {
    "none": (f"{AC}=none",),
    "full": (f"{AC}=full",),
    "op": (f"{AC}=selective", "--activation_checkpoint.selective_ac_option=op"),
    "every 2nd": (f"{AC}=selective", "--activation_checkpoint.selective_ac_option=2"),
}
BUDGET = "memory budget"
PIPELINE_CHECKPOINTING = {ac: CHECKPOINTING[ac] for ac in ("none", "full", "op")}
CONTEXT_CHECKPOINTING = {
    **PIPELINE_CHECKPOINTING,
    BUDGET: (f"{AC}=memory_budget", "--activation_checkpoint.memory_budget=0.3"),
}
USUAL = dict.fromkeys((*LAYOUTS, *CONTEXT_LAYOUTS), 4) | dict.fromkeys(("FSDP", "TP", "CP"), 2)
"""The fewest processes on which a layout does all that it does."""
MODES = {"eager": (), "compile": ("--compile.enable",)}
LOSS = {"loss parallel": (), "logits gathered": ("--parallelism.disable_loss_parallel",)}
VOCABULARIES = {
    "2256": ((), (2, 4, 8)),
    "32000": ((), (4,)),
    "32000 converted": (("--float8.convert_output",), (4,)),
    "50257": ((), (2, 4)),
}
"""Overrides, and degrees of tensor parallelism: of 2256 two shards are a multiple of 16, of 50257
none are alike."""
STEPS = "--training.steps"
LR = "--optimizer.lr=1e-3"
"""Of the matrix: a higher one magnifies rounding, within 20 steps beyond TOLERANCE."""
TOLERANCE = 5e-4
"""By which a loss may differ from that of the reference, relative to it."""
NORM_TOLERANCE = 1e-3
"""The same of a gradient's norm."""
CHUNK = 20
"""Runs in one start of the processes."""


SMOKE = [
    ("tensorwise", "FSDP", "op", "compile", 2),
    ("bf16", "CP", BUDGET, "compile", 2),
    ("rowwise", "TP", "every 2nd", "eager", 2),
    ("rowwise_with_gw_hp", "HSDP", "op", "eager", 4),
    ("all_gather", "FSDP x TP", "full", "eager", 4),
    ("tensorwise", "HSDP x TP", "none", "eager", 4),
    ("bf16 documents", "CP x TP", "none", "eager", 4),
    ("all_gather", "FSDP x CP", "op", "eager", 4),
    ("mxfp8", "HSDP x CP", "none", "eager", 4),
    ("blockwise", "FSDP x TP", "op", "eager", 4),
    ("bf16 documents", "PP 2", "none", "eager", "GPipe", 2),
    ("all_gather", "PP 2 x FSDP", "op", "eager", "1F1B", 4),
    ("all_gather", "PP 2 x TP", "op", "eager", "Interleaved1F1B", 4),
    ("bf16 documents", "PP 2 x CP", "none", "eager", "1F1B", 4),
    ("bf16 documents", "PP 2 x HSDP", "none", "eager", "Interleaved1F1B", 4),
    ("Muon", "FSDP x TP", "none", "eager", 4),
    ("Muon all_gather", "HSDP x CP", "full", "eager", 4),
    ("Muon", "PP 2 x FSDP", "none", "eager", "1F1B", 4),
]
"""Recipe, layout, checkpointing, mode, of a pipeline also the schedule, and processes."""


@dataclass(frozen=True)
class Cell:
    """A run, named by a value of each factor and its number of processes, that is to train as
    `reference` does."""

    factors: tuple[str, ...]
    processes: int
    overrides: tuple[str, ...]
    reference: "Cell | None" = None

    @property
    def name(self) -> str:
        """Of the run's folder."""
        return "-".join((*self.factors, str(self.processes))).replace(" ", "_")


Overrides = Mapping[str, tuple[str, ...]]


def matrix_cells(*, steps: int) -> list[Cell]:
    """Each recipe, layout on each number of processes, checkpointing and mode."""
    return combine(RECIPES, LAYOUTS, CHECKPOINTING, steps=steps)


def context_cells(*, steps: int) -> list[Cell]:
    """The same with ranks that share sequences; and masked documents like a recipe."""
    recipes = RECIPES | {"bf16 documents": DOCUMENTS}
    return combine(recipes, CONTEXT_LAYOUTS, CONTEXT_CHECKPOINTING, steps=steps)


def blockwise_cells(*, steps: int) -> list[Cell]:
    """Return a cell for each layout, checkpointing and mode of blockwise."""
    layouts = LAYOUTS | CONTEXT_LAYOUTS
    return combine({"blockwise": BLOCKWISE}, layouts, CHECKPOINTING, steps=steps)


def pipeline_cells(
    layouts: Mapping[str, tuple[int, tuple[str, ...]]] = PIPELINE_LAYOUTS,
    more_recipes: Overrides = MappingProxyType({}),
    *,
    steps: int,
) -> list[Cell]:
    """Return a cell for each combination of some recipes, a pipeline, checkpointing, mode and
    schedule. Its reference has the same checkpointing and mode: what the compiler rounds otherwise
    adds up over 8 blocks."""
    recipes = {name: RECIPES[name] for name in ("bf16", "all_gather", "rowwise")}
    recipes |= {"bf16 documents": DOCUMENTS, **more_recipes}
    cells = []
    for recipe, ac, mode in product(recipes, PIPELINE_CHECKPOINTING, MODES):
        settings = (*recipes[recipe], *PIPELINE_CHECKPOINTING[ac], *MODES[mode])
        common = (*settings, *PIPELINE_MODEL, f"{STEPS}={steps}")
        alone = Cell((recipe, "one process", "8 blocks", ac, mode), 1, common)
        for layout, schedule in product(layouts, SCHEDULES):
            processes, degrees = layouts[layout]
            overrides = (*common, *degrees, *EVENLY, *SCHEDULES[schedule])
            cells.append(Cell((recipe, layout, ac, mode, schedule), processes, overrides, alone))
    return cells


def combine(
    recipes: Overrides,
    layouts: Mapping[str, Mapping[int, tuple[str, ...]]],
    checkpointing: Overrides,
    *,
    steps: int,
) -> list[Cell]:
    """Return a cell for each combination of the values and MODES; a memory budget is for the
    compiler."""
    cells = []
    for recipe, layout, ac, mode in product(recipes, layouts, checkpointing, MODES):
        common = (f"{STEPS}={steps}", LR, *recipes[recipe])
        alone = Cell((recipe, "one process"), 1, (*common, *CHECKPOINTING["none"]))
        for processes, degrees in layouts[layout].items():
            overrides = (*common, *degrees, *checkpointing[ac], *MODES[mode])
            if (ac, mode) != (BUDGET, "eager"):
                cells.append(Cell((recipe, layout, ac, mode), processes, overrides, alone))
    return cells


def smoke_cells(*, steps: int) -> list[Cell]:
    """Return a few cells in which every recipe, optimizer, layout, product of two degrees, mode,
    checkpointing and kind of schedule occurs."""
    recipes = RECIPES | {"bf16 documents": DOCUMENTS, "mxfp8": MXFP8, "blockwise": BLOCKWISE} | MUON
    layouts = LAYOUTS | MORE_LAYOUTS | CONTEXT_LAYOUTS
    all_cells = [
        *combine(recipes, layouts, CHECKPOINTING | CONTEXT_CHECKPOINTING, steps=steps),
        *pipeline_cells(PIPELINE_LAYOUTS | MORE_PIPELINE_LAYOUTS, MUON, steps=steps),
    ]
    found = {(*cell.factors, cell.processes): cell for cell in all_cells}
    return [found[row] for row in SMOKE]


def usual_pairs(cells: Iterable[Cell]) -> list[Cell]:
    """Few of `cells` on USUAL processes that have every pair of values."""
    return pairwise([cell for cell in cells if cell.processes == USUAL[cell.factors[1]]])


def vocabulary_cells() -> list[Cell]:
    """Each vocabulary and degree of tensor parallelism, with and without loss parallelism, in each
    mode."""
    cells = []
    for name, (overrides, degrees) in VOCABULARIES.items():
        flavor = f"--model.flavor=vocab-{name.split()[0]}"
        # The global batch at once, as all ranks share it.
        common = (FLOAT8, *overrides, flavor, "--training.local_batch_size=4", f"{STEPS}=3")
        alone = Cell((name, "", "eager"), 1, common)
        for degree, loss, mode in product(degrees, LOSS, MODES):
            split = (*common, f"{TP}={degree}", *LOSS[loss], *MODES[mode])
            cells.append(Cell((name, loss, mode), degree, split, alone))
    return cells


def pairs(cell: Cell) -> set[tuple[tuple[int, str], ...]]:
    """The pairs of values of two factors that a cell has."""
    return set(combinations(enumerate(cell.factors), 2))


def pairwise(cells: Sequence[Cell]) -> list[Cell]:
    """Few of `cells`, in their order, that have every pair that any of them has: again and again
    the one with the most pairs that are missing, of these an eager one, of these one of the fewest
    processes, and of these the first."""
    missing = set().union(*map(pairs, cells))
    chosen = set()

    def rank(cell: Cell) -> tuple[int, bool, int]:
        return len(missing & pairs(cell)), "eager" in cell.factors, -cell.processes

    while missing:
        best = max(cells, key=rank)
        chosen.add(best)
        missing -= pairs(best)
    return [cell for cell in cells if cell in chosen]


def outcome(cell: Cell, folder: Path) -> str | None:
    """Why the run of a cell was refused; "" if it was done, None if it has not ended."""
    ended = folder / cell.name / "ended.txt"
    return ended.read_text() if ended.exists() else None


def train_cells(cells: Iterable[Cell], folder: Path) -> dict[str, str]:
    """Train in `folder` those of `cells`, and of their references, that have not ended there.
    Returns what processes printed that did not reach the end of a cell, by its name."""
    wanted = dict.fromkeys(
        each for cell in cells for each in (cell.reference, cell) if each is not None
    )
    failed: dict[str, str] = {}

    def left(among: Iterable[Cell]) -> list[Cell]:
        return [cell for cell in among if cell.name not in failed and outcome(cell, folder) is None]

    for processes in sorted({cell.processes for cell in wanted}):
        while now := left(cell for cell in wanted if cell.processes == processes)[:CHUNK]:
            runs = {cell.name: cell.overrides for cell in now}
            worker = (str(FOLDER / "matrix_worker.py"), str(folder), json.dumps(runs))
            result = torchrun(*worker, processes=processes, timeout=300 * len(runs))
            failed |= {
                cell.name: result.stdout[-4000:] + result.stderr[-20_000:] for cell in left(now)[:1]
            }
            print(f"{len(left(wanted))} of {len(wanted)} left", file=sys.stderr)
    return failed


def whole_and_in_parts(name: str, words: Sequence[str], *, folder: Path) -> dict[str, list[str]]:
    """Runs in `folder` with the overrides `words`: of 8 steps, and of 4 that go on to 8."""
    resumed = f"--job.dump_folder={folder}/{name} in parts"
    return {
        f"{name} whole": [*words, f"{STEPS}=8"],
        f"{name} in parts": [*words, f"{STEPS}=4"],
        f"{name} resumed": [*words, f"{STEPS}=8", resumed],
    }


def crash(cell: Cell, failed: dict[str, str]) -> str:
    """What train_cells returned of a cell or of its reference; "" if both ended."""
    printed = [failed.get(each.name, "") for each in (cell.reference, cell) if each is not None]
    return "".join(printed)


def deviation(cell: Cell, folder: Path, *, of: str = "loss") -> float:
    """The largest difference of a step from that of the reference, relative to it."""
    assert cell.reference is not None
    trained, expected = (read_records(folder / each.name) for each in (cell, cell.reference))
    return max(abs(a[of] / b[of] - 1) for a, b in zip(trained, expected, strict=True))


def table_groups(*, steps: int) -> dict[str, list[Cell]]:
    """Return the cells of each row of the table."""
    return {
        "recipes and layouts": matrix_cells(steps=steps),
        "context parallelism": usual_pairs(context_cells(steps=steps)),
        "pipelines": pairwise(pipeline_cells(steps=steps)),
        "vocabularies": vocabulary_cells(),
        "blockwise": usual_pairs(blockwise_cells(steps=steps)),
    }


def main() -> None:
    """Train what is not trained yet, and print the largest deviations of each group."""
    folder, groups = Path(sys.argv[1]), table_groups(steps=20)
    failed = train_cells(chain(*groups.values()), folder)
    for name, output in failed.items():
        print(f"{name} failed:\n{output}", file=sys.stderr)
    print("| group | runs | loss | norm of the gradient |\n| --- | --- | --- | --- |")
    for name, cells in groups.items():
        trained = [cell for cell in cells if outcome(cell, folder) == ""]
        worst = (
            max(deviation(cell, folder, of=of) for cell in trained) for of in ("loss", "grad_norm")
        )
        print("|", " | ".join([name, str(len(trained)), *(f"{each:.1e}" for each in worst)]), "|")


if __name__ == "__main__":
    main()
