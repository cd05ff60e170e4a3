"""Batches: which windows of the token stream each rank sees at each step, a pure function without any state.

Window w is the tokens [w * S, w * S + S] of the store; what is read is its first S tokens, what is to be predicted
its last S. One permutation, always the same for a store, puts all windows into places. The first places are held
out for validation, the others are trained on, in an order that is new each epoch.

Shapes: B local_batch_size, S seq_len.
"""

from collections.abc import Iterator

import numpy as np
import torch

from torchtitan_lite.data.permutation import Permutation
from torchtitan_lite.data.token_store import TokenStore
from torchtitan_lite.errors import DataError

IGNORED_LABEL = -100
"""What torch's cross-entropy leaves out by default."""


class Windows:
    """The windows of a store, by place. Raises DataError if there are fewer than the places needed, of which
    `held_out` are for validation."""

    def __init__(self, store: TokenStore, *, seq_len: int, needed: int, held_out: int) -> None:
        self._store = store
        self._seq_len = seq_len
        self.count = (len(store.tokens) - 1) // seq_len
        if self.count < needed:
            raise DataError(
                f"[training] seq_len = {seq_len}: {len(store.tokens)} tokens make {self.count} windows of "
                f"{seq_len} + 1; {needed} are needed, {held_out} of them to validate on ([validation] steps * "
                "local_batch_size); give more text, a shorter seq_len or fewer validation steps"
            )
        self._order = Permutation(self.count, key="places of windows")

    def batch(self, places: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels, int64 [B, S], of the windows at B places."""
        starts = self._order(places) * self._seq_len
        windows = np.stack([self._store.tokens[start : start + self._seq_len + 1] for start in starts])
        ids = torch.from_numpy(windows.astype(np.int64))  # [B, S + 1]
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class TrainingBatches:
    """What a data-parallel rank trains on. Samples are numbered through all epochs; step t, from 1, takes the next
    global batch of them. Microbatch m of a step, from 0, is its m-th run of local_batch_size samples and goes to rank
    m % dp_degree as accumulation step m // dp_degree, so a step's samples do not depend on the number of ranks."""

    def __init__(
        self,
        store: TokenStore,
        *,
        seq_len: int,
        local_batch_size: int,
        grad_accum_steps: int,
        dp_rank: int,
        dp_degree: int,
        seed: int,
        held_out: int = 0,
    ) -> None:
        self._windows = Windows(store, seq_len=seq_len, needed=held_out + 1, held_out=held_out)
        self._local_batch_size = local_batch_size
        self._grad_accum_steps = grad_accum_steps
        self._dp_rank = dp_rank
        self._dp_degree = dp_degree
        self._seed = seed
        self._held_out = held_out
        self.epoch_size = self._windows.count - held_out
        """Samples in an epoch."""

    def batch(self, step: int, accum_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels, int64 [B, S], of this rank's microbatch."""
        return self._windows.batch(self._places(self.sample_ids(step, accum_step)))

    def sample_ids(self, step: int, accum_step: int) -> np.ndarray:
        """Numbers of this rank's samples in an accumulation step, from 0, int64 [B]."""
        microbatches_before = (step - 1) * self._grad_accum_steps * self._dp_degree
        microbatch = microbatches_before + accum_step * self._dp_degree + self._dp_rank
        return microbatch * self._local_batch_size + np.arange(self._local_batch_size)

    def epoch_of(self, step: int) -> int:
        """The epoch, from 0, of the first sample of a step."""
        global_batch_size = self._local_batch_size * self._grad_accum_steps * self._dp_degree
        return (step - 1) * global_batch_size // self.epoch_size

    def _places(self, sample_ids: np.ndarray) -> np.ndarray:
        epochs, numbers = np.divmod(sample_ids, self.epoch_size)
        for epoch in np.unique(epochs):
            order = Permutation(self.epoch_size, key=f"seed {self._seed} epoch {epoch}")
            numbers[epochs == epoch] = order(numbers[epochs == epoch])
        return self._held_out + numbers


class ValidationBatches:
    """What a data-parallel rank validates on: its share of the `steps * local_batch_size` windows that are held out,
    the same ones each time and, over all ranks, on any number of ranks."""

    def __init__(
        self,
        store: TokenStore,
        *,
        seq_len: int,
        local_batch_size: int,
        steps: int,
        dp_rank: int,
        dp_degree: int,
    ) -> None:
        held_out = steps * local_batch_size
        self._windows = Windows(store, seq_len=seq_len, needed=held_out, held_out=held_out)
        self._local_batch_size = local_batch_size
        self._steps = steps
        self._dp_rank = dp_rank
        self._dp_degree = dp_degree

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Tokens and labels, int64 [B, S]. All ranks get equally many, because forwards are collective: a rank whose
        share is smaller gets a last batch of which every label is IGNORED_LABEL."""
        for first in range(0, self._steps, self._dp_degree):
            microbatch = first + self._dp_rank
            place = microbatch % self._steps * self._local_batch_size
            tokens, labels = self._windows.batch(place + np.arange(self._local_batch_size))
            yield tokens, labels if microbatch < self._steps else torch.full_like(labels, IGNORED_LABEL)
