"""Emulated float8 is each recipe: its casts, computed here by hand, and how near its matmuls come
to exact ones. And real float8 matmuls take the sizes that selection takes."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from gemms import RECIPES, Data, Gemms, exact_gemms, make_data, run_linear, sqnr
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.config import Float8Config
from torchtitan_lite.float8.selection import select_linears

# ----- RECIPES, select_linears -----

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
# What has one scale in the left and in the right operand: the whole tensor, a row of the dimension
# that is summed over, a block of its rows and columns; None for a matmul in high precision.
WHOLE, ROW = ("whole", "whole"), ("row", "row")
MX, LINE, SQUARE = (1, 32), (1, 128), (128, 128)
CASTS = {
    "tensorwise": Gemms(WHOLE, WHOLE, WHOLE),
    "rowwise": Gemms(ROW, ROW, ROW),
    "rowwise_with_gw_hp": Gemms(ROW, ("row", "whole"), None),
    "mxfp8": Gemms((MX, MX), (MX, MX), (MX, MX)),
    "blockwise": Gemms((LINE, SQUARE), (LINE, SQUARE), (LINE, LINE)),
}
# The least SQNR in dB that each recipe must reach on output, grad_input, grad_weight, without
# outliers and with: half a dB below the worst of three seeds. E4M3 has three bits of mantissa, for
# 28.5 dB, and tensorwise's gradients in E5M2 have two, for 24.6; bf16 reaches 55.6.
FLOORS = {
    ("tensorwise", False): Gemms(28.0, 24.0, 24.1),
    ("rowwise", False): Gemms(27.9, 27.9, 27.9),
    ("rowwise_with_gw_hp", False): Gemms(27.9, 27.9, 55.1),
    ("mxfp8", False): Gemms(27.9, 27.9, 27.9),
    ("blockwise", False): Gemms(28.1, 28.0, 28.2),
    ("tensorwise", True): Gemms(25.0, 24.5, 23.5),
    ("rowwise", True): Gemms(27.6, 28.1, 26.8),
    ("rowwise_with_gw_hp", True): Gemms(27.6, 28.1, 55.1),
    ("mxfp8", True): Gemms(27.6, 28.1, 27.8),
    ("blockwise", True): Gemms(28.1, 28.1, 30.1),
}


class Operands(TorchDispatchMode):
    """The operands of each matmul, in order, as float8 numbers and scales where they are cast."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.seen.append((self._parts(args[0]), self._parts(args[1].t())))
        return func(*args, **(kwargs or {}))

    def _parts(self, operand: Tensor) -> Any:
        """Of an operand that is summed over its last dimension."""
        if not is_traceable_wrapper_subclass(operand):
            return operand
        data, scale = ("qdata", "scale") if hasattr(operand, "qdata") else ("_data", "_scale")
        return getattr(operand, data), getattr(operand, scale)


class Cast(NamedTuple):
    """A tensor as float8 numbers, the scales kept with them, and what they stand for."""

    numbers: Tensor
    scales: Tensor
    values: Tensor


def cast(operand: Tensor, granularity: Any, dtype: torch.dtype, *, powers_of_two: bool) -> Cast:
    """`operand`, which is summed over its last dimension. A scale makes the largest number as large
    as float8 can have it, or half of that at least where it is a power of two; of blocks it is the
    inverse that is kept."""
    if isinstance(granularity, tuple):
        rows, columns = granularity
        blocks = operand.unflatten(-1, (-1, columns)).unflatten(0, (-1, rows))
        inverse = blocks.abs().amax((1, 3), keepdim=True) / LARGEST[dtype]
        if powers_of_two:
            inverse = inverse.log2().ceil().exp2()
        numbers = (blocks / inverse).to(dtype)
        values = (numbers.float() * inverse).reshape(operand.shape)
        return Cast(numbers.reshape(operand.shape), inverse[:, 0, :, 0], values)
    amax = operand.abs().amax(-1, keepdim=True) if granularity == "row" else operand.abs().amax()
    scale = (LARGEST[dtype] / amax.double()).float()
    if powers_of_two:
        scale = scale.log2().floor().exp2()
    numbers = (operand * scale).to(dtype)
    return Cast(numbers, scale, numbers.float() / scale)


def operands(data: Data) -> Gemms:
    """Those of each matmul, both with the dimension that is summed over as their last."""
    input, weight, grad_output = data
    return Gemms((input, weight), (grad_output, weight.t()), (grad_output.t(), input.t()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_emulation_has_the_casts_of_its_recipe_and_multiplies_them(recipe: str) -> None:
    data = make_data(outliers=True, dtype=torch.float32)
    with Operands() as found:
        computed = run_linear(recipe, data)
    for role, seen in zip(Gemms._fields, found.seen, strict=True):
        sources, granularities = getattr(operands(data), role), getattr(CASTS[recipe], role)
        if granularities is None:
            assert all(map(torch.equal, seen, sources))
            assert getattr(computed, role).equal(sources[0] @ sources[1].t())
            continue
        wide_gradient = E5M2 if recipe == "tensorwise" and role != "output" else E4M3
        left, right = (
            cast(*each, powers_of_two=recipe not in ("tensorwise", "blockwise"))
            for each in zip(sources, granularities, (wide_gradient, E4M3), strict=True)
        )
        for expected, operand in zip((left, right), seen, strict=True):
            if isinstance(operand, Tensor):  # restored before it is multiplied
                assert operand.equal(expected.values)
                continue
            numbers, scales = operand
            assert numbers.dtype == expected.numbers.dtype
            assert numbers.float().equal(expected.numbers.float())
            assert scales.float().equal(expected.scales)
        product = left.values @ right.values.t()
        assert (getattr(computed, role) - product).norm() < 1e-6 * product.norm()


@pytest.mark.parametrize(("recipe", "outliers"), FLOORS)
def test_sqnr_against_exact_matmuls(recipe: str, outliers: bool) -> None:
    for seed in range(3):
        data = make_data(outliers=outliers, seed=seed)
        reached = sqnr(run_linear(recipe, data), exact_gemms(data))
        floors = FLOORS[recipe, outliers]
        assert all(ours > floor for ours, floor in zip(reached, floors, strict=True)), reached


SIZES = st.sampled_from([8, 16, 24, 32, 48, 100])


def cuda_multiplies(rows: int, summed: int, columns: int) -> bool:
    """Whether torch takes float8 matrices of these sizes on CUDA, asked of its rule without a
    device."""
    with FakeTensorMode():
        left, right = (
            torch.empty(size, summed, dtype=E4M3, device="cuda") for size in (rows, columns)
        )
        scale = torch.ones((), device="cuda")
        try:
            torch._scaled_mm(left, right.t(), scale, scale, out_dtype=torch.bfloat16)
        except RuntimeError as error:
            assert "divisible by 16" in str(error)
            return False
    return True


@given(tokens=SIZES, in_features=SIZES, out_features=SIZES, gw_hp=st.booleans())
def test_selection_refuses_the_sizes_that_torch_refuses(tokens, in_features, out_features, gw_hp):
    matmuls = [(tokens, in_features, out_features), (tokens, out_features, in_features)]
    if not gw_hp:
        matmuls.append((out_features, tokens, in_features))
    taken = all(cuda_multiplies(*sizes) for sizes in matmuls)
    linear = nn.ModuleDict({"wq": nn.Linear(in_features, out_features, bias=False, device="meta")})
    with nullcontext() if taken else pytest.raises(ConfigError, match="not a multiple of 16"):
        select_linears(linear, Float8Config(), tp_degree=1, tokens=None if gw_hp else tokens)
