"""The batches of each rank at each step: a pure function of the step, without state.

Samples are numbered from 0 through the whole run. A mixture assigns each sample to a store, where
samples are numbered through the store's epochs. Window w of a store is its S + 1 tokens from w * S
on: the first S are the input, the last S the labels. One permutation, always the same for a store,
puts its windows into places. The first places are held out for validation; training reads the
others, in a new order each epoch.

Shapes: B local_batch_size, S seq_len.
"""

import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.config import BatchSizes

from .mixture import Mixture
from .permutation import Permutation
from .token_store import TokenStore

IGNORED_LABEL = -100
"""Label that torch's cross-entropy ignores by default."""
PREFETCHED = 4
"""Least number of batches that are made before they are asked for."""
Batch = tuple[torch.Tensor, torch.Tensor]
"""Tokens and labels, int64 [B, S]."""


def count_windows(store: TokenStore, seq_len: int) -> int:
    """Return how many windows of `seq_len` + 1 tokens a store has."""
    return (store.tokens - 1) // seq_len


class Windows(NamedTuple):
    """The windows of a store."""

    store: TokenStore
    name: str
    held_out: int
    epoch_size: int
    """Number of windows for training."""
    order: Permutation
    """Window at each place."""


@dataclass
class Corpus:
    """The stores of a run, by name, mixed into one sequence of samples. Raises DataError for too
    few windows, and for ids that the model lacks."""

    stores: Mapping[str, TokenStore]
    mixture: Mixture
    seq_len: int
    vocab_size: int
    seed: int
    held_out: Sequence[int]
    """Windows of each store to validate on."""
    trained: int
    """Smallest number of other windows that each store must have."""

    def __post_init__(self) -> None:
        self.windows = list(map(self._windows, self.stores, self.stores.values(), self.held_out))

    def _windows(self, name: str, store: TokenStore, held_out: int) -> Windows:
        if store.max_token_id >= self.vocab_size:
            raise DataError(
                f"{name} ({store.folder}): its largest token id is {store.max_token_id}, and the "
                f"model has ids up to {self.vocab_size - 1}; name the model's tokenizer and data"
            )
        count, needed = count_windows(store, self.seq_len), held_out + self.trained
        if count < needed:
            table = "[training]" if self.trained else "[validation] or [training]"
            raise DataError(
                f"{table} seq_len = {self.seq_len}: {name} has {store.tokens} tokens, which make "
                f"{count} windows of {self.seq_len} + 1; {needed} are needed, {held_out} of them "
                "to validate on; give more text, a shorter seq_len or fewer validation steps"
            )
        order = Permutation(count, key="places of windows")
        return Windows(store, name, held_out, count - held_out, order)

    def batch(self, samples: np.ndarray, *, held_out: bool = False) -> Batch:
        """Return the batch of some samples of the run, or of some held-out samples, which are the
        first of the mixture. Raises DataError for a store that was damaged since it was opened."""
        stores, numbers = self.mixture(samples)
        ids = np.empty((len(samples), self.seq_len + 1), np.int64)
        for number in np.unique(stores):
            windows, chosen = self.windows[number], stores == number
            places = numbers[chosen]
            if not held_out:
                places = self._training_places(windows, places)
            starts = windows.order(places) * self.seq_len
            ids[chosen] = windows.store.windows(starts, self.seq_len + 1)
        return torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(ids[:, 1:].copy())

    def _training_places(self, windows: Windows, numbers: np.ndarray) -> np.ndarray:
        """Return the places of a store's samples, numbered through all epochs."""
        epochs, places = np.divmod(numbers, windows.epoch_size)
        for epoch in np.unique(epochs):
            order = Permutation(windows.epoch_size, key=f"seed {self.seed} epoch {epoch}")
            places[epochs == epoch] = order(places[epochs == epoch])
        return windows.held_out + places

    def epochs(self, samples: int) -> dict[str, float]:
        """Return how many epochs of each store the first `samples` samples are, by its name."""
        counts = self.mixture.counts(samples).tolist()
        named = zip(self.windows, counts, strict=True)
        return {windows.name: count / windows.epoch_size for windows, count in named}

    def sample_limit(self, epochs: float) -> int:
        """Return the number of samples of a run that passes no store more than `epochs` times."""
        times = Fraction(str(epochs))  # as written: 0.3 is 3/10
        return min(
            self.mixture.sample(store, math.floor(times * windows.epoch_size))
            for store, windows in enumerate(self.windows)
        )

    def identity(self) -> dict[str, int | str]:
        """Return everything that decides which tokens a sample has, apart from its number."""
        facts: dict[str, int | str] = {"seq_len": self.seq_len, "seed": self.seed}
        for number, windows in enumerate(self.windows, start=1):
            share = self.mixture.shares[number - 1]
            facts[f"store {number} name"] = windows.name
            facts[f"store {number} fingerprint"] = windows.store.fingerprint[:16]
            facts[f"store {number} tokens"] = windows.store.tokens
            facts[f"store {number} held out"] = windows.held_out
            facts[f"store {number} share"] = f"{share}/{self.mixture.period}"
        return facts


