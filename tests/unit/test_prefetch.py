"""Prefetcher: the same batches made ahead, errors in their turn, and no thread left over."""

import threading
from collections.abc import Iterator

import pytest
import torch

from torchtitan_lite.data.dataloader import PREFETCHED, Batch, Prefetcher


class Numbered:
    """Batches that hold their number, prefetched. `made` has the thread that made each of them."""

    def __init__(self, count: int, *, fail_at: int | None = None) -> None:
        self.made: list[int] = []
        self.prefetched = Prefetcher(self.make(count, fail_at), device=torch.device("cpu"))

    def make(self, count: int, fail_at: int | None) -> Iterator[Batch]:
        for number in range(count):
            if number == fail_at:
                raise RuntimeError("no such batch")
            self.made.append(threading.get_ident())
            yield torch.tensor([number]), torch.tensor([-number])


@pytest.mark.parametrize("count", [0, 1, PREFETCHED, 3 * PREFETCHED])
def test_prefetcher_yields_the_same_batches_in_order_from_another_thread(count):
    numbered = Numbered(count)
    found = [(int(tokens), int(labels)) for tokens, labels in numbered.prefetched]
    assert found == [(number, -number) for number in range(count)]
    assert threading.get_ident() not in numbered.made
    with pytest.raises(StopIteration):
        next(numbered.prefetched)
    numbered.prefetched.close()


def test_prefetcher_makes_batches_ahead_and_ends_its_thread():
    numbered = Numbered(100)
    batches, made = numbered.prefetched, numbered.made
    for future in batches._coming:
        future.result()
    assert len(made) == PREFETCHED
    next(batches)
    batches._coming[-1].result()
    assert len(made) == PREFETCHED + 1
    assert made[0] in [thread.ident for thread in threading.enumerate()]
    batches.close()
    assert made[0] not in [thread.ident for thread in threading.enumerate()]
    assert len(made) == PREFETCHED + 1


def test_prefetcher_raises_an_error_in_its_turn_and_again():
    batches = Numbered(100, fail_at=2).prefetched
    assert [int(next(batches)[0]), int(next(batches)[0])] == [0, 1]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such batch"):
            next(batches)
    batches.close()
