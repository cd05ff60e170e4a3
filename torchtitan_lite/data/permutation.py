"""Random order without a list: a keyed bijection on [0, n) computes any place of the order."""

import math
from hashlib import shake_256

import numpy as np

SMALL = 2**12
"""Up to this size an order is stored: the grid below would be too small to mix well."""
ROUNDS = 6
MIXER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, made odd
HALF = np.uint64(32)


class Permutation:
    """A pseudo-random bijection on [0, n), chosen by the text `key`, in constant memory.

    Up to SMALL indices it is the sorting order of as many random numbers. Beyond, it is a Feistel
    network on a grid (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): index i is
    a cell of a grid of ceil(sqrt(n)) rows that just holds n cells, and each round rotates one
    coordinate by a keyed hash of the other. The few indices that land on cells past n are mapped
    again until they do not."""

    def __init__(self, n: int, *, key: str) -> None:
        assert 1 <= n <= 2**62, f"no permutation of {n} indices"
        self.n = n
        draw = shake_256(key.encode())
        if n <= SMALL:
            self._order = np.frombuffer(draw.digest(8 * n), "<u8").argsort(kind="stable")
            return
        rows = math.isqrt(n - 1) + 1
        self._rows, self._columns = np.uint64(rows), np.uint64(-(-n // rows))
        self._round_keys = np.frombuffer(draw.digest(ROUNDS * 16), "<u8").reshape(ROUNDS, 2)

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Return the images of indices, both int64 [any length]."""
        if self.n <= SMALL:
            return self._order[indices]
        images = self._pass(indices.astype(np.uint64))
        while (outside := np.flatnonzero(images >= self.n)).size:
            images[outside] = self._pass(images[outside])
        return images.astype(np.int64)

    def _pass(self, cells: np.ndarray) -> np.ndarray:
        row = cells // self._columns
        column = cells - row * self._columns
        moved, fixed = (row, self._rows), (column, self._columns)
        for factor, summand in self._round_keys:
            # Rotate by the share bits / 2^32 of the size, in place.
            coordinate, size = moved
            bits = _hash(fixed[0], factor, summand)
            coordinate += (bits * size) >> HALF
            # Below the size, the unsigned difference wraps around to a larger number.
            np.minimum(coordinate, coordinate - size, out=coordinate)
            moved, fixed = fixed, moved
        return row * self._columns + column


def _hash(values: np.ndarray, factor: np.uint64, summand: np.uint64) -> np.ndarray:
    """Return 32 mixed bits of each value."""
    bits = values * (factor | np.uint64(1)) + summand
    bits = (bits ^ (bits >> HALF)) * MIXER
    return bits >> HALF
