"""FSDP2, always applied, also on one process: float32 weights and gradients, lower precision in
between."""

import inspect
from functools import wraps
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from torchtitan_lite.config import TrainingConfig
from torchtitan_lite.torchao_types import is_gathered_in_float8


def apply_fsdp(
    model: nn.Module, mesh: DeviceMesh, *, training: TrainingConfig, reshard_after_forward: str
) -> None:
    """Shard `model` in place over dp_shard of `mesh`, replicated over dp_replicate: a group each
    for the embedding, every block, and the last norm with the output projection.

    `reshard_after_forward` is "default", "always" or "never": which groups are freed after their
    forward. By default all are but the last block and what follows it. The backward needs those
    first, and would wait for them: as the loss has its gradient computed in the forward pass, too
    little is left of the last group's backward to gather a block behind."""
    # Floating inputs of a block are the residual stream, which already has the compute type, and
    # the rotary tables, which stay float32.
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        cast_forward_inputs=False,
    )
    replicated = mesh["dp_replicate"].size() > 1
    dp_mesh = mesh["dp_replicate", "dp_shard"] if replicated else mesh["dp_shard"]
    on_gpu = mesh.device_type != "cpu"
    offload = (
        CPUOffloadPolicy(pin_memory=on_gpu) if training.enable_cpu_offload else OffloadPolicy()
    )

    def shard(modules: nn.Module | list[nn.Module], *, reshard: bool) -> None:
        fully_shard(
            modules,
            mesh=dp_mesh,
            mp_policy=precision,
            offload_policy=offload,
            reshard_after_forward=reshard,
        )

    _scale_whole_weights(model, mesh)
    reshard, reshard_last = reshard_after_forward != "never", reshard_after_forward == "always"
    *blocks, last_block = model.get_submodule("layers").children()
    embeddings = model.get_submodule("tok_embeddings")
    shard(embeddings, reshard=reshard)
    cast(FSDPModule, embeddings).set_unshard_in_backward(
        False
    )  # a row's gradient does not depend on the row
    for block in blocks:
        shard(block, reshard=reshard)
    shard(last_block, reshard=reshard_last)
    shard([model.get_submodule("norm"), model.get_submodule("output")], reshard=reshard_last)
    shard(model, reshard=reshard)


def _scale_whole_weights(model: nn.Module, mesh: DeviceMesh) -> None:
    """Have float8 all-gathers scale a weight by the amax of all its shards. By itself torchao asks
    FSDP's alone, and would scale each shard of tensor parallelism by another amax."""
    split = [
        weight.to_local() for weight in model.parameters() if isinstance(weight, DTensor)
    ]  # by tensor parallelism
    if not any(map(is_gathered_in_float8, (*split, *model.parameters()))):
        return
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    cast_shard = inspect.unwrap(
        WeightWithDynamicFloat8CastTensor.fsdp_pre_all_gather
    )  # without an earlier model's
    WeightWithDynamicFloat8CastTensor.fsdp_pre_all_gather = cast_shard
    if not any(map(is_gathered_in_float8, split)):
        return
    shards = mesh["dp_shard", "tp"]._flatten("dp_shard_tp")

    @wraps(cast_shard)  # FSDP2 counts the parameters
    def cast_with_all(weight: WeightWithDynamicFloat8CastTensor, mesh: DeviceMesh) -> Any:
        return cast_shard(weight, shards)

    WeightWithDynamicFloat8CastTensor.fsdp_pre_all_gather = cast_with_all
