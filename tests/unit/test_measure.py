"""The measurements of the data path: what they make of data whose qualities are known."""

import numpy as np

from torchtitan_lite.data.measure import (
    Comparison,
    lcg_orders,
    measure_opening,
    measure_randomness,
    synthetic_store,
)
from torchtitan_lite.data.token_store import TokenStore


def test_shuffles_are_random_and_a_generator_that_repeats_is_not():
    rng = np.random.default_rng(0)
    shuffled = measure_randomness(np.array([rng.permutation(1024) for _ in range(100)]))
    assert max(map(abs, vars(shuffled).values())) < 5
    repeated = measure_randomness(lcg_orders(1024, multiplier=5, count=100))
    assert min(abs(repeated.lag_correlation), abs(repeated.low_bits), abs(repeated.epochs)) > 20


def test_the_generator_passes_every_number_once():
    assert sorted(lcg_orders(64, multiplier=5, count=1)[0].tolist()) == list(range(64))


def test_a_store_of_nothing_takes_no_room_and_opens(tmp_path):
    folder = synthetic_store(
        tmp_path / "huge", shard_sizes=[2**29] * 3, documents=[10**6] * 3, sparse=True
    )
    assert sum(path.stat().st_blocks for path in folder.iterdir()) * 512 < 2**20
    assert TokenStore(folder).documents == 3 * 10**6
    assert measure_opening(folder).seconds > 0


def test_a_comparison_in_words():
    text = str(Comparison("ours", "tokens/s", 3e6, "theirs", 4e6))
    assert text == "ours: 3.0 million tokens/s; theirs: 4.0 million; ratio 0.75"
