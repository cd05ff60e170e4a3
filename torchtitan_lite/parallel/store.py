"""The store of torchrun's job, where ranks meet."""

import os
from datetime import timedelta

import torch.distributed as dist


def connect_store(timeout_s: float) -> dist.Store:
    """Connect to the store at MASTER_ADDR:MASTER_PORT. The connection and each answer may take
    `timeout_s`. One connection serves one thread at a time.

    Each attempt of a job has its own keys. Torchrun serves the store, so after a restart it still
    holds what the attempt before left there, such as the addresses of its process group.
    """
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    return dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
