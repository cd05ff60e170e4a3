"""The order in which a model is made parallel, and nothing else."""

from torch import nn
from torch._functorch import partitioners
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.config import (
    ActivationCheckpointConfig,
    CompileConfig,
    ParallelismConfig,
    TrainingConfig,
)

from .activation_checkpoint import apply_activation_checkpointing
from .fsdp import apply_fsdp
from .tensor_parallel import apply_tensor_parallel


def apply_compile(model: nn.Module, compile: CompileConfig, *, on_cpu: bool) -> None:
    """Compile each block of `model` in place, as one full graph that equal blocks share."""
    if not (compile.enable and "model" in compile.components):
        return
    if on_cpu:
        # Attention may draw random numbers, so that where it is recomputed the compiler saves their state: on CPU in
        # the place where it looks for DTensor's mesh (torch 2.13). Ours draws none.
        partitioners.has_recomputable_rng_ops = lambda fx_g: False
    for block in model.get_submodule("layers").children():
        block.compile(fullgraph=True)


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
        apply_tensor_parallel(model, mesh["tp"], loss_parallel=not parallelism.disable_loss_parallel)
    apply_activation_checkpointing(model, activation_checkpoint)
    apply_compile(model, compile, on_cpu=mesh.device_type == "cpu")
    apply_fsdp(model, mesh, training=training, reshard_after_forward=parallelism.fsdp_reshard_after_forward)
