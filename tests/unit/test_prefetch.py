"""prefetch: the same batches made ahead, errors in their turn, and no thread left over."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from torchtitan_lite.data.dataloader import PREFETCHED, Batch, prefetch

CPU = torch.device("cpu")


def numbered(count: int, made: list[int], *, fail_at: int | None = None) -> Iterator[Batch]:
    """Batches that hold their number. `made` gets the thread that made each of them."""
    for number in range(count):
        if number == fail_at:
            raise RuntimeError("no such batch")
        made.append(threading.get_ident())
        yield torch.tensor([number]), torch.tensor([-number])


@pytest.mark.parametrize("count", [0, 1, PREFETCHED, 3 * PREFETCHED])
def test_prefetch_yields_the_same_batches_in_order_from_another_thread(count):
    made: list[int] = []
    batches = prefetch(numbered(count, made), device=CPU)
    found = [(int(tokens), int(labels)) for tokens, labels in batches]
    assert found == [(number, -number) for number in range(count)]
    assert threading.get_ident() not in made


@pytest.mark.timeout(60)
def test_prefetch_makes_batches_ahead_and_ends_its_thread():
    made: list[int] = []
    batches = prefetch(numbered(100, made), device=CPU)
    next(batches)
    while len(made) < PREFETCHED + 1:
        time.sleep(0.001)
    assert made[0] in [thread.ident for thread in threading.enumerate()]
    batches.close()
    assert made[0] not in [thread.ident for thread in threading.enumerate()]
    assert len(made) == PREFETCHED + 1


def test_prefetch_raises_an_error_in_its_turn():
    batches = prefetch(numbered(100, [], fail_at=2), device=CPU)
    assert [int(next(batches)[0]), int(next(batches)[0])] == [0, 1]
    with pytest.raises(RuntimeError, match="no such batch"):
        next(batches)
