"""The matmuls of a linear in MXFP8, by kernels of a prototype of torchao, which may change or fail:
imported only for its users."""

from typing import Any

import torch
from torch import Tensor
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.utils import _to_mxfp8_dim1_kernel_wrapper
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from .weights import TwiceCastWeight

E4M3, BLOCK, ROUND_UP = torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL


def cast_rows(x: Tensor, kernels: KernelPreference) -> Any:
    """Return `x` [M, K] in blocks along K."""
    choice = MXFP8Dim0CastKernelChoice.TRITON
    return MXTensor.to_mx(x, E4M3, BLOCK, ROUND_UP, kernels, mxfp8_dim0_cast_kernel_choice=choice)


def cast_columns(x: Tensor, kernels: KernelPreference) -> Any:
    """Return the transpose [K, M] of `x` [M, K] in blocks along M."""
    choice = MXFP8Dim1CastKernelChoice.CUDA
    return _to_mxfp8_dim1_kernel_wrapper(x, BLOCK, E4M3, x.dtype, kernels, choice, ROUND_UP)


def kernels_for(tensor: Tensor, *, emulate: bool) -> KernelPreference:
    """Return which kernels compute. torchao's own do not run on meta, where nothing is computed."""
    emulated = emulate or tensor.is_meta
    return KernelPreference.EMULATED if emulated else KernelPreference.AUTO


def cast_weight(weight: Tensor, *, emulate: bool) -> tuple[Any, Any]:
    """Return `weight` [N, K] as [N, K] in blocks along N, for grad_input, and as [K, N] in blocks
    along K, for the output."""
    kernels = kernels_for(weight, emulate=emulate)
    return cast_columns(weight, kernels).t(), cast_rows(weight, kernels).t()


def multiply(input: Tensor, weight: Tensor, *, emulate: bool) -> Tensor:
    """Return [..., N] for `input` [..., K] and `weight` [N, K], which may be a TwiceCastWeight."""
    output: Tensor = _Multiply.apply(input, weight, kernels_for(input, emulate=emulate))
    return output


@torch._dynamo.allow_in_graph
class _Multiply(torch.autograd.Function):
    """The three matmuls, each of two operands in MXFP8."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Any, kernels: KernelPreference) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.kernels = kernels
        is_cast = isinstance(weight, TwiceCastWeight)
        transposed = weight.transposed if is_cast else cast_rows(weight, kernels).t()
        output = torch.mm(cast_rows(input.reshape(-1, input.shape[-1]), kernels), transposed)
        return output.reshape(*input.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        (input, weight), kernels = ctx.saved_tensors, ctx.kernels
        # torchao's kernels take contiguous tensors alone.
        grads = grad_output.contiguous().reshape(-1, grad_output.shape[-1])
        inputs = input.reshape(-1, input.shape[-1])
        is_cast = isinstance(weight, TwiceCastWeight)
        own = weight.own if is_cast else cast_columns(weight, kernels).t()
        grad_input = torch.mm(cast_rows(grads, kernels), own)
        grad_weight = torch.mm(cast_columns(grads, kernels), cast_columns(inputs, kernels).t())
        return grad_input.reshape(input.shape), grad_weight, None
