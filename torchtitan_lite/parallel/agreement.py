"""The check that all ranks were started alike, before they join the process group.

Ranks that differ in the config, in library versions or in this package's sources would train
garbage, or hang in a collective that not all of them enter. Nothing in torch compares them.
"""

import json
import os
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from torchtitan_lite.errors import ConfigError

from .distributed import connect_store, local_world_size, read_rank

HEARD_SECONDS = (
    10  # for the other ranks to read the verdict: the host of rank 0 may serve the store
)
SHOWN_RANKS = 4


def check_started_alike(facts: Mapping[str, str], *, timeout_s: float) -> None:
    """Raise ConfigError on every rank unless all of them have the same `facts`, values by name, and
    the same numbers of nodes and of processes per node. Waits up to `timeout_s` for the slowest
    rank."""
    rank, world_size = read_rank()
    nodes, processes = os.environ.get("GROUP_WORLD_SIZE", "1"), str(local_world_size())
    own = {**facts, "NNODES": nodes, "NGPU": processes}
    compare_facts(connect_store(timeout_s), own, rank=rank, world_size=world_size)


def compare_facts(
    store: dist.Store, facts: Mapping[str, str], *, rank: int, world_size: int
) -> None:
    """Raise ConfigError on every rank unless all of them have the same `facts`."""
    store = dist.PrefixStore("agreement", store)
    store.set(f"host {rank}", socket.gethostname())
    store.set(f"facts {rank}", json.dumps(facts))
    ranks = range(world_size)

    # Rank 0 compares, and posts the verdict.
    if rank == 0:
        answers = [json.loads(store.get(f"facts {other}")) for other in ranks]
        hosts = [store.get(f"host {other}").decode() for other in ranks]
        store.set("verdict", describe_differences(answers, hosts))
    if verdict := store.get("verdict").decode():
        store.set(f"rank {rank} heard", "")
        if rank == 0:
            with suppress(RuntimeError):
                heard = [f"rank {other} heard" for other in ranks]
                store.wait(heard, timedelta(seconds=HEARD_SECONDS))
        raise ConfigError(verdict)


def describe_differences(answers: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> str:
    """Return a line for each fact that differs: its values, and the ranks and hosts that have them;
    "" if none differs. `answers` and `hosts` are in the order of ranks."""
    lines = []
    for name in dict.fromkeys(name for facts in answers for name in facts):
        holders = defaultdict(list)
        for rank, (facts, host) in enumerate(zip(answers, hosts, strict=True)):
            holders[facts.get(name, "none")].append(f"{rank} on {host}")
        if len(holders) == 1:
            continue

        values = []
        for value, ranks in holders.items():
            more = f" and {len(ranks) - SHOWN_RANKS} more" if len(ranks) > SHOWN_RANKS else ""
            values.append(f"{value} (rank {', '.join(ranks[:SHOWN_RANKS])}{more})")
        lines.append(f"{name} differs between ranks: {'; '.join(values)}")

    if lines:
        lines.append("start every node with the same config, command line and installation.")
    return "\n".join(lines)
