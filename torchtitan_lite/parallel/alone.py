"""The process group of a command: its own process alone, without torchrun and without sockets."""

import os

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # it registers the backend "fake"

from torchtitan_lite.run.process_group import has_gpus


def init_alone() -> torch.device:
    """Make this process a group of its own, which opens no socket, and return its device. Raises
    ConfigError for GPUs that PyTorch cannot use.

    The backend "fake" sends nothing. With one rank, its collectives have the right results."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    dist.init_process_group(dist.Backend.FAKE, store=fake_pg.FakeStore(), rank=0, world_size=1)
    return torch.device("cuda", 0) if has_gpus() else torch.device("cpu")
