"""Process groups: the device mesh, gathers over it, and a process alone; and determinism."""

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan_lite.config import DebugConfig, ParallelDegrees
from torchtitan_lite.run.process_group import has_gpus

# From the slowest link to the fastest: neighbouring ranks share tensor parallelism.
MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def build_mesh(degrees: ParallelDegrees, *, device_type: str) -> DeviceMesh:
    """Build the mesh of all processes. It keeps every dimension, so that all can be indexed."""
    sizes = (degrees.pp, degrees.dp_replicate, degrees.dp_shard, degrees.cp, degrees.tp)
    return init_device_mesh(device_type, sizes, mesh_dim_names=MESH_DIMS)


class Groups:
    """The mesh of all processes, and this rank's groups of processes in it."""

    def __init__(self, degrees: ParallelDegrees, *, device_type: str) -> None:
        """Build the mesh and its groups. A collective call."""
        self.mesh = mesh = build_mesh(degrees, device_type=device_type)
        self.stages = mesh["pp"].get_group()  # the ranks of this rank's pipeline
        # Ranks with different tokens or stages: their losses add up.
        losses = mesh["pp", "dp_replicate", "dp_shard", "cp"]._flatten("loss")
        self.losses = losses.get_group()
        # Ranks that decide alike on an update, though they exchange neither losses nor norms:
        # replicas clip their own gradients, and ranks of tensor parallelism compute the loss each.
        self.replicas = mesh["dp_replicate", "tp"]._flatten("replicas").get_group()
        # Ranks that differ only in pp, cp or tp share their samples.
        self.dp_rank = losses.get_local_rank() // degrees.cp % degrees.dp


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x` of all ranks of `group`, stacked in the order of ranks."""
    values = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(values, x, group=group)
    return torch.stack(values)


def init_alone() -> torch.device:
    """Make this process a group of its own, which opens no socket, and return its device. Raises
    ConfigError for GPUs that PyTorch cannot use."""
    # It registers the backend "fake", which sends nothing: with one rank, its results are right.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    dist.init_process_group(dist.Backend.FAKE, store=FakeStore(), rank=0, world_size=1)
    return torch.device("cuda", 0) if has_gpus() else torch.device("cpu")


def set_determinism(debug: DebugConfig) -> None:
    """Seed torch, and use deterministic algorithms only if the config asks for them. Changes the
    environment, so it must be called before the process group exists."""
    torch.manual_seed(debug.seed)
    if debug.deterministic:
        # cuBLAS reads the variable at its first call.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
