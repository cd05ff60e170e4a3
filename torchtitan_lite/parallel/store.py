"""The store of torchrun's job, where ranks meet."""

import os
from datetime import timedelta

import torch.distributed as dist


def connect_store(timeout_s: float) -> dist.Store:
    """A connection to the store at MASTER_ADDR:MASTER_PORT that has `timeout_s` to come about and
    then for each answer. One connection serves one thread at a time.

    Each attempt has keys of its own. Torchrun serves the store, so after a restart it still holds
    what the attempt before left there, such as the addresses of its process group, which the next
    one would try to reach.
    """
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    return dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
