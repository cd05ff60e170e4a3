"""Train with a float8 recipe of your own: a scale, which is a power of two, per 64 numbers.

torchtitan-lite train --job.config_file debug_model --float8.recipe_name own_recipe:RECIPE
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from torchtitan_lite import Recipe, swap_linears

RECIPE = Recipe(
    name="blocks_of_64",
    converter="own_recipe:convert",
    size_multiple=64,
    emulated_in=None,  # mm multiplies in bf16; on a GPU set [float8] emulate = true
)


class BlocksOf64:
    """How it casts and multiplies. A cast is a new tensor, here in bf16, which holds it exactly."""

    def rows(self, x: Tensor, *, is_weight: bool) -> Tensor:
        """Return the cast of `x` [R, C], with scales along C, over which a matmul sums."""
        blocks = x.float().unflatten(1, (-1, 64))  # [R, C / 64, 64]
        largest = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        scales = (largest / torch.finfo(torch.float8_e4m3fn).max).log2().ceil().exp2()
        return ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).flatten(1).to(x.dtype)

    def columns(self, x: Tensor, *, is_weight: bool) -> Tensor:
        """Return the cast of the transpose [C, R] of `x` [R, C], with scales along R."""
        return self.rows(x.t(), is_weight=is_weight)

    def mm(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the product of the casts [R, C] and [C, S]."""
        return left @ right


def convert(model: nn.Module, chosen: Collection[str], float8: object, emulate: bool) -> None:
    """Make the linears of `model` that are named in `chosen` train so, in place."""
    swap_linears(model, chosen, BlocksOf64())
