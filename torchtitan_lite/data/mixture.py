"""The store that each sample comes from: a stateless mix of stores, exact at every sample.

Weights are whole numbers, the shares. A period has as many samples as the sum of the shares, a
store gives as many of them as its share is, and all periods are alike. Within a period of P
samples, the k-th sample of a store with share p may come from slot floor(k P / p) on and before
slot ceil((k + 1) P / p). Such an order exists for any shares, and taking the store with the
earliest deadline gives one (Baruah et al., "Proportionate Progress", 1996). So of the first i
samples of a run, for any i, each store has its share of i, give or take less than one.
"""

import numpy as np


class Mixture:
    """The order in which stores take turns."""

    def __init__(self, shares: tuple[int, ...]) -> None:
        """`shares` are above 0. Time and memory grow with their sum: remove common divisors."""
        self.shares = np.array(shares, np.int64)
        self.period = sum(shares)
        self._store_of_slot = np.empty(self.period, np.int64)
        self._rank_of_slot = np.empty(self.period, np.int64)
        done = np.zeros_like(self.shares)
        for slot in range(self.period):
            # The earliest deadline comes first.
            may_come = done * self.period // self.shares <= slot
            deadlines = -(-(done + 1) * self.period // self.shares)
            store = np.where(may_come, deadlines, self.period + 1).argmin()
            self._store_of_slot[slot], self._rank_of_slot[slot] = store, done[store]
            done[store] += 1

    def __call__(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the store of each sample, and the sample's number within that store.

        All are int64 [any length] and count from 0."""
        periods, slots = np.divmod(samples, self.period)
        stores = self._store_of_slot[slots]
        return stores, periods * self.shares[stores] + self._rank_of_slot[slots]

    def counts(self, samples: int) -> np.ndarray:
        """Return how many of the first `samples` samples each store has, int64 [stores]."""
        periods, slots = divmod(samples, self.period)
        in_part = np.bincount(self._store_of_slot[:slots], minlength=len(self.shares))
        return periods * self.shares + in_part

    def sample(self, store: int, number: int) -> int:
        """Return the sample that is the store's `number`-th, from 0: the inverse of a call."""
        period, rank = divmod(number, int(self.shares[store]))
        return period * self.period + int(np.flatnonzero(self._store_of_slot == store)[rank])
