"""Mixed precision on one data-parallel rank, with the numerics of FSDP2 and without its copies.

Between steps the modules hold the master weights. From a step's first forward pass to the end of
its last backward pass they hold copies in the compute type, each of which is made once a step, and
freed by the last microbatch as soon as its gradient is complete: copies and gradients of all
weights never exist together. Under tensor parallelism masters, copies and gradients are DTensors.
Operators run on their local parts, because dispatching an operator on a DTensor is slow.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.base.torchao_types import (
    data_of,
    is_float8_tensor,
    is_gathered_in_float8,
    replace_data,
)
from torchtitan_lite.config import TrainingConfig
from torchtitan_lite.models.init import local_part
from torchtitan_lite.models.llama3 import Transformer


def needs_no_fsdp(training: TrainingConfig, *, data_ranks: int) -> bool:
    """Return whether to train without FSDP: with one data-parallel rank, and weights that stay on
    the device. `data_ranks` is dp_replicate * dp_shard * cp."""
    return data_ranks == 1 and not training.enable_cpu_offload


class MixedPrecisionTransformer(Transformer):
    """A Transformer on one data-parallel rank that computes with copies of its weights."""

    copies: "WeightCopies"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Do what a Transformer does. A pass that no backward pass follows frees the copies."""
        self.copies.enter()
        needs_backward = False
        try:
            out = super().forward(*args, **kwargs)
            needs_backward = out.requires_grad
        finally:
            if not needs_backward:
                self.copies.leave()
        return out


def apply_mixed_precision(model: Transformer, *, training: TrainingConfig) -> None:
    """Make `model`, on meta, compute with copies of its weights, in place."""
    # fully_shard swaps the class too: a wrapper would change the names of parameters.
    model.__class__ = MixedPrecisionTransformer
    assert isinstance(model, MixedPrecisionTransformer)
    model.copies = WeightCopies(model, training)


class WeightCopies:
    """The copies of a model's weights in the compute type, and the sums of their gradients."""

    def __init__(self, model: Transformer, training: TrainingConfig) -> None:
        self._model = model
        self._dtype: torch.dtype = getattr(torch, training.mixed_precision_param)
        self._reduce_dtype: torch.dtype = getattr(torch, training.mixed_precision_reduce)
        self._weights: list[_Weight] = []  # found once the model has left meta
        self.last_microbatch = True
        """Whether the next backward pass completes the gradients of a step."""

        # Take the masters out of torchao's wrappers, which say how to cast them to float8.
        self._wrappers: dict[nn.Module, Any] = {}
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None and is_gathered_in_float8(wrapper := local_part(weight)):
                    self._wrappers[module] = wrapper
                    module._parameters[name] = nn.Parameter(_split_like(weight, wrapper._tensor))

    def enter(self) -> None:
        """Put the copies into the modules, after making those that are missing."""
        self._weights = self._weights or self._find_weights()
        missing = [weight for weight in self._weights if not weight.storages[0].size()]
        _fill([weight for weight in missing if not is_float8_tensor(local_part(weight.copy))])
        _cast([weight for weight in missing if weight.places[0][0] in self._wrappers])
        for weight in missing:
            if hasattr(linear := weight.places[0][0], "weight_cast"):
                replace_data(local_part(weight.copy), self._cast_by(linear, weight.master))
        for weight in self._weights:
            weight.put(weight.copy)

    def leave(self) -> None:
        """Put the masters into the modules, and free the copies."""
        for weight in self._weights:
            weight.put(weight.master)
            weight.free()

    def _find_weights(self) -> list["_Weight"]:
        places = defaultdict(list)
        for module in self._model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    places[parameter].append((module, name))

        weights = []
        for master, of_master in places.items():
            copy = self._new_copy(master, of_master[0][0])
            weights.append(weight := _Weight(master, copy, of_master))
            copy.register_post_accumulate_grad_hook(partial(self._take_gradient, weight))
            if not hasattr(of_master[0][0], "weight_cast"):
                weight.free()  # it has no values yet

            # An embedding's backward pass does not read its weight.
            if of_master == [(self._model.tok_embeddings, "weight")]:
                free = partial(self._free_in_last, weight)
                self._model.tok_embeddings.register_forward_hook(free)
        return weights

    def _cast_by(self, linear: Any, master: Tensor) -> Any:
        return linear.weight_cast.of(linear, master.detach().to(self._dtype))

    def _new_copy(self, master: nn.Parameter, module: nn.Module) -> nn.Parameter:
        """Return a copy of the `master` of `module`; itself, if it has the compute type."""
        if hasattr(module, "weight_cast"):
            return nn.Parameter(_split_like(master, self._cast_by(module, master)))
        if (wrapper := self._wrappers.get(module)) is None:
            same = master.dtype == self._dtype
            return master if same else nn.Parameter(torch.empty_like(master, dtype=self._dtype))

        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

        local = local_part(master)
        data, scale = torch.empty_like(local, dtype=wrapper._dtype), local.new_empty(())
        config, role = wrapper._linear_mm_config, GemmInputRole.WEIGHT
        float8 = Float8TrainingTensor(data, scale, self._dtype, config, role)
        return nn.Parameter(_split_like(master, float8))

    def _free_in_last(self, weight: "_Weight", *_: object) -> None:
        if self.last_microbatch:
            weight.free()

    def _take_gradient(self, weight: "_Weight", copy: Tensor) -> None:
        """Add the gradient of `copy` to the sum over microbatches. The last one adds the sum to the
        master's gradient. The types of the sums are FSDP2's."""
        gradient, copy.grad = copy.grad, None
        assert gradient is not None, "autograd has just accumulated it"
        local = local_part(gradient)
        if weight.gradient is not None:
            weight.gradient += local
        else:
            weight.gradient = local if self.last_microbatch else local.to(self._reduce_dtype)
        if not self.last_microbatch:
            return
        weight.put(weight.master)
        weight.free()

        # Under tensor parallelism each rank may have the sum over its tokens only.
        master: Any = weight.master
        total, weight.gradient = weight.gradient, None
        if isinstance(gradient, DTensor) and gradient.placements != master.placements:
            parts = _split_like(gradient, total)
            total = local_part(parts.redistribute(placements=master.placements))
        total = _split_like(master, total.to(self._reduce_dtype).to(master.dtype))
        master.grad = total if master.grad is None else master.grad + total


