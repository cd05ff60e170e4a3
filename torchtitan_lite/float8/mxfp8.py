"""MXFP8 (OCP Microscaling Formats 1.0): e4m3 numbers share a power-of-two scale per 32 elements of
the dimension that a matmul sums over. Scales are rounded up, so nothing saturates.

The kernels are of a prototype of torchao, which may change or fail: imported only for its users.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.utils import _to_mxfp8_dim1_kernel_wrapper
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from torchtitan_lite.config import Float8Config

from .scaled_linear import swap_linears

E4M3, BLOCK, ROUND_UP = torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL


class MXFP8:
    """The Scaling of MXFP8, with casts that are MXTensors."""

    def __init__(self, *, emulate: bool) -> None:
        self._emulate = emulate

    def rows(self, x: Tensor, *, is_weight: bool) -> Any:
        """Return the cast of `x` [R, C], with scales along C."""
        kernels, choice = self._kernels(x), MXFP8Dim0CastKernelChoice.TRITON
        return MXTensor.to_mx(
            x, E4M3, BLOCK, ROUND_UP, kernels, mxfp8_dim0_cast_kernel_choice=choice
        )

    def columns(self, x: Tensor, *, is_weight: bool) -> Any:
        """Return the cast of the transpose [C, R] of `x` [R, C], with scales along R."""
        kernels, choice = self._kernels(x), MXFP8Dim1CastKernelChoice.CUDA
        return _to_mxfp8_dim1_kernel_wrapper(x, BLOCK, E4M3, x.dtype, kernels, choice, ROUND_UP)

    def mm(self, left: Any, right: Any) -> Tensor:
        """Return the product of the casts `left` and `right`."""
        return torch.mm(left, right)

    def _kernels(self, x: Tensor) -> KernelPreference:
        """Return what casts `x`: on meta, where nothing is computed, not torchao's kernels."""
        emulated = self._emulate or x.is_meta
        return KernelPreference.EMULATED if emulated else KernelPreference.AUTO


def convert_to_mxfp8(
    model: nn.Module, chosen: Collection[str], float8: Float8Config, emulate: bool
) -> None:
    """Make the linears of `model` that are named in `chosen` train in MXFP8, in place."""
    swap_linears(model, chosen, MXFP8(emulate=emulate))
