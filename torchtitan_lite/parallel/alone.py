"""A job of one process, which a command starts without torchrun: nothing reaches it from outside.

The commands that compute in their own process use a group without a network; training runs of a
benchmark keep the backends of training, which listen on the loopback interface.
"""

import os
from functools import cache

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # it registers the backend "fake"

ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""Environment of such a process. torchrun would also set an address at which ranks meet."""


def own_store() -> dist.Store | None:
    """Return the store in the memory of this process if it is a whole job, else None."""
    alone = os.environ["WORLD_SIZE"] == "1" and "MASTER_ADDR" not in os.environ
    return _own_store() if alone else None


@cache
def _own_store() -> dist.Store:
    return dist.HashStore()


def init_alone() -> torch.device:
    """Make this process a group of its own, which opens no socket, and return its device.

    The backend "fake" sends nothing. With one rank, its collectives have the right results."""
    os.environ.update(ALONE)
    dist.init_process_group(dist.Backend.FAKE, store=fake_pg.FakeStore(), rank=0, world_size=1)
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