@dataclass(eq=False)
class _Weight:
    """A master weight, its copy, and the modules that hold one of the two."""

    master: nn.Parameter
    copy: nn.Parameter
    places: list[tuple[nn.Module, str]]  # several, if modules share the weight
    gradient: Tensor | None = None  # of the step's microbatches so far, in the reduce type

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """The memory of the copy, in float8 of each cast."""
        return [data.untyped_storage() for data in data_of(local_part(self.copy))]

    def put(self, parameter: nn.Parameter) -> None:
        """Make the modules hold `parameter`. setattr would check it each time."""
        for module, name in self.places:
            module._parameters[name] = parameter

    def free(self) -> None:
        """Free the memory of the copy, unless the master is its own copy."""
        if self.copy is not self.master:
            for storage in self.storages:
                storage.resize_(0)


def _split_like(tensor: Tensor, local: Tensor) -> Any:
    """Return `local` as the local part of a DTensor like `tensor`; as it is, if that is none."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor(local, tensor._spec, requires_grad=False)


@torch.no_grad()
def _fill(weights: Sequence[_Weight]) -> None:
    """Copy masters in another type."""
    copies = [local_part(weight.copy) for weight in weights]
    for copy in copies:
        copy.untyped_storage().resize_(copy.nbytes)
    if copies:
        torch._foreach_copy_(copies, [local_part(weight.master) for weight in weights])


@torch.no_grad()
def _cast(weights: Sequence[_Weight]) -> None:
    """Copy masters in float8, each scaled by the largest magnitude of all its parts."""
    if not weights:
        return

    from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8
    from torchao.float8.float8_utils import amax_to_scale  # slow to import

    masters = [local_part(weight.master) for weight in weights]
    copies = [local_part(weight.copy) for weight in weights]
    dtype = copies[0]._data.dtype
    largest = torch.stack(torch._foreach_norm(masters, math.inf))
    if isinstance(split := weights[0].master, DTensor):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=split.device_mesh.get_group())
    scales = amax_to_scale(largest, dtype)
    for master, copy, scale in zip(masters, copies, scales, strict=True):
        config, role = copy._linear_mm_config, copy._gemm_input_role
        copy._data = hp_tensor_and_scale_to_float8(master, scale, dtype, config, role)._data
        copy._scale = scale
