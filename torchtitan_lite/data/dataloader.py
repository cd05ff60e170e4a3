"""The batches of each rank at each step: a pure function of the step, without state.

Samples are numbered from 0 through the whole run. A mixture assigns each sample to a store, where
samples are numbered through the store's epochs. Window w of a store is its S + 1 tokens from w * S
on: the first S are the input, the last S the labels. One permutation, always the same for a store,
puts its windows into places. The first places are held out for validation; training reads the
others, in a new order each epoch.

Shapes: B local_batch_size, S seq_len.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction

import numpy as np
import torch

from torchtitan_lite.config import BatchSizes
from torchtitan_lite.errors import DataError

from .mixture import Mixture
from .permutation import Permutation
from .token_store import TokenStore

IGNORED_LABEL = -100
"""Label that torch's cross-entropy ignores by default."""

Batch = tuple[torch.Tensor, torch.Tensor]
"""Tokens and labels, int64 [B, S]."""


class Windows:
    """The windows of a store, by place.

    Raises DataError if the store has ids that the model lacks, or fewer windows than `held_out` for
    validation plus the minimum for training, `trained`.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        name: str,
        seq_len: int,
        vocab_size: int,
        seed: int,
        held_out: int,
        trained: int,
    ) -> None:
        if store.max_token_id >= vocab_size:
            raise DataError(
                f"{name} ({store.folder}): its largest token id is {store.max_token_id}, and the "
                f"model has ids up to {vocab_size - 1}; make it again with the tokenizer of "
                "[model] tokenizer_path"
            )
        count, needed = (store.tokens - 1) // seq_len, held_out + trained
        if count < needed:
            raise DataError(
                f"[training] seq_len = {seq_len}: {name} has {store.tokens} tokens, which make "
                f"{count} windows of {seq_len} + 1; {needed} are needed, {held_out} of them to "
                "validate on ([validation] steps * local_batch_size); give more text, a shorter "
                "seq_len or fewer validation steps"
            )

        self.store, self.name, self.held_out = store, name, held_out
        self.epoch_size = count - held_out
        """Number of windows for training."""
        self._seq_len, self._seed = seq_len, seed
        self._order = Permutation(count, key="places of windows")

    def read(self, places: np.ndarray) -> np.ndarray:
        """Return the ids [len(places), S + 1] of the windows at some places, in the store's type.

        Raises DataError for a store that was damaged since it was opened.
        """
        return self.store.windows(self._order(places) * self._seq_len, self._seq_len + 1)

    def training_places(self, numbers: np.ndarray) -> np.ndarray:
        """Return the places of samples, numbered through all epochs; both int64 [any length]."""
        epochs, places = np.divmod(numbers, self.epoch_size)
        for epoch in np.unique(epochs):
            order = Permutation(self.epoch_size, key=f"seed {self._seed} epoch {epoch}")
            places[epochs == epoch] = order(places[epochs == epoch])
        return self.held_out + places


class Corpus:
    """The stores of a run, by name, mixed into one sequence of samples."""

    def __init__(
        self,
        stores: Mapping[str, TokenStore],
        mixture: Mixture,
        *,
        seq_len: int,
        vocab_size: int,
        seed: int,
        held_out: Sequence[int],
        trained: int,
    ) -> None:
        """`held_out` counts windows of each store; at least `trained` others must remain."""
        self.mixture, self.seq_len, self._seed = mixture, seq_len, seed
        shape = {"seq_len": seq_len, "vocab_size": vocab_size, "seed": seed, "trained": trained}
        self.windows = [
            Windows(store, name=name, held_out=count, **shape)
            for (name, store), count in zip(stores.items(), held_out, strict=True)
        ]

    def held_out_batch(self, samples: np.ndarray) -> Batch:
        """Return the batch of some held-out samples; these are the first of the mixture."""
        return self._batch(samples, lambda windows, numbers: numbers)

    def training_batch(self, samples: np.ndarray) -> Batch:
        """Return the batch of some samples of the run."""
        return self._batch(samples, Windows.training_places)

    def _batch(
        self, samples: np.ndarray, places: Callable[[Windows, np.ndarray], np.ndarray]
    ) -> Batch:
        stores, numbers = self.mixture(samples)
        ids = np.empty((len(samples), self.seq_len + 1), np.int64)
        for store in np.unique(stores):
            windows, chosen = self.windows[store], stores == store
            ids[chosen] = windows.read(places(windows, numbers[chosen]))
        return torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(ids[:, 1:].copy())

    def epochs(self, samples: int) -> dict[str, float]:
        """Return how many epochs of each store the first `samples` samples are, by its name."""
        counts = self.mixture.counts(samples).tolist()
        return {
            windows.name: count / windows.epoch_size
            for windows, count in zip(self.windows, counts, strict=True)
        }

    def sample_limit(self, epochs: float) -> int:
        """Return the number of samples of a run that passes no store more than `epochs` times."""
        times = Fraction(str(epochs))  # as written: 0.3 is 3/10
        return min(
            self.mixture.sample(store, math.floor(times * windows.epoch_size))
            for store, windows in enumerate(self.windows)
        )

    def unigram_entropy(self) -> float:
        """Return the nats per token of a model that knows only how often each id occurs."""
        counts = [windows.store.token_counts() for windows in self.windows]
        shares = self.mixture.shares / self.mixture.period
        ids = sum(share * count / count.sum() for share, count in zip(shares, counts, strict=True))
        used = ids[ids > 0]
        return float(-(used * np.log(used)).sum())

    def identity(self) -> dict[str, int | str]:
        """Return everything that decides which tokens a sample has, apart from its number."""
        facts: dict[str, int | str] = {"seq_len": self.seq_len, "seed": self._seed}
        for number, (windows, share) in enumerate(
            zip(self.windows, self.mixture.shares, strict=True), start=1
        ):
            facts |= {
                f"store {number} name": windows.name,
                f"store {number} fingerprint": windows.store.fingerprint[:16],
                f"store {number} tokens": windows.store.tokens,
                f"store {number} held out": windows.held_out,
                f"store {number} share": f"{share}/{self.mixture.period}",
            }
        return facts


class TrainingBatches:
    """Iterable over the microbatches that a data-parallel rank trains on.

    They start at `first_step`, whose first sample is `first_sample`. Each step takes the next
    global batch of samples. Microbatch m of a step, from 0, is its m-th run of local_batch_size
    samples and goes to rank m % dp_degree as accumulation step m // dp_degree, so a step's samples
    do not depend on the number of ranks.

    Raises DataError if `epochs` passes over the data are fewer samples than a step takes.
    """

    def __init__(
        self,
        corpus: Corpus,
        sizes: BatchSizes,
        *,
        dp_rank: int,
        dp_degree: int,
        steps: int,
        epochs: float | None = None,
        first_step: int = 1,
        first_sample: int = 0,
    ) -> None:
        self.corpus = corpus
        self._sizes = sizes
        self._dp_rank, self._dp_degree = dp_rank, dp_degree
        self._first_step, self._first_sample = first_step, first_sample
        self.last_step = steps
        """Last step of the run: `steps`, or the last full batch if `epochs` end the run."""
        self.left_over: int | None = None
        """Samples that remain unused if `epochs` end the run; None if `steps` does."""

        if epochs is not None:
            limit = corpus.sample_limit(epochs)
            if limit < sizes.global_batch_size:
                raise DataError(
                    f"[training] epochs = {epochs}: that is {limit} samples, and a step takes "
                    f"{sizes.global_batch_size} (global_batch_size); give more epochs or text, or "
                    "a smaller batch"
                )
            full_batches, left_over = divmod(max(0, limit - first_sample), sizes.global_batch_size)
            if (data_ends := first_step - 1 + full_batches) <= steps:
                self.last_step, self.left_over = data_ends, left_over

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self._first_step, self.last_step + 1):
            for accum_step in range(self._sizes.grad_accum_steps):
                yield self.corpus.training_batch(self.sample_ids(step, accum_step))

    def sample_ids(self, step: int, accum_step: int) -> np.ndarray:
        """Return the numbers of this rank's samples in an accumulation step, int64 [B]."""
        microbatch = accum_step * self._dp_degree + self._dp_rank
        first = self.samples(step - 1) + microbatch * self._sizes.local_batch_size
        return first + np.arange(self._sizes.local_batch_size)

    def samples(self, step: int) -> int:
        """Return how many samples the run has trained on after `step`."""
        return self._first_sample + (step + 1 - self._first_step) * self._sizes.global_batch_size


class ValidationBatches:
    """Iterable over the batches that a data-parallel rank validates on.

    All ranks together read the first `steps * local_batch_size` held-out samples, the same ones at
    each validation and on any number of ranks.
    """

    def __init__(
        self, corpus: Corpus, *, local_batch_size: int, steps: int, dp_rank: int, dp_degree: int
    ) -> None:
        self._corpus = corpus
        self._local_batch_size = local_batch_size
        self._steps = steps
        self._dp_rank, self._dp_degree = dp_rank, dp_degree

    def __iter__(self) -> Iterator[Batch]:
        """Yield tokens and labels, int64 [B, S], equally many on all ranks: forwards are
        collective. A rank with a smaller share gets a last batch with only IGNORED_LABEL."""
        for first in range(0, self._steps, self._dp_degree):
            microbatch = first + self._dp_rank
            sample = microbatch % self._steps * self._local_batch_size
            tokens, labels = self._corpus.held_out_batch(sample + np.arange(self._local_batch_size))
            if microbatch >= self._steps:
                labels = torch.full_like(labels, IGNORED_LABEL)
            yield tokens, labels
