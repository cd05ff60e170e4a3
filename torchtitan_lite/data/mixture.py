"""Which store each sample comes from: a mix of any number of stores, exact at every sample and
without state.

Weights are whole numbers, the shares, and a period is as many samples as their sum: each store then
gives as many samples a period as its share is, and all periods are alike. Within one, the k-th
sample of a store with a share of p in P may come from slot floor(k P / p) on and before slot
ceil((k + 1) P / p). Such an order exists for any shares, and to take the store whose sample must
come first gives one (Baruah et al., "Proportionate Progress", 1996). It follows that of the first i
samples of a run, for any i, each store has its share of i, give or take less than one.
"""

import heapq

import numpy as np


class Mixture:
    """The order in which stores take turns."""

    def __init__(self, shares: tuple[int, ...]) -> None:
        """`shares` are above 0. Time here and memory grow with their sum, so they should have no
        common divisor."""
        self.shares = np.array(shares, np.int64)
        self.period = sum(shares)
        self._store_of_slot = _schedule(shares)
        self._slots = [np.flatnonzero(self._store_of_slot == store) for store in range(len(shares))]
        self._rank_of_slot = np.empty(self.period, np.int64)
        for slots in self._slots:
            self._rank_of_slot[slots] = np.arange(len(slots))

    def __call__(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The store of each sample, and the sample's number within that store; all are int64 [any
        length], from 0."""
        periods, slots = np.divmod(samples, self.period)
        stores = self._store_of_slot[slots]
        return stores, periods * self.shares[stores] + self._rank_of_slot[slots]

    def counts(self, samples: int) -> np.ndarray:
        """How many of the first `samples` samples each store has, int64 [stores]."""
        periods, slots = divmod(samples, self.period)
        in_part = np.bincount(self._store_of_slot[:slots], minlength=len(self.shares))
        return periods * self.shares + in_part

    def sample(self, store: int, number: int) -> int:
        """The sample that is the store's `number`-th, from 0: what a call takes apart."""
        period, rank = divmod(number, int(self.shares[store]))
        return period * self.period + int(self._slots[store][rank])


def _schedule(shares: tuple[int, ...]) -> np.ndarray:
    """The store of each slot of a period, int64 [period]: of those that may come, the one that must
    come first."""
    period = sum(shares)
    done = [0] * len(shares)
    waiting = [
        (0, store) for store in range(len(shares))
    ]  # heap: the first slot that a store's next sample may have
    ready: list[tuple[int, int]] = []  # heap: the slot before which it must come
    order = np.empty(period, np.int64)
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            _, store = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(done[store] + 1) * period // shares[store]), store))
        _, store = heapq.heappop(ready)
        order[slot] = store
        done[store] += 1
        heapq.heappush(waiting, (done[store] * period // shares[store], store))
    return order
