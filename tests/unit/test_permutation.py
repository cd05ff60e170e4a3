"""The keyed bijection: exact for every size, different for every key, and as random as a true
shuffle."""

import math
from fractions import Fraction
from hashlib import shake_256

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchtitan_lite.data.permutation import Permutation


def order(n: int, key: object) -> np.ndarray:
    return Permutation(n, key=str(key))(np.arange(n))


# ----- Permutation -----


@given(n=st.integers(1, 3000) | st.sampled_from([4096, 4097, 20_000]), key=st.text())
@example(n=100_003, key="k")
def test_bijection(n, key):
    indices = np.arange(n)
    assert np.array_equal(np.sort(Permutation(n, key=key)(indices)), np.arange(n))
    assert np.array_equal(indices, np.arange(n))


@given(n=st.one_of(st.integers(2**31, 10**12), st.integers(2**61, 2**62)), data=st.data())
def test_distinct_and_in_range_for_huge_sizes(n, data):
    indices = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50, unique=True))
    images = Permutation(n, key="huge")(np.array(indices))
    assert images.dtype == np.int64
    assert 0 <= images.min() <= images.max() < n
    assert len(np.unique(images)) == len(indices)


def test_any_part_of_the_order_by_itself():
    n = 50_000
    whole, permutation = order(n, "k"), Permutation(n, key="k")
    places = np.random.default_rng(0).integers(0, n, 100)
    assert np.array_equal(permutation(places), whole[places])
    assert np.array_equal(permutation(places[:1]), whole[places[:1]])
    assert permutation(places[:0]).tolist() == []


def reference(n: int, key: str, index: int) -> int:
    if n <= 4096:
        stream = shake_256(key.encode()).digest(8 * n)
        numbers = [int.from_bytes(stream[8 * i : 8 * i + 8], "little") for i in range(n)]
        return sorted(range(n), key=numbers.__getitem__)[index]
    return grid_reference(n, key, index)


def grid_reference(n: int, key: str, index: int) -> int:
    """The same network in Python's integers, which do not overflow."""
    rows = next(r for r in range(math.isqrt(n), math.isqrt(n) + 2) if r * r >= n)
    columns = math.ceil(Fraction(n, rows))
    stream = shake_256(key.encode()).digest(96)
    words = [int.from_bytes(stream[i : i + 8], "little") for i in range(0, 96, 8)]
    while True:
        place, sizes = list(divmod(index, columns)), (rows, columns)
        for number in range(6):
            moved, fixed = number % 2, 1 - number % 2
            bits = (place[fixed] * (words[2 * number] | 1) + words[2 * number + 1]) % 2**64
            bits = (bits ^ bits >> 32) * 0x9E3779B97F4A7C15 % 2**64 >> 32
            place[moved] = (place[moved] + bits * sizes[moved] // 2**32) % sizes[moved]
        index = place[0] * columns + place[1]
        if index < n:
            return index


@pytest.mark.parametrize("n", [1, 2, 3, 10, 1000, 4096, 4097, 2**32 + 1, 10**12, 2**62])
def test_against_reference(n):
    """Also what keeps a resumed run in its order: an index must have the same image in every
    version."""
    indices = np.unique(np.linspace(0, n - 1, 40).astype(np.int64).clip(0, n - 1))
    assert Permutation(n, key="k")(indices).tolist() == [reference(n, "k", int(i)) for i in indices]


def test_orders_of_two_keys_are_unrelated():
    n = 10_000
    first, second = order(n, "seed 0 epoch 0"), order(n, "seed 0 epoch 1")
    assert (first == second).sum() < 10  # 1 expected
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(n)


@pytest.mark.parametrize("n", [10, 100, 1000, 4097, 10_007])
def test_as_random_as_a_shuffle(n):
    """Means over 200 keys lie within 5 standard errors of what a uniformly random order has."""
    orders = np.array([order(n, key) for key in range(200)])
    standard_error = 1 / np.sqrt(200 * n)

    def lag_correlation(lag: int) -> float:
        centred = orders - (n - 1) / 2
        return (centred[:, :-lag] * centred[:, lag:]).mean() / centred.var()

    for lag in (1, 2, 3, math.isqrt(n - 1) + 1, -(-n // (math.isqrt(n - 1) + 1))):
        assert abs(lag_correlation(lag)) < 5 * standard_error + 1 / n
    for bit in (0, 1, 2):
        flips = ((orders[:, :-1] ^ orders[:, 1:]) >> bit & 1).mean()
        assert abs(flips - 0.5) < 5 * 0.5 * standard_error + 3 * 2**bit / n
    ascents = (orders[:, :-1] < orders[:, 1:]).mean()
    assert abs(ascents - 0.5) < 5 * np.sqrt(1 / 12) * standard_error
    fixed_points = (orders == np.arange(n)).sum(axis=1)
    assert abs(fixed_points.mean() - 1) < 5 / np.sqrt(200)
    first = orders[:, 0] / (n - 1)
    assert abs(first.mean() - 0.5) < 5 * np.sqrt(1 / 12 / 200)
