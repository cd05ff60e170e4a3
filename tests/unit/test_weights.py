"""A weight that was cast before gives a linear the bits that it would compute itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear

from torchtitan_lite.base.torchao_types import data_of, is_float8_tensor
from torchtitan_lite.float8.blockwise import Blockwise
from torchtitan_lite.float8.mxfp8 import MXFP8
from torchtitan_lite.float8.scaled_linear import swap_linears
from torchtitan_lite.float8.weights import TwiceCastWeight, WeightCaster
from torchtitan_lite.patches import observe_float8_casts

# ----- TwiceCastWeight, WeightCaster -----

RECIPES = {"tensorwise": 1, "rowwise": 2, "rowwise_with_gw_hp": 2, "mxfp8": 2, "blockwise": 2}
SCALINGS: dict[str, type[Any]] = {"mxfp8": MXFP8, "blockwise": Blockwise}
"""How many casts of a weight both matmuls need."""
N, K = 256, 128
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def linear_of(recipe: str) -> Any:
    torch.manual_seed(0)
    linear = nn.Linear(K, N, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight *= torch.linspace(0.1, 10, K) * torch.linspace(1, 50, N)[:, None]
    if recipe in SCALINGS:
        scaling = SCALINGS[recipe](emulate=True)
        swap_linears(model := nn.Sequential(linear), ["0"], scaling)
        return model[0]
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    return Float8Linear.from_float(linear, config)


def cast_of(linear: Any) -> Any:
    (cast,) = WeightCaster().of([linear], [linear.weight], [None], torch.bfloat16)
    return cast


def run(linear: Any, weight: Tensor, *, recomputes: bool = False) -> list[Tensor]:
    """The output and both gradients."""
    linear.weight = leaf = nn.Parameter(weight)
    x = torch.linspace(-3, 4, 2 * 192 * K).reshape(2, 192, K).bfloat16().requires_grad_()
    output = checkpoint(linear, x, use_reentrant=False) if recomputes else linear(x)
    output.backward(torch.linspace(-1, 2, 2 * 192 * N).reshape(2, 192, N).bfloat16())
    return [output.detach(), x.grad, leaf.grad]


@pytest.mark.parametrize("recomputes", [False, True])
@every_recipe
def test_a_weight_cast_before_gives_the_same_bits(recipe: str, recomputes: bool) -> None:
    linear = linear_of(recipe)
    expected = run(linear, linear.weight.detach())
    found = run(linear, cast_of(linear), recomputes=recomputes)
    for value, right in zip(found, expected, strict=True):
        torch.testing.assert_close(value, right, rtol=0, atol=0)
        assert value.stride() == right.stride()


@contextmanager
def casts_of_weights() -> Iterator[list[Tensor]]:
    """The weights [N, K] that are cast; no other operand has this shape."""
    seen: list[Tensor] = []

    def see(tensor: Tensor, *_: Any) -> None:
        if tensor.shape in ((N, K), (K, N)):
            seen.append(tensor)

    def observed(cast: Any) -> Any:
        return lambda self, x, **kind: (see(x), cast(self, x, **kind))[1]

    with pytest.MonkeyPatch.context() as patch, observe_float8_casts(see):
        for scaling, name in product(SCALINGS.values(), ("rows", "columns")):
            patch.setattr(scaling, name, observed(getattr(scaling, name)))
        yield seen


@every_recipe
def test_a_linear_casts_no_weight_that_was_cast_before(recipe: str) -> None:
    linear = linear_of(recipe)
    weight = linear.weight.detach()
    with casts_of_weights() as seen:
        cast = cast_of(linear)
        assert len(seen) == RECIPES[recipe]
        run(linear, cast)
        assert len(seen) == RECIPES[recipe]
        run(linear, weight)
        assert len(seen) > RECIPES[recipe]


@every_recipe
def test_the_data_of_a_cast_weight_is_stored_once_for_each_cast(recipe: str) -> None:
    weight = cast_of(linear_of(recipe))
    assert is_float8_tensor(weight)
    assert isinstance(weight, TwiceCastWeight) is (RECIPES[recipe] == 2)
    assert (weight.shape, weight.stride(), weight.dtype) == ((N, K), (K, 1), torch.bfloat16)
    data = data_of(weight)
    assert [each.nbytes for each in data] == [N * K] * RECIPES[recipe]
    plain = torch.ones(2)
    assert data_of(plain)[0] is plain


def test_a_transposed_weight_has_the_casts_the_other_way_round() -> None:
    weight = cast_of(linear_of("rowwise"))
    turned = weight.t()
    assert (turned.shape, turned.stride()) == ((K, N), (1, K))
    assert (turned.own, turned.transposed) == (weight.transposed, weight.own)
    assert turned.t().own is weight.own and turned.detach().own is turned.own
    # A scale for each row of the dimension that a matmul does not sum over.
    assert (weight.own._scale.shape, turned.own._scale.shape) == ((1, K), (1, N))


def test_data_for_a_gpu_is_stored_by_columns() -> None:
    linear = linear_of("rowwise")
    object.__setattr__(linear.config, "emulate", False)
    own, transposed = cast_of(linear).casts
    assert (own._data.stride(), transposed._data.stride()) == ((1, N), (1, K))
