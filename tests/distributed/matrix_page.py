"""Trains the cells of matrix.py, which takes about two hours on two cores, and writes the page of
what came of them: `python tests/distributed/matrix_page.py FOLDER > docs/float8_matrix.md`. Started
again, it goes on in FOLDER. Of layouts whose ranks share sequences, and of pipelines, it trains few
cells, in which every pair of values occurs."""

import datetime
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path

import matrix

STEPS = 20
Cells = Sequence[matrix.Cell]
HEAD = """# What trains as one process does

Trained on {date} by `python tests/distributed/matrix_page.py FOLDER > docs/float8_matrix.md` on
{machine}, with torch {torch} and torchao {torchao}, on CPU by gloo.
`tests/distributed/test_matrix.py` runs some of the cells.

A model of 2 blocks (dim 128, 8 heads, 4 key-value heads, feed-forward 192, vocabulary 2256) trains
on global batches of 4 sequences of 64 tokens, {steps} steps. A figure is the largest relative
difference of a step's loss from one process with the same recipe, eager and without activation
checkpointing; above {tolerance:.0e} it is a fault, as is one of the gradient's norm above
{norm_tolerance:.0e}. `all_gather` is tensorwise with float8 all-gathers of weights and precomputed
scales.
"""


def machine() -> str:
    """The processor and the number of cores that this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    return f"{len(os.sched_getaffinity(0))} cores of {model}"


def trained_on(cells: Cells, folder: Path) -> datetime.date:
    """The day (UTC) on which the last of `cells` ended."""
    ends = [folder / cell.name / "ended.txt" for cell in cells]
    last = max(end.stat().st_mtime for end in ends if end.exists())
    return datetime.datetime.fromtimestamp(last, datetime.timezone.utc).date()


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def shown(cell: matrix.Cell, folder: Path, *, of: str = "loss") -> str:
    """The deviation of a cell; what else came of it, if it was not trained."""
    ended = matrix.outcome(cell, folder)
    if ended is None:
        return "failed"
    return "refused" if ended else f"{matrix.deviation(cell, folder, of=of):.1e}"


def matrix_table(cells: Cells, folder: Path) -> str:
    """A row for each recipe, layout and schedule, if there are any, and a column for each mode and
    activation checkpointing; empty where there is no cell."""
    rows: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
    for cell in cells:
        recipe, layout, ac, mode, *schedule = cell.factors
        row = rows.setdefault((recipe, layout, *schedule, str(cell.processes)), {})
        row[mode, ac] = shown(cell, folder)
    used = set().union(*rows.values())
    orders = product(matrix.MODES, matrix.CHECKPOINTING | matrix.CONTEXT_CHECKPOINTING)
    columns = [column for column in orders if column in used]
    names = ["recipe", "layout", *["schedule"] * len(schedule), "processes"]
    return table(
        [*names, *(f"{mode}, {ac}" for mode, ac in columns)],
        ([*names, *(row.get(column, "") for column in columns)] for names, row in rows.items()),
    )


def largest(cells: Cells, folder: Path) -> str:
    """Where the loss, and where the gradient's norm, differs most from the reference's."""
    trained = [cell for cell in cells if matrix.outcome(cell, folder) == ""]
    sentences = []
    for of, name in (("loss", "loss"), ("grad_norm", "norm of the gradient")):
        worst = max(trained, key=lambda cell, of=of: matrix.deviation(cell, folder, of=of))
        figure = shown(worst, folder, of=of)
        sentences.append(f"The {name} differs most, by {figure}, in `{worst.name}`.")
    return " ".join(sentences)


def vocabulary_table(folder: Path) -> str:
    """A row for each vocabulary and degree of tensor parallelism."""
    cells = {(cell.factors, cell.processes): cell for cell in matrix.vocabulary_cells()}
    columns = list(product(matrix.MODES, matrix.LOSS))
    rows = []
    for name, (_, degrees) in matrix.VOCABULARIES.items():
        for degree in degrees:
            of_row = [cells[(name, loss, mode), degree] for mode, loss in columns]
            rows.append([name, str(degree), *(shown(cell, folder) for cell in of_row)])
    names = [f"{mode}, {loss}" for mode, loss in columns]
    return table(["vocabulary", "tensor parallelism", *names], rows)


CONTEXT = """## Context parallelism

The same where ranks share sequences. Few cells have every pair of a recipe, a layout, an activation
checkpointing and a mode; the others are empty. `bf16 documents` trains with a document mask on
documents of 16 to 43 tokens, which begin and end anywhere in a rank's part. The learning rate is at
most 1e-3: with 2e-3, which magnifies rounding, the same cells differ by up to 5.0e-04, and 1.1e-03
in the norm, and one process about as much with other sizes of microbatches."""
PIPELINES = """## Pipelines

Pipelines of a model with 8 blocks. A step has 4 microbatches of one sequence, with `FSDP` 2 on each
data-parallel rank. A pipeline has a stage for each rank, with the `Interleaved` schedule two. The
cells contain every pair of a recipe, a layout, a schedule, an activation checkpointing and a mode;
the others are empty. A figure compares with one process of the same checkpointing and mode, because
with 8 blocks the compiler alone changes the loss by up to 1.5e-03. The learning rate is at most
5e-4: at 1e-3 the norm differs by up to 1.6e-03, and on one process with other sizes of microbatches
by 2.2e-03."""


def section(head: str, cells: Cells, folder: Path) -> str:
    """What came of `cells`, under a `head`."""
    return f"""{head} Trained on {trained_on(cells, folder)} on {machine()}.

{matrix_table(cells, folder)}
{largest(cells, folder)}
"""


def page(folder: Path, context: Cells, pipelines: Cells, *, steps: int) -> str:
    """The whole page, from the results in `folder`: the cells of the matrix after `steps`,
    `context`, those of ranks that share sequences, and `pipelines`."""
    cells = matrix.matrix_cells(steps=steps)
    facts = {name: version(name) for name in ("torch", "torchao")}
    facts |= {"date": trained_on(cells, folder), "machine": machine(), "steps": steps}
    facts |= {"tolerance": matrix.TOLERANCE, "norm_tolerance": matrix.NORM_TOLERANCE}
    head = HEAD.format(**facts)
    return f"""{head}
{matrix_table(cells, folder)}
{largest(cells, folder)}

{section(CONTEXT, context, folder)}
{section(PIPELINES, pipelines, folder)}
## Vocabularies

Three steps of tensorwise float8 with vocabularies that tensor parallelism splits unevenly, or not
into multiples of 16; and with one whose projection, `output`, is converted too.

{vocabulary_table(folder)}"""


def main() -> None:
    """Train what is not trained yet, and print the page."""
    folder = Path(sys.argv[1])
    context = matrix.usual_pairs(matrix.context_cells(steps=STEPS))
    pipelines = matrix.pairwise(matrix.pipeline_cells(steps=STEPS))
    cells = [*matrix.matrix_cells(steps=STEPS), *context, *pipelines, *matrix.vocabulary_cells()]
    failed = matrix.train_cells(cells, folder)
    print(page(folder, context, pipelines, steps=STEPS), end="")
    for name, output in failed.items():
        print(f"{name} failed:\n{output}", file=sys.stderr)
    sys.exit(len(failed) > 0)


if __name__ == "__main__":
    main()
