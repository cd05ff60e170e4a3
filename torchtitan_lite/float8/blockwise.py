"""Float8 with a float32 scale per block of 128 numbers, as DeepSeek-V3 was trained (arXiv
2412.19437, section 3.3).

Activations and gradients have a scale per 1 x 128 elements, along the dimension that a matmul sums
over; weights one per 128 x 128, so that both matmuls with a weight read the same numbers. All are
e4m3: blocks are small, so gradients need no wider range.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torchao.float8.float8_training_tensor import Float8TrainingTensor, LinearMMConfig

from torchtitan_lite.config import Float8Config

from .scaled_linear import swap_linears

E4M3, BLOCK = torch.float8_e4m3fn, 128
LARGEST = torch.finfo(E4M3).max
SMALLEST_SCALE = 2.0**-100
"""Scale of a block of zeros; its inverse is finite."""


class Blockwise:
    """The Scaling of DeepSeek-V3. A cast is a Float8TrainingTensor whose scales, unlike torchao's,
    multiply its data to restore the tensor."""

    def __init__(self, *, emulate: bool) -> None:
        self._emulate = emulate

    def rows(self, x: Tensor, *, is_weight: bool) -> Float8TrainingTensor:
        """Return the cast of `x` [R, C], with scales along C: [R or R / 128, C / 128]."""
        data, scales = scale_blocks(x, BLOCK if is_weight else 1, BLOCK)
        return store_cast(data, scales, x.dtype)

    def columns(self, x: Tensor, *, is_weight: bool) -> Float8TrainingTensor:
        """Return the cast of the transpose [C, R] of `x` [R, C], with scales along R:
        [C or C / 128, R / 128]."""
        data, scales = scale_blocks(x, BLOCK, BLOCK if is_weight else 1)
        return store_cast(data.t(), scales.t(), x.dtype)

    def mm(self, left: Float8TrainingTensor, right: Float8TrainingTensor) -> Tensor:
        """Return the product [R, S] of the casts [R, C] and [C, S]: on Hopper by cuBLAS, which adds
        up 128 products at a time and scales each sum in float32."""
        if self._emulate:
            return torch.mm(restore(left), restore(right)).to(left.dtype)
        scales = right._scale  # [C / 128, S or S / 128]
        # cuBLAS takes the scales of squares at strides that are multiples of 4, PyTorch at those of
        # C / 128: where they differ, give each column its own.
        if scales.shape[0] % 4 and scales.shape[1] < right.shape[1]:
            scales = scales.repeat_interleave(BLOCK, dim=1)
        product: Tensor = torch._scaled_mm(
            left._data, right._data, left._scale, scales, out_dtype=left.dtype
        )
        return product


def scale_blocks(x: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return `x` [R, C] in float8, and the scales [R / height, C / width] of its blocks."""
    # [R / height, height, C / width, width]
    blocks = x.float().unflatten(1, (-1, width)).unflatten(0, (-1, height))
    scales = (blocks.abs().amax((1, 3), keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
    return (blocks / scales).to(E4M3).reshape(x.shape), scales[:, 0, :, 0]


def store_cast(data: Tensor, scales: Tensor, dtype: torch.dtype) -> Float8TrainingTensor:
    """Return a cast that cuBLAS can read: `data` [R, C] by rows, the scales of rows by columns, and
    those of squares by rows."""
    of_rows = scales.shape[0] == data.shape[0]
    scales = scales.t().contiguous().t() if of_rows else scales.contiguous()
    return Float8TrainingTensor(data.contiguous(), scales, dtype, LinearMMConfig())


def restore(cast: Float8TrainingTensor) -> Tensor:
    """Return the numbers [R, C] that `cast` stands for, in float32."""
    rows, columns = cast._scale.shape
    blocks = cast._data.float().unflatten(1, (columns, -1)).unflatten(0, (rows, -1))
    return (blocks * cast._scale[:, None, :, None]).reshape(cast.shape)


def convert_to_blockwise(
    model: nn.Module, chosen: Collection[str], float8: Float8Config, emulate: bool
) -> None:
    """Make the linears of `model` that are named in `chosen` train blockwise, in place."""
    swap_linears(model, chosen, Blockwise(emulate=emulate))
