"""The order in which a model is made parallel, the set-up of the compiler, and FSDP2."""

from functools import partial
from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from torchtitan_lite import patches
from torchtitan_lite.config import (
    ActivationCheckpointConfig,
    CompileConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.torchao_types import is_gathered_in_float8

from .activation_checkpoint import apply_activation_checkpointing
from .tensor_parallel import apply_tensor_parallel, enable_async_tensor_parallel


def parallelize(
    model: Transformer,
    mesh: DeviceMesh,
    *,
    parallelism: ParallelismConfig,
    activation_checkpoint: ActivationCheckpointConfig,
    compile: CompileConfig,
    training: TrainingConfig,
) -> None:
    """Make `model`, on meta and already converted to float8, parallel in place over `mesh`."""
    # Tensor parallelism comes first, because FSDP shards what it has already split. On one rank
    # its DTensors would only cost time.
    if mesh["tp"].size() > 1:
        apply_tensor_parallel(
            model, mesh["tp"], loss_parallel=not parallelism.disable_loss_parallel
        )

    # The compiler can overlap the collectives of tensor parallelism with matmuls.
    if parallelism.enable_async_tensor_parallel:
        enable_async_tensor_parallel(mesh["tp"])

    # Activation checkpointing comes before the compiler, which then plans what a block recomputes.
    apply_activation_checkpointing(model, activation_checkpoint)

    # Blocks are compiled before FSDP, so that its gathers stay outside of their graphs.
    if compile.enable:
        set_up_compiler(mesh, activation_checkpoint)
    if compile.covers("model"):
        compile_blocks(model)

    # FSDP comes last, also on one process: it applies mixed precision.
    apply_fsdp(
        model, mesh, training=training, reshard_after_forward=parallelism.fsdp_reshard_after_forward
    )


def set_up_compiler(mesh: DeviceMesh, activation_checkpoint: ActivationCheckpointConfig) -> None:
    """Configure the compiler of this process for `mesh` and for a memory budget."""
    # Under tensor parallelism ranks compile different code.
    if mesh["tp"].size() > 1:
        patches.tag_compiler_cache(f"rank {mesh.get_rank()} of {mesh.size()}")

    # Faults of the compiler on CPU only.
    if mesh.device_type == "cpu":
        patches.save_no_rng_state()
        patches.name_mxfp8_scales_in_cpp()
        patches.trust_instruction_set()

    # Share of a block's activations that the compiler keeps; 1.0 leaves the choice to the modes of
    # activation checkpointing.
    torch._functorch.config.activation_memory_budget = 1.0
    if activation_checkpoint.mode == "memory_budget":
        torch._functorch.config.activation_memory_budget = activation_checkpoint.memory_budget
        patches.weigh_cudnn_attention()
        patches.count_no_memory_for_meshes()


def compile_blocks(model: Transformer) -> None:
    """Compile each block of `model` in place as one full graph. Equal blocks share their code."""
    for block in model.layers:
        block.compile(fullgraph=True)


def apply_fsdp(
    model: Transformer, mesh: DeviceMesh, *, training: TrainingConfig, reshard_after_forward: str
) -> None:
    """Shard `model` in place over dp_shard of `mesh`, replicated over dp_replicate.

    FSDP gathers the embedding, each block, and the last norm with the output projection as a group
    each; if the embedding's weight is the output's, it is in the last group, which is gathered
    before the first block. `reshard_after_forward`: "always" and "never" free all groups, or none,
    after their forward. "default" keeps the last block and the last group: backward needs them
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
        patches.scale_gathered_weights_over(mesh["dp_shard", "tp"]._flatten("dp_shard_tp"))
    elif any(map(is_gathered_in_float8, model.parameters())):
        patches.scale_gathered_weights_over(None)

    reshard, reshard_last = reshard_after_forward != "never", reshard_after_forward == "always"
    *blocks, last_block = model.layers
    for block in blocks:
        shard(block, reshard_after_forward=reshard)
    shard(last_block, reshard_after_forward=reshard_last)

    # FSDP forms the last group of what is left when it shards the model: of both ends if they share
    # a weight. An embedding's gradient does not depend on its weight: backward does not gather it.
    if not model.args.tie_embeddings:
        shard(model.tok_embeddings, reshard_after_forward=reshard)
        cast(FSDPModule, model.tok_embeddings).set_unshard_in_backward(False)
        shard([model.norm, model.output], reshard_after_forward=reshard_last)
    shard(model, reshard_after_forward=reshard_last)
