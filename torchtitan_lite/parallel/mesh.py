"""The device mesh. It keeps every dimension, also of size 1, so that all of them can be indexed."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan_lite.config import ParallelDegrees

MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""From the slowest link to the fastest: neighbouring ranks share tensor parallelism."""


def build_mesh(degrees: ParallelDegrees, *, device_type: str) -> DeviceMesh:
    """Build the mesh of all processes with the dimensions `MESH_DIMS`."""
    sizes = (1, degrees.dp_replicate, degrees.dp_shard, 1, degrees.tp)
    return init_device_mesh(device_type, sizes, mesh_dim_names=MESH_DIMS)


def flatten_data_parallel(mesh: DeviceMesh) -> DeviceMesh:
    """Return the one-dimensional mesh of this rank's data-parallel peers, replicas and shards.

    Each of them trains on other samples."""
    return mesh["dp_replicate", "dp_shard"]._flatten("dp")
