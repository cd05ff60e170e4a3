"""The mix of stores: exact at every sample, and the same sample by sample as all at once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_lite.data.mixture import Mixture

# ----- Mixture -----

SHARES = st.lists(st.integers(1, 60) | st.sampled_from([1, 1000]), min_size=1, max_size=20).map(
    tuple
)


def test_turns_of_three_to_two_to_one():
    stores, numbers = Mixture((3, 2, 1))(np.arange(12))
    assert stores.tolist() == [0, 1, 0, 1, 0, 2] * 2
    assert numbers.tolist() == [0, 0, 1, 1, 2, 0, 3, 2, 4, 3, 5, 1]


@given(SHARES)
def test_at_every_sample_each_store_is_less_than_one_off_its_share(shares):
    mixture = Mixture(shares)
    stores, _ = mixture(np.arange(2 * mixture.period))
    taken = np.cumsum(stores[:, None] == np.arange(len(shares)), axis=0)
    due = np.arange(1, 2 * mixture.period + 1)[:, None] * np.array(shares)
    assert np.abs(taken * mixture.period - due).max() < mixture.period


@given(SHARES, st.integers(0, 10**12), st.randoms(use_true_random=False))
def test_any_sample_by_itself_is_what_it_is_in_the_sequence(shares, first, random):
    mixture = Mixture(shares)
    samples = np.arange(first, first + 50)
    stores, numbers = mixture(samples)
    counts, columns = mixture.counts(first), (samples, stores, numbers)
    for sample, store, number in zip(*(each.tolist() for each in columns), strict=True):
        assert number == counts[store]
        assert mixture.sample(store, number) == sample
        counts[store] += 1
    assert mixture.counts(first + 50).tolist() == counts.tolist()
    shuffled = random.sample(range(50), 50)
    assert mixture(samples[shuffled])[1].tolist() == numbers[shuffled].tolist()
