"""A few runs train as one process does: every recipe and layout once. test_matrix.py has their
combinations."""

from pathlib import Path

import pytest
from matrix import (
    BUDGET,
    CHECKPOINTING,
    CONTEXT_LAYOUTS,
    LAYOUTS,
    MODES,
    MUON,
    PIPELINE_LAYOUTS,
    RECIPES,
    TOLERANCE,
    Cell,
    crash,
    deviation,
    outcome,
    smoke_cells,
    train_cells,
)

pytestmark = [pytest.mark.quick, pytest.mark.timeout(600)]
CELLS = smoke_cells(steps=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs."""
    return tmp_path_factory.mktemp("smoke")


@pytest.fixture(scope="module")
def failed(folder: Path) -> dict[str, str]:
    """What the processes printed that did not reach the end of a cell, by its name."""
    return train_cells(CELLS, folder)


# ----- smoke_cells -----


def test_smoke_cells_have_every_value() -> None:
    values = {factor for cell in CELLS for factor in cell.factors}
    wanted = {
        *RECIPES,
        *MUON,
        *LAYOUTS,
        *CONTEXT_LAYOUTS,
        *PIPELINE_LAYOUTS,
        *CHECKPOINTING,
        *MODES,
    }
    assert wanted - values == {"PP 4"}  # needs as many processes for one degree
    assert BUDGET in values


# ----- Trainer -----
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_trainer_trains_as_on_one_process(cell: Cell, folder: Path, failed: dict[str, str]) -> None:
    assert not crash(cell, failed), crash(cell, failed)
    assert outcome(cell, folder) == ""
    assert deviation(cell, folder) < TOLERANCE
    assert deviation(cell, folder, of="grad_norm") < TOLERANCE
