"""MXFP8 on two ranks gives the losses of one: blocks of 32 do not cross ranks, which compute on
what they have."""

import pytest
from launching import read_losses, train_together
from matrix import RECIPES, TOLERANCE, TP

MXFP8 = ["--float8.enable_float8_linear", "--float8.recipe_name=mxfp8"]
OP = "--activation_checkpoint.mode=selective"
LAYOUTS = {"FSDP, op, compiled": [OP, "--compile.enable"], "TP, op": [f"{TP}=2", OP]}


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of MXFP8 on one process and by layout on two, and of other recipes on one."""
    folder = tmp_path_factory.mktemp("runs")
    alone = {"alone": MXFP8} | {recipe: RECIPES[recipe] for recipe in ("bf16", "tensorwise")}
    shared = {layout: [*MXFP8, *overrides] for layout, overrides in LAYOUTS.items()}
    for processes, runs in enumerate((alone, shared), start=1):
        runs = {name: [*run, "--training.steps=3"] for name, run in runs.items()}
        train_together(folder, runs, processes=processes)
    return {name: read_losses(folder / name) for name in (*alone, *shared)}


# ----- MXFP8Linear -----


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_train_as_one_does(layout: str, curves: dict[str, list[float]]) -> None:
    assert curves[layout] == pytest.approx(curves["alone"], rel=TOLERANCE)


def test_it_is_neither_bf16_nor_tensorwise(curves: dict[str, list[float]]) -> None:
    alone = curves["alone"]
    assert len({tuple(curve) for curve in (alone, curves["bf16"], curves["tensorwise"])}) == 3
    assert alone == pytest.approx(curves["bf16"], rel=2e-3)
