"""The matmuls of one linear on float8 units: what their emulation computes, compiled or not."""

import pytest
import torch
from gemms import RECIPES, exact_gemms, make_data, run_linear, sqnr

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SAME_CASTS = 40.0
"""dB between two ways to multiply the same float8 numbers, which round and sum otherwise: another
cast is 28 dB off."""
MAJOR = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
ON_UNITS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            recipe.capability_major not in (None, MAJOR),
            reason=f"no GPU of compute capability {recipe.capability_major}",
        ),
    )
    for name, recipe in RECIPES.items()
]


# ----- convert_linears, RECIPES -----


@pytest.mark.parametrize("recipe", ON_UNITS)
@pytest.mark.parametrize("outliers", [False, True])
def test_real_matmuls_are_the_emulated_ones(recipe: str, outliers: bool) -> None:
    data = make_data(outliers=outliers)
    real = run_linear(recipe, data, device="cuda", emulate=False)
    reached = sqnr(real, run_linear(recipe, data))
    assert min(reached) > SAME_CASTS, reached
    # And bf16 they are not.
    assert sqnr(real, exact_gemms(data)).output < 32


@pytest.mark.parametrize("recipe", ON_UNITS)
@pytest.mark.parametrize("emulate", [False, True])
def test_compiled_matmuls_are_the_eager_ones(recipe: str, emulate: bool) -> None:
    data = make_data(outliers=True)
    eager, compiled = (
        run_linear(recipe, data, device="cuda", emulate=emulate, compiled=compiled)
        for compiled in (False, True)
    )
    reached = sqnr(compiled, eager)
    assert min(reached) > SAME_CASTS, reached


def test_emulation_is_the_same_on_gpu_and_cpu() -> None:
    data = make_data(outliers=True)
    for recipe in RECIPES:
        reached = sqnr(run_linear(recipe, data, device="cuda"), run_linear(recipe, data))
        assert min(reached) > SAME_CASTS, (recipe, reached)
