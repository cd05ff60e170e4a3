"""Batches read ahead, on a thread beside the training."""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from .dataloader import Batch

DEPTH = 4
"""Batches that are made before they are asked for."""


class Prefetcher:
    """Iterator over the same batches, in pinned memory where `device` is a GPU.

    An error in making a batch is raised when its turn comes.
    """

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
        # Each thread has its own device; memory would be pinned through the first GPU.
        torch.cuda.set_device(self._device)
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
        """End the thread, once it has made its current batch."""
        self._thread.shutdown(cancel_futures=True)
