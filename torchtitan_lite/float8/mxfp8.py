"""A linear that trains in MXFP8, by a prototype of torchao."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


class MXFP8Linear(nn.Linear):
    """A linear with the weight [N, K] of another, trained in MXFP8 (OCP Microscaling Formats 1.0).

    e4m3 numbers share a power-of-two scale per 32 elements of the dimension that a matmul sums
    over. Scales are rounded up, so nothing saturates."""

    def __init__(
        self,
        linear: nn.Linear,
        multiply: Callable[[Tensor, Tensor], Tensor],
        cast_weight: Callable[[Tensor], tuple[Any, Any]],
    ) -> None:
        """`multiply(input, weight)` and `cast_weight(weight)` are those of mx_matmul."""
        assert linear.bias is None, "no linear of the model has a bias"
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self._multiply: Callable[[Tensor, Tensor], Tensor] = multiply
        self.cast_weight: Callable[[Tensor], tuple[Any, Any]] = cast_weight

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., N] for `input` [..., K]; both are DTensors under tensor parallelism."""
        weight = self.weight
        if not isinstance(weight, DTensor):
            return self._multiply(input, weight)

        # Multiply local shards: torchao's casts of DTensors would gather the scales of each matmul.
        assert isinstance(input, DTensor), "tensor parallelism makes a DTensor of the input"
        last = Shard(input.ndim - 1)
        by_column = weight.placements == (Shard(0),)
        given, input_grad, output = (
            (Replicate(), Partial(), last) if by_column else (last, last, Partial())
        )
        assert input.placements == (given,), f"the input is {input.placements}, not {given}"
        local_input = input.to_local(grad_placements=[input_grad])
        local_output = self._multiply(local_input, weight.to_local())
        return DTensor.from_local(local_output, weight.device_mesh, [output], run_check=False)


def convert_to_mxfp8(model: nn.Module, chosen: Collection[str], *, emulate: bool) -> None:
    """Swap the linears of `model` that are named in `chosen` for MXFP8Linear, in place."""
    from . import mx_matmul  # imports torchao's prototype

    multiply = partial(mx_matmul.multiply, emulate=emulate)
    cast_weight = partial(mx_matmul.cast_weight, emulate=emulate)
    for name in chosen:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear), f"{name} is a linear"
        model.set_submodule(name, MXFP8Linear(linear, multiply, cast_weight))
