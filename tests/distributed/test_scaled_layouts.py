"""ScaledLinears on two ranks give the losses of one: blocks do not cross ranks, which compute on
what they have."""

from itertools import product

import pytest
from launching import read_losses, train_together
from matrix import BLOCKWISE, MXFP8, PP, TOLERANCE, TP, TWO

pytestmark = pytest.mark.timeout(900)
RECIPES = {"mxfp8": MXFP8, "blockwise": BLOCKWISE}
OP = "--activation_checkpoint.mode=selective"
LAYOUTS = {"FSDP, op, compiled": [OP, "--compile.enable"], "TP, op": [f"{TP}=2", TWO, OP]}
MORE_LAYOUTS = {
    "FSDP, never": ["--parallelism.fsdp_reshard_after_forward=never"],
    "PP": [f"{PP}=2"],
}
"""Of one of the recipes, as they pay no heed to casts."""
OTHERS = {
    "bf16": ["--float8.enable_float8_linear=false"],
    "tensorwise": ["--float8.recipe_name=tensorwise"],
}
Curves = dict[str, dict[str, list[float]]]


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> Curves:
    """Losses of each of RECIPES on one process and by layout on two, and of OTHERS on one."""
    found: Curves = {}
    for recipe, words in RECIPES.items():
        folder, more = (
            tmp_path_factory.mktemp(recipe),
            MORE_LAYOUTS if recipe == "blockwise" else {},
        )
        settings = {1: {"alone": []} | OTHERS, 2: LAYOUTS | more}
        for processes, each in settings.items():
            runs = {name: [*words, *own, "--training.steps=3"] for name, own in each.items()}
            train_together(folder, runs, processes=processes)
        found[recipe] = {
            name: read_losses(folder / name) for each in settings.values() for name in each
        }
    return found


# ----- ScaledLinear -----


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [*product(RECIPES, LAYOUTS), *product(["blockwise"], MORE_LAYOUTS)],
)
def test_two_processes_train_as_one_does(recipe: str, layout: str, curves: Curves) -> None:
    found = curves[recipe]
    assert found[layout] == pytest.approx(found["alone"], rel=TOLERANCE)


# ----- MXFP8, Blockwise -----
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_neither_bf16_nor_tensorwise(recipe: str, curves: Curves) -> None:
    found = curves[recipe]
    alone = found["alone"]
    assert len({tuple(found[name]) for name in ("alone", *OTHERS)}) == 3
    assert alone == pytest.approx(found["bf16"], rel=2e-3)
