"""Batches assembled ahead of need, on a thread beside the training."""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from torchtitan_lite.data.dataloader import Batch

DEPTH = 4
"""Batches that are ready, or being made ready, before they are asked for."""


class Prefetcher:
    """The same batches, in pinned memory where `device` is a GPU. An error in their making is
    raised by `next`, in its turn."""

    def __init__(self, batches: Iterable[Batch], *, device: torch.device) -> None:
        self._batches = iter(batches)
        self._device = device
        self._thread = ThreadPoolExecutor(1, "batches")
        self._coming: deque[Future[Batch | None]] = deque(
            self._thread.submit(self._make) for _ in range(DEPTH)
        )

    def _make(self) -> Batch | None:
        batch = next(self._batches, None)
        if batch is None or self._device.type == "cpu":
            return batch
        torch.cuda.set_device(
            self._device
        )  # a thread has its own, and would pin memory through the first GPU
        tokens, labels = batch
        return tokens.pin_memory(), labels.pin_memory()

    def __iter__(self) -> "Prefetcher":
        return self

    def __next__(self) -> Batch:
        batch = self._coming[0].result()
        if batch is None:
            raise StopIteration
        self._coming.popleft()
        self._coming.append(self._thread.submit(self._make))
        return batch

    def close(self) -> None:
        """End the thread, once it has made what it is at."""
        self._thread.shutdown(cancel_futures=True)
