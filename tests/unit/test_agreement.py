"""Ranks that compare what they were started with, as threads that share a store in memory."""

import re
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.run.process_group import check_started_alike

pytestmark = pytest.mark.timeout(30)
FACTS = {"[optimizer] lr": "0.0008", "torch": "2.13.0"}
OTHER = {"[optimizer] lr": "0.5", "torch": "2.11.0"}
LR = r"^\[optimizer\] lr .*: 0\.0008 \(rank 0 on H, 1 on H\); 0\.5 \(rank 2 on H\)$"
TORCH = (
    r"^torch differs .*: 2\.13\.0 \(rank 0 on H\); 2\.11\.0 \(rank 1 on H, .*, 4 on H and 5 more"
)


def messages(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """The error of each rank, with H for its host; "" where it may start."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))

    def message(rank: int) -> str:
        try:
            check_started_alike(facts[rank], store=store, rank=rank, world_size=len(facts))
        except ConfigError as error:
            return str(error).replace(f" on {socket.gethostname()}", " on H")
        return ""

    with ThreadPoolExecutor(len(facts)) as ranks:
        return list(ranks.map(message, range(len(facts))))


@pytest.mark.parametrize("ranks", [1, 3])
def test_check_started_alike_lets_ranks_that_agree_start(ranks):
    assert messages([FACTS] * ranks) == [""] * ranks


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        ([FACTS, FACTS, OTHER], [LR, r"^torch .*: 2\.13\.0 \(.*\); 2\.11\.0 \(rank 2 on H\)$"]),
        ([FACTS | {"k": "1"}, FACTS], [r"^k .*: 1 \(rank 0 on H\); none \(rank 1 on H\)$"]),
        ([FACTS, FACTS | {"k": "1"}], [r"^k .*: none \(rank 0 on H\); 1 \(rank 1 on H\)$"]),
        ([FACTS] + [FACTS | {"torch": "2.11.0"}] * 9, [TORCH]),  # only some ranks are named
    ],
)
def test_check_started_alike_reports_all_differences_on_every_rank(facts, lines):
    (message,) = set(messages(facts))
    *found, fix = message.splitlines()
    assert "same config" in fix
    for line, expected in zip(found, lines, strict=True):
        assert re.search(expected, line)
