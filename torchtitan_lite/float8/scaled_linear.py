"""A linear for recipes that give each block of numbers a scale of its own."""

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchtitan_lite.base.torchao_types import is_float8_tensor


class Scaling(Protocol):
    """What a recipe does: how it casts a matrix to float8, and how it multiplies two casts. A cast
    is a tensor with scales along the dimension that a matmul sums over; its `t()` is one too."""

    def rows(self, x: Tensor, *, is_weight: bool) -> Any:
        """Return the cast of `x` [R, C], with scales along C."""

    def columns(self, x: Tensor, *, is_weight: bool) -> Any:
        """Return the cast of the transpose [C, R] of `x` [R, C], with scales along R."""

    def mm(self, left: Any, right: Any) -> Tensor:
        """Return the product [R, S], in high precision, of the casts [R, C] and [C, S]."""


class ScaledLinear(nn.Linear):
    """A linear with the weight [N, K] of another, trained in float8 as a Scaling says."""

    def __init__(
        self, linear: nn.Linear, scaling: Scaling, multiply: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """`multiply` returns the product [..., N] of an input [..., K] and a weight [N, K]."""
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self._scaling: Scaling = scaling
        self._multiply: Callable[[Tensor, Tensor], Tensor] = multiply

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., N] for `input` [..., K]; both are DTensors under tensor parallelism."""
        weight = self.weight
        if not isinstance(weight, DTensor):
            product = self._multiply(input, weight)
            return product if self.bias is None else product + self.bias

        # Multiply local shards: casts of DTensors would gather the scales of each matmul.
        assert isinstance(input, DTensor), "tensor parallelism makes a DTensor of the input"
        assert self.bias is None, "no linear of a Transformer has a bias"
        last = Shard(input.ndim - 1)
        by_column = weight.placements == (Shard(0),)
        given, input_grad, output = (
            (Replicate(), Partial(), last) if by_column else (last, last, Partial())
        )
        assert input.placements == (given,), f"the input is {input.placements}, not {given}"
        local_input = input.to_local(grad_placements=[input_grad])
        local_output = self._multiply(local_input, weight.to_local())
        return DTensor.from_local(local_output, weight.device_mesh, [output], run_check=False)

    def cast_weight(self, weight: Tensor) -> tuple[Any, Any]:
        """Return casts of `weight` [N, K]: [N, K] for grad_input, and [K, N] for the output."""
        columns = self._scaling.columns(weight, is_weight=True)
        return columns.t(), self._scaling.rows(weight, is_weight=True).t()


class _Matmuls(torch.autograd.Function):
    """The three matmuls of a linear, each of two casts."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Any, scaling: Scaling) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.scaling = scaling
        # A weight that is cast once a step is a TwiceCastWeight.
        is_cast = is_float8_tensor(weight)
        transposed = weight.transposed if is_cast else scaling.rows(weight, is_weight=True).t()
        inputs = input.reshape(-1, input.shape[-1])
        output = scaling.mm(scaling.rows(inputs, is_weight=False), transposed)
        return output.reshape(*input.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        (input, weight), scaling = ctx.saved_tensors, ctx.scaling
        # Kernels that cast take contiguous tensors alone.
        grads = grad_output.contiguous().reshape(-1, grad_output.shape[-1])
        inputs = input.reshape(-1, input.shape[-1])
        is_cast = is_float8_tensor(weight)
        own = weight.own if is_cast else scaling.columns(weight, is_weight=True).t()
        grad_input = scaling.mm(scaling.rows(grads, is_weight=False), own)
        columns = scaling.columns(inputs, is_weight=False)
        grad_weight = scaling.mm(scaling.columns(grads, is_weight=False), columns.t())
        return grad_input.reshape(input.shape), grad_weight, None


def swap_linears(model: nn.Module, chosen: Collection[str], scaling: Scaling) -> None:
    """Swap the linears of `model` that are named in `chosen` for ScaledLinears, in place."""

    @torch._dynamo.allow_in_graph  # a graph takes no Scaling as an argument
    def multiply(input: Tensor, weight: Tensor) -> Tensor:
        product: Tensor = _Matmuls.apply(input, weight, scaling)
        return product

    for name in chosen:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear), f"{name} is a linear"
        model.set_submodule(name, ScaledLinear(linear, scaling, multiply))
