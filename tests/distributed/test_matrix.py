"""The loss is one process's for every pair of a recipe, a layout, an activation checkpointing and a
mode, of pipelines with a schedule, and for every vocabulary."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import matrix
import pytest
from launching import ENV, read_losses, read_records

pytestmark = pytest.mark.timeout(1800)
STEPS = 5
# Few, as they take minutes. MATRIX trains the other recipes, and its layouts have HSDP.
SOME_RECIPES = ("all_gather", "bf16 documents")
SOME_LAYOUTS = ("CP", "CP x TP")
# Each process compiles: so few, on as few processes as there are.
COMPILED = {
    ("bf16", "FSDP", "none"): 2,
    ("tensorwise", "HSDP", "full"): 2,
    ("all_gather", "TP", "op"): 2,
    ("all_gather", "FSDP x TP", "full"): 4,
    ("rowwise", "FSDP", "every 2nd"): 2,
    ("rowwise_with_gw_hp", "FSDP", "none"): 2,
}
COMPILED_CONTEXT = {
    ("all_gather", "CP", matrix.BUDGET),
    ("bf16 documents", "CP", "op"),
}
MATRIX = matrix.pairwise(
    [
        cell
        for cell in matrix.matrix_cells(steps=STEPS)
        for recipe, layout, ac, mode in [cell.factors]
        if cell.processes
        == (matrix.USUAL[layout] if mode == "eager" else COMPILED.get((recipe, layout, ac)))
    ]
)
CONTEXT = matrix.usual_pairs(
    cell
    for cell in matrix.context_cells(steps=STEPS)
    for recipe, layout, ac, mode in [cell.factors]
    if recipe in SOME_RECIPES and layout in SOME_LAYOUTS
    if mode == "eager" or (recipe, layout, ac) in COMPILED_CONTEXT
)
# On two processes pairs of all values, compiled of one recipe, checkpointing and schedule. On four
# what costs little.
PIPELINES = matrix.pairwise(
    [
        cell
        for cell in matrix.pipeline_cells(steps=STEPS)
        for recipe, _, ac, mode, schedule in [cell.factors]
        if recipe in SOME_RECIPES
        and (mode == "eager" or (recipe, ac, schedule) == ("all_gather", "op", "Interleaved1F1B"))
        and (cell.processes == 2 or mode == "eager")
    ]
)
TRAINED = [*MATRIX, *CONTEXT, *PIPELINES]
# From the compiler's cache, which ranks share, and where each must find its own code: else the loss
# is off by 5 %.
AGAIN = [
    replace(cell, factors=(*cell.factors, "again"))
    for cell in [*MATRIX, *CONTEXT]
    if cell.factors[:2] in {("all_gather", "TP"), ("bf16 documents", "CP")}
    and "compile" in cell.factors
]
VOCABULARIES = [
    cell for cell in matrix.vocabulary_cells() if "eager" in cell.factors and cell.processes <= 4
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the cells were trained."""
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module", autouse=True)
def failed(folder: Path) -> dict[str, str]:
    """What was printed of the cells that did not end."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(ENV, "TORCHINDUCTOR_CACHE_DIR", str(folder / "cache"))
        return matrix.train_cells([*TRAINED, *VOCABULARIES, *AGAIN], folder)


# ----- pairwise -----
def test_pairwise_keeps_every_pair_of_values() -> None:
    cells = [matrix.Cell(factors, 1, ()) for factors in product("abc", "de", "fgh", "ij")]
    few = matrix.pairwise(cells)
    assert len(few) < len(cells) / 3
    assert set().union(*map(matrix.pairs, few)) == set().union(*map(matrix.pairs, cells))

    values = {factor for cell in MATRIX for factor in cell.factors}
    assert values == {*matrix.RECIPES, *matrix.LAYOUTS, *matrix.CHECKPOINTING, *matrix.MODES}


# ----- Trainer, parallelize -----


@pytest.mark.parametrize("cell", [*TRAINED, *VOCABULARIES, *AGAIN], ids=lambda cell: cell.name)
def test_a_cell_trains_as_one_process_does(
    cell: matrix.Cell, folder: Path, failed: dict[str, str]
) -> None:
    assert not matrix.crash(cell, failed), matrix.crash(cell, failed)
    assert matrix.outcome(cell, folder) == ""
    assert cell.reference is not None
    alone = read_losses(folder / cell.reference.name)
    assert alone[-1] < alone[0] - 0.1
    assert matrix.deviation(cell, folder) < matrix.TOLERANCE
    # 4e-3 where the embedding alone got no gradient.
    assert matrix.deviation(cell, folder, of="grad_norm") < matrix.TOLERANCE


def test_every_recipe_has_its_own_numerics(folder: Path) -> None:
    alone = {
        cell.factors[0]: read_losses(folder / cell.reference.name)
        for cell in [*MATRIX, *CONTEXT]
        if cell.reference is not None
    }
    assert len(alone) == len({tuple(curve) for curve in alone.values()}) == len(matrix.RECIPES) + 1


def test_mfu_counts_the_same_documents_on_any_layout(folder: Path) -> None:
    def share(cell: matrix.Cell) -> list[float]:
        return [line["mfu_documents"] / line["mfu"] for line in read_records(folder / cell.name)]

    for cell in [*CONTEXT, *PIPELINES]:
        if cell.factors[0] == "bf16 documents":
            assert cell.reference is not None
            alone = share(cell.reference)
            assert share(cell) == pytest.approx(alone) and max(alone) < 0.99
