"""Weights that are cast to float8 once a step, for all its microbatches.

A linear casts its weight in each forward pass, and again in each backward pass; one that is in
float8 already it takes as it is. Imports torchao, so it is imported only where it is needed.
"""

from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torchao.float8.config import CastConfig, Float8LinearConfig
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
    hp_tensor_and_scale_to_float8,
)

from torchtitan_lite.base.torchao_types import has_one_scale

from .scaled_linear import ScaledLinear

aten = torch.ops.aten


class TwiceCastWeight(Float8TrainingTensor):
    """A weight [N, K] in float8, cast for each of its matmuls: `own` [N, K] for grad_input, which
    multiplies by it, and `transposed` [K, N] for the output, which multiplies by its transpose."""

    own: Any
    transposed: Any

    @staticmethod
    def __new__(cls, own: Tensor, transposed: Tensor, stride: Any = None) -> "TwiceCastWeight":
        # Whatever the casts have, the gradient has the strides of a weight in high precision.
        weight = Tensor._make_wrapper_subclass(
            cls, own.shape, stride or (own.shape[1], 1), dtype=own.dtype, device=own.device
        )
        weight.own, weight.transposed = own, transposed
        return weight

    @property
    def casts(self) -> list[Any]:
        """Both casts."""
        return [self.own, self.transposed]

    def __repr__(self) -> str:
        return f"TwiceCastWeight({self.own}, {self.transposed})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["own", "transposed"], None

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Any], metadata: None, outer_size: Any, outer_stride: Any
    ) -> "TwiceCastWeight":
        return TwiceCastWeight(inner_tensors["own"], inner_tensors["transposed"], outer_stride)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        weight = args[0]
        if func is aten.t.default:
            return TwiceCastWeight(weight.transposed, weight.own, weight.stride()[::-1])
        if func in (aten.detach.default, aten.view.default):  # as it is: DTensor.to_local views
            return TwiceCastWeight(weight.own, weight.transposed, weight.stride())
        if func is not aten.mm.default:
            raise NotImplementedError(f"{func} of a weight in float8")
        return func(*tree_map_only(TwiceCastWeight, lambda each: each.own, args), **(kwargs or {}))


class WeightCaster(nn.Module):
    """The casts of a block's weights, together: a call of compiled code takes the host 0.2 ms. A
    module, so that they are compiled and observed as blocks are."""

    def forward(self, cast: Callable[..., Any], weights: Sequence[Any]) -> list[Any]:
        """Return what `cast` does with the arguments for each of the weights."""
        return [cast(*arguments) for arguments in weights]

    @torch.no_grad()
    def of(
        self,
        linears: Sequence[Any],
        weights: Sequence[Tensor],
        scales: Sequence[Tensor | None],
        dtype: torch.dtype,
    ) -> list[Float8TrainingTensor]:
        """Return the `weights`, [N, K] each, of `linears` of one recipe in float8, as the linears
        take them in their place; of DTensors the local parts. `scales`, [] each, are those of whole
        weights, if they are known. `dtype` is the type that the results show, and so their
        gradients'."""
        if isinstance(linears[0], ScaledLinear):
            casts = self(linears[0].cast_weight, [(_local(weight),) for weight in weights])
            return list(starmap(TwiceCastWeight, casts))
        whole = [
            (weight, linear.config, linear.linear_mm_config)
            for weight, linear in zip(weights, linears, strict=True)
        ]
        if not has_one_scale(linears[0]):
            return [TwiceCastWeight(*map(_local, casts)) for casts in self(cast_twice, whole)]
        scaled = [(*each, scale) for each, scale in zip(whole, scales, strict=True)]
        return [
            Float8TrainingTensor(
                cast._data, cast._scale, dtype, cast._linear_mm_config, cast._gemm_input_role
            )
            for cast in map(_local, self(cast_once, scaled))
        ]


def cast_once(
    weight: Tensor, config: Float8LinearConfig, matmuls: LinearMMConfig, scale: Tensor | None
) -> Tensor:
    """Return `weight` [N, K], perhaps a DTensor, in float8 with one scale, which may be known."""
    how = config.cast_config_weight
    if scale is None:
        return _cast(weight, how, 0, config, matmuls)
    role = GemmInputRole.WEIGHT
    return hp_tensor_and_scale_to_float8(weight, scale, how.target_dtype, matmuls, role)


def cast_twice(
    weight: Tensor, config: Float8LinearConfig, matmuls: LinearMMConfig
) -> tuple[Tensor, Tensor]:
    """Return `weight` [N, K], perhaps a DTensor, in float8: as [N, K] for grad_input, and as [K, N]
    for the output, each with a scale per row of the dimension that its matmul does not sum over."""
    # A GPU multiplies by a matrix that is stored by columns.
    stored = weight.t() if config.emulate else weight.t().contiguous()
    own = _cast(stored, config.cast_config_weight_for_grad_input, -1, config, matmuls).t()
    return own, _cast(weight.t(), config.cast_config_weight, 0, config, matmuls)


def _cast(
    weight: Tensor, how: CastConfig, dim: int, config: Float8LinearConfig, matmuls: LinearMMConfig
) -> Tensor:
    return hp_tensor_to_float8_dynamic(
        weight,
        how.target_dtype,
        matmuls,
        gemm_input_role=GemmInputRole.WEIGHT,
        scaling_granularity=how.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(dim, how.scaling_granularity),
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
