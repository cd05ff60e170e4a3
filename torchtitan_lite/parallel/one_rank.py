"""Mixed precision on one data-parallel rank, with the numerics of FSDP2 and without its copies.

Between steps the modules hold the master weights. From a step's first forward pass to the end of
its last backward pass they hold copies in the compute type, each of which is made once a step, and
freed by the last microbatch as soon as its gradient is complete: copies and gradients of all
weights never exist together. Under tensor parallelism masters, copies and gradients are DTensors.
Operators run on their local parts, because dispatching an operator on a DTensor is slow.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.base.torchao_types import (
    data_of,
    has_one_scale,
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

        # Take the masters out of torchao's wrappers, which FSDP would gather in float8.
        self._gathered = False
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None and is_gathered_in_float8(wrapper := local_part(weight)):
                    self._gathered = True
                    module._parameters[name] = nn.Parameter(_split_like(weight, wrapper._tensor))

    def enter(self) -> None:
        """Put the copies into the modules, after making those that are missing."""
        self._weights = self._weights or self._find_weights()
        missing = [weight for weight in self._weights if not weight.storages[0].size()]
        _fill([weight for weight in missing if not is_float8_tensor(local_part(weight.copy))])
        cast = [weight for weight in missing if is_float8_tensor(local_part(weight.copy))]
        linears = [weight.places[0][0] for weight in cast]
        casts = self._casts(linears, [weight.master for weight in cast])
        for weight, new in zip(cast, casts, strict=True):
            replace_data(local_part(weight.copy), new)
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

        cast = {
            master: of_master[0][0]
            for master, of_master in places.items()
            if hasattr(of_master[0][0], "weight_caster")
        }
        casts = dict(zip(cast, self._casts([*cast.values()], [*cast]), strict=True))
        weights = []
        for master, of_master in places.items():
            if (in_float8 := casts.get(master)) is not None:
                copy = nn.Parameter(_split_like(master, in_float8))
            elif master.dtype == self._dtype:
                copy = master
            else:
                copy = nn.Parameter(torch.empty_like(master, dtype=self._dtype))
            weights.append(weight := _Weight(master, copy, of_master))
            copy.register_post_accumulate_grad_hook(partial(self._take_gradient, weight))
            if in_float8 is None:
                weight.free()  # it has no values yet

            # An embedding's backward pass does not read its weight.
            if of_master == [(self._model.tok_embeddings, "weight")]:
                free = partial(self._free_in_last, weight)
                self._model.tok_embeddings.register_forward_hook(free)
        return weights

    @torch.no_grad()
    def _casts(self, linears: Sequence[Any], masters: Sequence[Tensor]) -> Iterator[Any]:
        """Cast the masters [N, K] of `linears` to float8, a block after the other: as they are if
        FSDP would gather them in float8, else from the compute type. If they have one scale each,
        one all-reduce finds the largest magnitudes of all."""
        scales: Iterable[Any] = itertools.repeat(None, len(masters))
        if linears and has_one_scale(linears[0]):
            from torchao.float8.float8_utils import amax_to_scale  # slow to import

            largest = torch.stack(torch._foreach_norm(list(map(local_part, masters)), math.inf))
            if isinstance(split := masters[0], DTensor):
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=split.device_mesh.get_group())
            if not self._gathered:  # rounding is monotonic
                largest = largest.to(self._dtype)
            config = linears[0].config
            dtype = config.cast_config_weight.target_dtype
            each = amax_to_scale(largest, dtype, config.round_scales_to_power_of_2)
            # Compiled code copies what does not begin at a multiple of 16 bytes.
            scales = each[:, None].repeat(1, 4)[:, 0]
        casts = zip(linears, masters, scales, strict=True)
        for caster, block in itertools.groupby(casts, lambda cast: cast[0].weight_caster):
            of_linears, weights, known = zip(*block, strict=True)
            if not self._gathered:
                weights = tuple(weight.to(self._dtype) for weight in weights)
            if known[0] is not None:
                weights = tuple(map(local_part, weights))
            yield from caster.of(of_linears, weights, known, self._dtype)

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
