"""Batches made ahead: the same ones, errors in their turn, and no thread left over."""

import threading
from collections.abc import Iterator

import pytest
import torch

from torchtitan_lite.data.dataloader import PREFETCHED, Batch, Prefetcher

CPU = torch.device("cpu")


def numbered(count: int, made: list[int], *, fail_at: int | None = None) -> Iterator[Batch]:
    """Batches that hold their number, each noted in `made` with the thread that made it."""
    for number in range(count):
        if number == fail_at:
            raise RuntimeError("no such batch")
        made.append(threading.get_ident())
        yield torch.tensor([number]), torch.tensor([-number])


@pytest.mark.parametrize("count", [0, 1, PREFETCHED, 3 * PREFETCHED])
def test_the_same_batches_in_order_from_another_thread(count: int) -> None:
    made: list[int] = []
    batches = Prefetcher(numbered(count, made), device=CPU)
    assert [(int(tokens), int(labels)) for tokens, labels in batches] == [
        (number, -number) for number in range(count)
    ]
    assert threading.get_ident() not in made
    with pytest.raises(StopIteration):
        next(batches)
    batches.close()


def test_batches_are_made_before_they_are_asked_for_and_no_more_than_needed() -> None:
    made: list[int] = []
    batches = Prefetcher(numbered(100, made), device=CPU)
    for future in batches._coming:
        future.result()
    assert len(made) == PREFETCHED
    next(batches)
    batches._coming[-1].result()
    assert len(made) == PREFETCHED + 1
    batches.close()


def test_an_error_is_raised_in_its_turn_and_again() -> None:
    batches = Prefetcher(numbered(100, [], fail_at=2), device=CPU)
    assert [int(next(batches)[0]), int(next(batches)[0])] == [0, 1]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such batch"):
            next(batches)
    batches.close()


def test_no_thread_is_left_after_close() -> None:
    made: list[int] = []
    batches = Prefetcher(numbered(100, made), device=CPU)
    next(batches)
    assert made[0] in [thread.ident for thread in threading.enumerate()]
    batches.close()
    assert made[0] not in [thread.ident for thread in threading.enumerate()]
    assert len(made) < 100