@dataclass(kw_only=True)
class Batches:
    """The microbatches that a data-parallel rank trains on: `first_step` starts at `first_sample`,
    and each step takes the next global batch of samples."""

    sizes: BatchSizes
    dp_rank: int
    dp_degree: int
    steps: int
    first_step: int = 1
    first_sample: int = 0

    def __post_init__(self) -> None:
        self.last_step = self.steps
        """Last step of the run: `steps`, or the last full batch if the data ends the run."""
        self.left_over: int | None = None
        """Samples that remain unused if the data ends the run; None if `steps` does."""

    def __iter__(self) -> Iterator[Batch]:
        raise NotImplementedError

    def samples(self, step: int) -> int:
        """Return how many samples the run has trained on after `step`."""
        return self.first_sample + (step + 1 - self.first_step) * self.sizes.global_batch_size

    def passes(self, step: int) -> dict[str, float]:
        """Return how many epochs of each store the run has trained on after `step`."""
        return {}

    def identity(self) -> dict[str, int | str]:
        """Return everything that decides which tokens a sample has, apart from its number."""
        raise NotImplementedError


@dataclass(kw_only=True)
class OutsideBatches(Batches):
    """Microbatches of an iterator from outside the package, which goes on at `first_sample` itself.

    Raises DataError for one that ends, and for a batch that the model cannot take."""

    name: str
    """module:name, as in the config."""
    batches: Iterable[Batch]
    seq_len: int
    vocab_size: int

    def __iter__(self) -> Iterator[Batch]:
        shape = (self.sizes.local_batch_size, self.seq_len)
        rule = f"int64 {list(shape)}, ids below {self.vocab_size}, labels also {IGNORED_LABEL}"
        for batch in self.batches:
            if not isinstance(batch, tuple) or len(batch) != 2:
                kind = type(batch).__name__
                raise DataError(f'[training] dataset = "{self.name}": {kind}; yield a pair, {rule}')
            for found, least in zip(batch, (0, IGNORED_LABEL), strict=True):
                fits = found.shape == shape and found.dtype == torch.int64
                if not fits or found.min() < least or found.max() >= self.vocab_size:
                    what = f"{found.dtype} {list(found.shape)}, {found.min()} to {found.max()}"
                    raise DataError(f'[training] dataset = "{self.name}": {what}; yield {rule}')
            yield batch
        raise DataError(f'[training] dataset = "{self.name}" ended; it must yield without end')

    def identity(self) -> dict[str, int | str]:
        return {"dataset": self.name, "seq_len": self.seq_len}


@dataclass(kw_only=True)
class TrainingBatches(Batches):
    """Microbatches of a corpus.

    Microbatch m of a step, from 0, is its m-th run of local_batch_size samples and goes to rank
    m % dp_degree as accumulation step m // dp_degree: no sample depends on the number of ranks.
    Raises DataError if `epochs` passes over the data are fewer samples than a step takes."""

    corpus: Corpus
    epochs: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs is None:
            return

        limit, size = self.corpus.sample_limit(self.epochs), self.sizes.global_batch_size
        if limit < size:
            raise DataError(
                f"[training] epochs = {self.epochs}: that is {limit} samples, and a step takes "
                f"{size} (global_batch_size); give more epochs or text, or a smaller batch"
            )
        full_batches, left_over = divmod(max(0, limit - self.first_sample), size)
        if (data_ends := self.first_step - 1 + full_batches) <= self.steps:
            self.last_step, self.left_over = data_ends, left_over

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self.first_step, self.last_step + 1):
            for accum_step in range(self.sizes.grad_accum_steps):
                yield self.corpus.batch(self.sample_ids(step, accum_step))

    def sample_ids(self, step: int, accum_step: int) -> np.ndarray:
        """Return the numbers of this rank's samples in an accumulation step, int64 [B]."""
        microbatch = accum_step * self.dp_degree + self.dp_rank
        first = self.samples(step - 1) + microbatch * self.sizes.local_batch_size
        return first + np.arange(self.sizes.local_batch_size)

    def passes(self, step: int) -> dict[str, float]:
        return self.corpus.epochs(self.samples(step))

    def identity(self) -> dict[str, int | str]:
        return self.corpus.identity()


@dataclass(frozen=True)
class ValidationBatches:
    """Iterable over the batches that a data-parallel rank validates on: all ranks together read the
    first `samples` held-out samples, on any number of ranks."""

    corpus: Corpus
    local_batch_size: int
    samples: int
    dp_rank: int
    dp_degree: int

    def __iter__(self) -> Iterator[Batch]:
        """Yield equally many batches on all ranks: forwards are collective. Where the last ones
        lack samples, they repeat some with IGNORED_LABEL."""
        batch = np.arange(self.local_batch_size)
        for first in range(0, self.samples, self.dp_degree * self.local_batch_size):
            samples = first + self.dp_rank * self.local_batch_size + batch
            tokens, labels = self.corpus.batch(samples % self.samples, held_out=True)
            labels[torch.from_numpy(samples >= self.samples)] = IGNORED_LABEL
            yield tokens, labels


def prefetch(
    batches: Iterable[Batch], *, device: torch.device, ahead: int = 0
) -> Generator[Batch, None, None]:
    """Yield the same batches, `ahead` of them, at least PREFETCHED, made in advance on a thread, in
    pinned memory where `device` is a GPU. An error is raised when its batch's turn comes."""
    iterator = iter(batches)

    def make() -> Batch | None:
        """Return the next batch, ready to be copied to the device; None after the last."""
        batch = next(iterator, None)
        if batch is None or device.type == "cpu":
            return batch
        # Each thread has its own device; memory would be pinned through the first GPU.
        torch.cuda.set_device(device)
        tokens, labels = batch
        return tokens.pin_memory(), labels.pin_memory()

    thread = ThreadPoolExecutor(1, "batches")
    try:
        coming = deque(thread.submit(make) for _ in range(max(ahead, PREFETCHED)))
        while (batch := coming.popleft().result()) is not None:
            coming.append(thread.submit(make))
            yield batch
    finally:
        thread.shutdown(cancel_futures=True)
