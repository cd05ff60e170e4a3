"""The check that all ranks were started alike, before they join the process group.

Ranks that differ in the config, in library versions or in this package's sources would train
garbage, or hang in a collective that not all of them enter. Nothing in torch compares them.
"""

import json
import os
import socket
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from torchtitan_lite.errors import ConfigError

from .distributed import local_world_size, read_rank
from .store import connect_store

HEARD_SECONDS = 10
"""How long rank 0, whose host may serve the store, waits for the others to read the verdict."""
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

    # Each rank posts only its differences from rank 0, so that little travels.
    if rank == 0:
        store.set("facts", json.dumps(facts))
    first = json.loads(store.get("facts"))
    names = [*first, *(name for name in facts if name not in first)]
    differing = {
        name: facts.get(name, "none") for name in names if facts.get(name) != first.get(name)
    }
    store.set(f"rank {rank}", json.dumps({"host": socket.gethostname(), "differing": differing}))

    # Rank 0 posts the verdict.
    if rank == 0:
        answers = [json.loads(store.get(f"rank {other}")) for other in range(world_size)]
        store.set("verdict", describe_differences(first, answers))
    if verdict := store.get("verdict").decode():
        store.set(f"rank {rank} heard", "")
        if rank == 0:
            with suppress(RuntimeError):
                others = [f"rank {other} heard" for other in range(world_size)]
                store.wait(others, timedelta(seconds=HEARD_SECONDS))
        raise ConfigError(verdict)


def describe_differences(first: Mapping[str, str], answers: list[dict]) -> str:
    """Return a line for each fact in which a rank differs from rank 0, whose facts are `first`: its
    values, and the ranks and hosts that have them; "" if none differs. `answers` holds each rank's
    host and differing facts, by rank."""
    names = dict.fromkeys(name for answer in answers for name in answer["differing"])
    lines = []
    for name in names:
        holders = defaultdict(list)
        for rank, answer in enumerate(answers):
            value = answer["differing"].get(name, first.get(name, "none"))
            holders[value].append(f"{rank} on {answer['host']}")

        values = []
        for value, ranks in holders.items():
            more = f" and {len(ranks) - SHOWN_RANKS} more" if len(ranks) > SHOWN_RANKS else ""
            values.append(f"{value} (rank {', '.join(ranks[:SHOWN_RANKS])}{more})")
        lines.append(f"{name} differs between ranks: {'; '.join(values)}")

    if lines:
        lines.append("start every node with the same config, command line and installation.")
    return "\n".join(lines)
