"""The order in which a model is made parallel, and how the compiler is set up."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.config import (
    ActivationCheckpointConfig,
    CompileConfig,
    ParallelismConfig,
    TrainingConfig,
)

from .activation_checkpoint import apply_activation_checkpointing
from .fsdp import apply_fsdp
from .tensor_parallel import apply_tensor_parallel, enable_async_tensor_parallel


def apply_compile(
    model: nn.Module,
    mesh: DeviceMesh,
    compile: CompileConfig,
    activation_checkpoint: ActivationCheckpointConfig,
) -> None:
    """Compile each block of `model` in place, as one full graph that equal blocks share, and set
    the compiler up: for ranks that share its cache, and for a share of the activations that it is
    to keep."""
    if not compile.enable:
        return
    if mesh["tp"].size() > 1:
        # The cache takes the DTensors of all ranks for the same (pytorch/pytorch#188390): a rank
        # would be handed code for another's part of the vocabulary, and train on a wrong loss.
        torch.compiler.config.cache_key_tag += f" rank {mesh.get_rank()} of {mesh.size()}"
    if mesh.device_type == "cpu":
        # The compiler takes a second to load.
        from torch._functorch import partitioners
        from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP

        # Attention may draw random numbers, so that where it is recomputed the compiler saves their
        # state: on CPU in the place where it looks for DTensor's mesh (torch 2.13). Ours draws
        # none.
        partitioners.has_recomputable_rng_ops = lambda fx_g: False
        # What a block keeps for its backward may be a scale of MXFP8, the float8 type that the
        # compiler cannot name.
        DTYPE_TO_CPP.setdefault(torch.float8_e8m0fnu, "at::Float8_e8m0fnu")
        trust_instruction_set()
    torch._functorch.config.activation_memory_budget = 1.0
    if activation_checkpoint.mode == "memory_budget":
        torch._functorch.config.activation_memory_budget = activation_checkpoint.memory_budget
        weigh_cudnn_attention()
        if hasattr(
            torch._functorch.config, "unsafe_treat_script_objects_as_zero_size"
        ):  # from torch 2.13 on
            # Under tensor parallelism a block keeps DTensor's mesh, which holds no activations.
            torch._functorch.config.unsafe_treat_script_objects_as_zero_size = True
    if compile.covers("model"):
        for block in model.get_submodule("layers").children():
            block.compile(fullgraph=True)


def weigh_cudnn_attention() -> None:
    """Have the compiler take cuDNN's attention for what it is, the dearest operator of a block. It
    knows that of flash attention, and would compute cuDNN's again under any budget (torch 2.13)."""
    from torch._functorch import partitioners

    known = partitioners.get_default_op_list

    def get_default_op_list() -> partitioners.OpTypes:
        types = known()
        types.compute_intensive_ops.add(torch.ops.aten._scaled_dot_product_cudnn_attention)
        return types

    partitioners.get_default_op_list = get_default_op_list


def trust_instruction_set() -> None:
    """Have the compiler use the CPU's best instruction set where PyTorch itself does. Else it
    builds a program for each that the CPU has, some of them with PyTorch's headers, which takes
    seconds, to learn whether it could. For AMX it still does: compilers that PyTorch supports may
    not know its instructions."""
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import VecISA

    best = "AVX512" if torch.cpu._is_avx512_supported() else "AVX2"
    if config.cpp.vec_isa_ok is None and torch.backends.cpu.get_cpu_capability() == best:
        build = VecISA.check_build

        def check_build(isa: VecISA, code: str) -> bool:
            return "amx" not in isa.build_arch_flags() or build(isa, code)

        VecISA.check_build = check_build  # type: ignore[assignment, method-assign]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    parallelism: ParallelismConfig,
    activation_checkpoint: ActivationCheckpointConfig,
    compile: CompileConfig,
    training: TrainingConfig,
) -> None:
    """Make `model`, on meta and already converted to float8, parallel in place over `mesh`."""
    if mesh["tp"].size() > 1:  # a DTensor costs time also on one rank
        apply_tensor_parallel(
            model, mesh["tp"], loss_parallel=not parallelism.disable_loss_parallel
        )
    if parallelism.enable_async_tensor_parallel:
        enable_async_tensor_parallel(mesh["tp"])
    apply_activation_checkpointing(model, activation_checkpoint)
    apply_compile(model, mesh, compile, activation_checkpoint)
    apply_fsdp(
        model, mesh, training=training, reshard_after_forward=parallelism.fsdp_reshard_after_forward
    )
