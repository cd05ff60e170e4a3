"""The matmuls of one linear on float8 units: what their emulation computes, compiled or not."""

import pytest
import torch
from gemms import RECIPES, exact_gemms, make_data, run_linear, sqnr

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SAME_CASTS = 40.0
"""dB between two ways to multiply the same float8 numbers, which round and sum otherwise: another
cast is 28 dB off."""
HAS_MXFP8 = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10
ON_UNITS = [
    pytest.param(
        recipe,
        marks=pytest.mark.skipif(
            recipe == "mxfp8" and not HAS_MXFP8, reason="no GPU of compute capability 10"
        ),
    )
    for recipe in RECIPES
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
