"""Ranks that compare what they were started with, as threads that share a store in memory."""

import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.parallel.distributed import check_started_alike

pytestmark = pytest.mark.timeout(30)
HOST = socket.gethostname()
FACTS = {"[optimizer] lr": "0.0008", "torch": "2.13.0"}
FIX = "start every node with the same config, command line and installation."


def messages(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """The error of each rank; "" where it may start."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))

    def message(rank: int) -> str:
        try:
            check_started_alike(facts[rank], store=store, rank=rank, world_size=len(facts))
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(facts)) as ranks:
        return list(ranks.map(message, range(len(facts))))


def test_ranks_that_agree_may_start() -> None:
    assert messages([FACTS]) == [""]
    assert messages([FACTS] * 3) == [""] * 3


def test_every_rank_learns_all_differences_and_who_differs() -> None:
    other = {"[optimizer] lr": "0.5", "torch": "2.11.0"}
    expected = (
        f"[optimizer] lr differs between ranks: 0.0008 (rank 0 on {HOST}, 1 on {HOST}); "
        f"0.5 (rank 2 on {HOST})\n"
        f"torch differs between ranks: 2.13.0 (rank 0 on {HOST}, 1 on {HOST}); "
        f"2.11.0 (rank 2 on {HOST})\n{FIX}"
    )
    assert messages([FACTS, FACTS, other]) == [expected] * 3


@pytest.mark.parametrize("first", [True, False])
def test_a_fact_that_only_some_ranks_state_differs(first: bool) -> None:
    facts = [FACTS | {"[new] key": "1"}, FACTS]
    (message, _) = messages(facts if first else facts[::-1])
    ranks = (0, 1) if first else (1, 0)
    values = [f"1 (rank {ranks[0]} on {HOST})", f"none (rank {ranks[1]} on {HOST})"]
    assert (
        message
        == f"[new] key differs between ranks: {'; '.join(values if first else values[::-1])}\n{FIX}"
    )


def test_of_many_ranks_the_first_are_named() -> None:
    message = messages([FACTS] + [FACTS | {"torch": "2.11.0"}] * 9)[5]
    assert message.startswith(
        f"torch differs between ranks: 2.13.0 (rank 0 on {HOST}); 2.11.0 (rank 1 on {HOST}, 2 on"
    )
    assert f"4 on {HOST} and 5 more)" in message
