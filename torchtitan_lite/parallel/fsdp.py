"""FSDP2, always applied, also on one process.

Sharded weights and reduced gradients are float32; gathered weights and computation have the type
of [training] mixed_precision_param.
"""

from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from torchtitan_lite.config import TrainingConfig
from torchtitan_lite.patches import scale_gathered_weights_over
from torchtitan_lite.torchao_types import is_gathered_in_float8


def apply_fsdp(
    model: nn.Module, mesh: DeviceMesh, *, training: TrainingConfig, reshard_after_forward: str
) -> None:
    """Shard `model` in place over dp_shard of `mesh`, replicated over dp_replicate.

    FSDP gathers the embedding, each block, and the last norm with the output projection as a group
    each. `reshard_after_forward`: "always" and "never" free all groups, or none, after their
    forward. "default" keeps the last block and the last norm with the output: backward needs them
    first, and as the loss computes its gradient in the forward pass, too little would be left of
    the last group's backward to hide the gather of a block behind it."""
    # The floating-point inputs of a block are the residual stream, which already has the compute
    # type, and the rotary tables, which stay float32.
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        cast_forward_inputs=False,
    )
    replicated = mesh["dp_replicate"].size() > 1
    dp_mesh = mesh["dp_replicate", "dp_shard"] if replicated else mesh["dp_shard"]
    shard = partial(fully_shard, mesh=dp_mesh, mp_policy=precision)
    if training.enable_cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        shard = partial(shard, offload_policy=offload)

    # A scale of a float8 all-gather covers all shards of a weight, also across tensor parallelism.
    split = [weight.to_local() for weight in model.parameters() if isinstance(weight, DTensor)]
    if any(map(is_gathered_in_float8, split)):
        scale_gathered_weights_over(mesh["dp_shard", "tp"]._flatten("dp_shard_tp"))
    elif any(map(is_gathered_in_float8, model.parameters())):
        scale_gathered_weights_over(None)

    # The embedding's gradient does not depend on its weights: backward does not gather them.
    reshard, reshard_last = reshard_after_forward != "never", reshard_after_forward == "always"
    embeddings = model.get_submodule("tok_embeddings")
    shard(embeddings, reshard_after_forward=reshard)
    cast(FSDPModule, embeddings).set_unshard_in_backward(False)

    *blocks, last_block = model.get_submodule("layers").children()
    for block in blocks:
        shard(block, reshard_after_forward=reshard)
    for last in (last_block, [model.get_submodule("norm"), model.get_submodule("output")]):
        shard(last, reshard_after_forward=reshard_last)
    shard(model, reshard_after_forward=reshard)
