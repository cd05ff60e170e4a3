"""The order in which a model is made parallel, and the set-up of the compiler."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite import patches
from torchtitan_lite.base.torchao_types import has_one_scale, is_gathered_in_float8
from torchtitan_lite.config import (
    ActivationCheckpointConfig,
    CompileConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan_lite.float8.convert import is_float8
from torchtitan_lite.models.init import local_part
from torchtitan_lite.models.llama3 import Transformer

from .activation_checkpoint import apply_activation_checkpointing
from .fsdp import apply_fsdp, resharding
from .one_rank import apply_mixed_precision, needs_no_fsdp


def parallelize(
    stages: Sequence[Transformer],
    mesh: DeviceMesh,
    *,
    parallelism: ParallelismConfig,
    activation_checkpoint: ActivationCheckpointConfig,
    compile: CompileConfig,
    training: TrainingConfig,
    microbatches: int,
    flash: bool,
) -> None:
    """Make this rank's `stages` of a model parallel over `mesh`, in place. They are on meta and
    already converted to float8. `microbatches`: those of a step. `flash`: causal attention runs in
    the GPU's FlashAttention."""
    if compile.enable:
        set_up_compiler(mesh, activation_checkpoint)
    if parallelism.enable_async_tensor_parallel:
        from .tensor_parallel import enable_async_tensor_parallel

        enable_async_tensor_parallel(mesh["tp"])

    for model in stages:
        # Tensor parallelism comes first, because FSDP shards what it has already split. On one rank
        # its DTensors would only cost time.
        if mesh["tp"].size() > 1:
            from .tensor_parallel import apply_tensor_parallel

            apply_tensor_parallel(
                model, mesh["tp"], loss_parallel=not parallelism.disable_loss_parallel
            )
        if mesh["cp"].size() > 1:
            from .context_parallel import apply_context_parallel

            apply_context_parallel(model, mesh["cp"], flash=flash)

        # Activation checkpointing comes before the compiler, which plans what a block recomputes,
        # and that before FSDP, so that its gathers stay outside of the graphs.
        apply_activation_checkpointing(model, activation_checkpoint)
        if compile.covers("model"):
            compile_blocks(model, backend=compile.backend)

        # FSDP and mixed precision come last. On one data-parallel rank FSDP would only copy.
        data_ranks = mesh.size() // (mesh["pp"].size() * mesh["tp"].size())
        alone = needs_no_fsdp(training, data_ranks=data_ranks)
        reshard = resharding(parallelism, pipelined=mesh["pp"].size() > 1)

        if alone or reshard == "never":
            cast_weights_once(model, alone=alone, microbatches=microbatches, compile=compile)
        if alone:
            apply_mixed_precision(model, training=training)
        else:
            apply_fsdp(model, mesh, training=training, reshard_after_forward=reshard)


def set_up_compiler(mesh: DeviceMesh, activation_checkpoint: ActivationCheckpointConfig) -> None:
    """Configure the compiler of this process for `mesh` and for a memory budget."""
    # The trainer collects garbage itself. Do not collect after each compilation.
    torch._dynamo.config.run_gc_after_compile = False

    # Under tensor and context parallelism ranks compile different code.
    if max(mesh["tp"].size(), mesh["cp"].size()) > 1:
        patches.tag_compiler_cache(f"rank {mesh.get_rank()} of {mesh.size()}")
    # The scale of a float8 cast is a maximum over ranks of tensor parallelism: all-reduces that do
    # not wait for each other are merged.
    if mesh["tp"].size() > 1:
        torch._inductor.config.bucket_all_reduces_fx = "all"

    # Faults of the compiler: on CPU, and in the choice of kernels on GPUs.
    if mesh.device_type == "cpu":
        patches.save_no_rng_state()
        patches.name_mxfp8_scales_in_cpp()
        # To build test programs for the vector instructions that PyTorch uses itself takes 7 s.
        cpp = torch._inductor.config.cpp
        if cpp.vec_isa_ok is None and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
            cpp.vec_isa_ok = True
            patches.ignore_vnni_and_amx()
    else:
        patches.fuse_norms_with_their_gradients()
        patches.store_transposes_in_tiles()

    # Share of a block's activations that the compiler keeps; 1.0 leaves the choice to the modes of
    # activation checkpointing.
    torch._functorch.config.activation_memory_budget = 1.0
    if activation_checkpoint.mode == "memory_budget":
        torch._functorch.config.activation_memory_budget = activation_checkpoint.memory_budget
        patches.weigh_cudnn_attention()
        patches.count_no_memory_for_meshes()


def cast_weights_once(
    model: Transformer, *, alone: bool, microbatches: int, compile: CompileConfig
) -> None:
    """Give the linears of `model` a `weight_caster`, by which those who gather their weights cast
    them to float8 for a whole step, in code that is compiled if the blocks are: weights that
    several microbatches read, or that have one cast for both passes. Not a tied weight, which the
    embedding reads, nor what FSDP gathers in float8."""

    def is_cast_once(linear: nn.Module) -> bool:
        if not is_float8(linear) or (model.args.tie_embeddings and linear is model.output):
            return False
        gathered = is_gathered_in_float8(local_part(linear.weight))
        return (microbatches > 1 or has_one_scale(linear)) and (alone or not gathered)

    for part in filter(None, (*model.layers.values(), model.output)):
        linears: list[Any] = list(filter(is_cast_once, part.modules()))
        if not linears:
            continue
        from torchtitan_lite.float8.weights import WeightCaster  # imports torchao

        cast = WeightCaster()
        if compile.covers("model"):
            cast.compile(fullgraph=True, dynamic=False, backend=compile.backend)
        for linear in linears:
            linear.weight_caster = cast


def compile_blocks(model: Transformer, *, backend: str = "inductor") -> None:
    """Compile each block of `model` in place as one full graph. Equal blocks share their code."""
    for block in model.layers.values():
        # Not dynamic: training keeps its graph when validation has another shape.
        block.compile(fullgraph=True, dynamic=False, backend=backend)
