"""Mixed precision on one rank, with the numerics of FSDP2 and without its copies.

The modules hold the master weights between microbatches, and copies of them in the compute type
from a forward pass to the end of its backward pass. A copy is made once a step. The last microbatch
frees it as soon as its gradient is complete, so that not all copies and all gradients exist at the
same time.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_lite.config import TrainingConfig
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.torchao_types import is_float8_tensor, is_gathered_in_float8


def needs_no_fsdp(training: TrainingConfig, *, world_size: int) -> bool:
    """Return whether to train without FSDP: on one rank that keeps its weights on the device."""
    return world_size == 1 and not training.enable_cpu_offload


class MixedPrecisionTransformer(Transformer):
    """A Transformer on one rank that computes with copies of its weights."""

    copies: "WeightCopies"

    def forward(
        self, tokens: Tensor, head: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> Tensor:
        """Do what a Transformer does. A pass that no backward pass follows frees the copies."""
        self.copies.enter()
        needs_backward = False
        try:
            out = super().forward(tokens, head)
            needs_backward = out.requires_grad
        finally:
            if not needs_backward:
                self.copies.leave()
        return out


def apply_mixed_precision(model: Transformer, *, training: TrainingConfig) -> None:
    """Make `model`, on meta, compute with copies of its weights, in place."""
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

        # Masters are plain tensors. torchao's wrappers say how to cast them to float8.
        self._wrappers: dict[nn.Module, Any] = {}
        for module in model.modules():
            for name, weight in module._parameters.items():
                if is_gathered_in_float8(weight):
                    self._wrappers[module] = weight
                    module._parameters[name] = nn.Parameter(weight._tensor)

    def enter(self) -> None:
        """Put the copies into the modules, after making those that are missing."""
        self._weights = self._weights or self._find_weights()
        missing = [weight for weight in self._weights if not weight.storage.size()]
        _fill([weight for weight in missing if not is_float8_tensor(weight.copy)])
        _cast([weight for weight in missing if is_float8_tensor(weight.copy)])
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
            copy = self._new_copy(master, self._wrappers.get(of_master[0][0]))
            weights.append(weight := _Weight(master, copy, of_master))
            copy.register_post_accumulate_grad_hook(partial(self._take_gradient, weight))
            weight.free()

            # An embedding's backward pass does not read its weight.
            if of_master == [(self._model.tok_embeddings, "weight")]:
                free = partial(self._free_in_last, weight)
                self._model.tok_embeddings.register_forward_hook(free)
        return weights

    def _new_copy(self, master: nn.Parameter, wrapper: Any) -> nn.Parameter:
        """Return a copy of `master` without values; itself, if it has the compute type."""
        if wrapper is None:
            same = master.dtype == self._dtype
            return master if same else nn.Parameter(torch.empty_like(master, dtype=self._dtype))

        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

        data, scale = torch.empty_like(master, dtype=wrapper._dtype), master.new_empty(())
        config, role = wrapper._linear_mm_config, GemmInputRole.WEIGHT
        return nn.Parameter(Float8TrainingTensor(data, scale, self._dtype, config, role))

    def _free_in_last(self, weight: "_Weight", *_: object) -> None:
        if self.last_microbatch:
            weight.free()

    def _take_gradient(self, weight: "_Weight", copy: Tensor) -> None:
        """Add the gradient of `copy` to the sum over microbatches. The last one adds the sum to the
        master's gradient. The types of the sums are FSDP2's."""
        gradient, copy.grad = copy.grad, None
        assert gradient is not None, "autograd has just accumulated it"
        weight.put(weight.master)
        if self.last_microbatch:
            weight.free()

        if weight.gradient is None:
            weight.gradient = gradient.to(self._reduce_dtype)
        else:
            weight.gradient += gradient
        if self.last_microbatch:
            total, weight.gradient = weight.gradient.to(weight.master.dtype), None
            before = weight.master.grad
            weight.master.grad = total if before is None else before + total


@dataclass(eq=False)
class _Weight:
    """A master weight, its copy, and the modules that hold one of the two."""

    master: nn.Parameter
    copy: nn.Parameter
    places: list[tuple[nn.Module, str]]  # several, if modules share the weight
    gradient: Tensor | None = None  # of the step's microbatches so far, in the reduce type

    @property
    def storage(self) -> torch.UntypedStorage:
        """The memory of the copy."""
        data = self.copy._data if is_float8_tensor(self.copy) else self.copy
        return data.untyped_storage()

    def put(self, parameter: nn.Parameter) -> None:
        """Make the modules hold `parameter`. setattr would check it each time."""
        for module, name in self.places:
            module._parameters[name] = parameter

    def free(self) -> None:
        """Free the memory of the copy, unless the master is its own copy."""
        if self.copy is not self.master:
            self.storage.resize_(0)


@torch.no_grad()
def _fill(weights: Sequence[_Weight]) -> None:
    """Copy masters in another type."""
    for weight in weights:
        weight.storage.resize_(weight.copy.nbytes)
    if weights:
        torch._foreach_copy_([each.copy for each in weights], [each.master for each in weights])


@torch.no_grad()
def _cast(weights: Sequence[_Weight]) -> None:
    """Copy masters in float8, each scaled by its largest magnitude."""
    if not weights:
        return

    # torchao is slow to import, and bf16 runs do not need it.
    from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8
    from torchao.float8.float8_utils import amax_to_scale

    masters: list[Tensor] = [weight.master for weight in weights]
    copies: list[Any] = [weight.copy for weight in weights]
    dtype = copies[0]._data.dtype
    scales = amax_to_scale(torch.stack(torch._foreach_norm(masters, math.inf)), dtype)
    for master, copy, scale in zip(masters, copies, scales, strict=True):
        config, role = copy._linear_mm_config, copy._gemm_input_role
        copy._data = hp_tensor_and_scale_to_float8(master, scale, dtype, config, role)._data
        copy._scale = scale
