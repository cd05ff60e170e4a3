"""Batches: the shape of windows, the law of the order, and the same data on any number of ranks,
through any resumes.

Token i of the stores here is 1000 d + i, for store d, so the first token of a window tells which
window it is.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_lite.config import BatchSizes
from torchtitan_lite.data.dataloader import Corpus, TrainingBatches, ValidationBatches
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.errors import DataError

S = 4
PER_STORE = 1000


class FakeStore:
    """The ids from `first` on, enough for `windows` windows and a `rest`."""

    def __init__(self, windows: int, *, first: int = 0, rest: int = 0) -> None:
        self.folder, self.fingerprint = Path("stores/fake"), f"{first:<064}"
        self.first, self.tokens = first, windows * S + 1 + rest
        self.documents = 3
        self.max_token_id = first + self.tokens - 1

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        return self.first + starts[:, None] + np.arange(length)


def corpus(
    *windows: int, shares: tuple[int, ...] = (), held_out: int = 0, **options: Any
) -> Corpus:
    """Stores named a, b, ... with so many windows each."""
    stores: Any = {
        "abcdefgh"[number]: FakeStore(count, first=PER_STORE * number)
        for number, count in enumerate(windows)
    }
    mixture = Mixture(shares or (1,) * len(windows))
    counts = mixture.counts(held_out).tolist()
    shape = {"seq_len": S, "vocab_size": 10**6, "seed": 0, "held_out": counts, "trained": 1}
    return Corpus(stores, mixture, **{**shape, **options})


def batches(
    data: Corpus,
    *,
    local: int = 2,
    accum: int = 1,
    rank: int = 0,
    dp: int = 1,
    steps: int = 1,
    **options: Any,
) -> TrainingBatches:
    sizes = BatchSizes(local, local * accum * dp, accum)
    return TrainingBatches(
        corpus=data, sizes=sizes, dp_rank=rank, dp_degree=dp, steps=steps, **options
    )


def windows_of(tokens: torch.Tensor) -> list[int]:
    """Number of each window, PER_STORE / S more for each store before its own."""
    return (tokens[:, 0] // S).tolist()


def trained(data: Corpus, *, dp: int = 1, **options: Any) -> list[int]:
    """Windows in the order of samples, as all ranks see them."""
    ranks = [batches(data, dp=dp, rank=rank, **options) for rank in range(dp)]
    return [
        window
        for microbatches in zip(*ranks, strict=True)
        for tokens, _ in microbatches
        for window in windows_of(tokens)
    ]


def validated(data: Corpus, *, samples: int = 6, dp: int = 1) -> list[int]:
    """Windows with labels, in the order of samples, as all ranks see them."""
    ranks = [
        ValidationBatches(data, local_batch_size=2, samples=samples, dp_rank=rank, dp_degree=dp)
        for rank in range(dp)
    ]
    return [
        window
        for microbatches in zip(*ranks, strict=True)
        for tokens, labels in microbatches
        for window in windows_of(tokens[labels[:, 0] >= 0])
    ]


def test_tokens_and_labels():
    ((tokens, labels),) = batches(corpus(5))
    assert tokens.shape == labels.shape == (2, S)
    assert tokens.dtype == labels.dtype == torch.int64
    assert tokens.is_contiguous()
    assert labels.is_contiguous()
    assert torch.equal(labels, tokens + 1)
    assert (tokens[:, 0] % S).tolist() == [0, 0]


def test_the_order_of_a_store_by_itself_does_not_change():
    """Or a run that is resumed with a later version would repeat and skip windows."""
    seen = trained(corpus(12, held_out=2), steps=10)
    assert seen == [1, 4, 2, 8, 6, 11, 5, 9, 0, 7, 8, 2, 0, 9, 11, 6, 7, 4, 5, 1]


@pytest.mark.parametrize(("rest", "count"), [(-1, 4), (0, 5), (S - 1, 5), (S, 6)])
def test_count_of_windows(rest, count):
    stores: Any = {"a": FakeStore(5, rest=rest)}
    data = Corpus(stores, Mixture((1,)), seq_len=S, vocab_size=99, seed=0, held_out=[0], trained=1)
    assert data.windows[0].epoch_size == count


def test_an_epoch_has_every_window_once_and_the_next_another_order():
    seen = trained(corpus(10), steps=10)
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]


def test_a_batch_may_end_one_epoch_and_begin_the_next():
    seen = trained(corpus(5), steps=5)
    assert sorted(seen[:5]) == sorted(seen[5:]) == list(range(5))


def test_a_batch_larger_than_an_epoch():
    seen = trained(corpus(3), local=7)
    assert sorted(seen[:3]) == sorted(seen[3:6]) == [0, 1, 2]


def test_sample_ids_of_every_rank():
    ids = [
        [
            batches(corpus(50), rank=rank, dp=2, accum=2).sample_ids(2, accum_step).tolist()
            for accum_step in (0, 1)
        ]
        for rank in (0, 1)
    ]
    assert ids == [[[8, 9], [12, 13]], [[10, 11], [14, 15]]]


def test_another_seed_is_another_order():
    assert trained(corpus(50), steps=25) != trained(corpus(50, seed=1), steps=25)


def test_stores_give_samples_by_their_shares_each_in_its_own_order():
    seen = trained(corpus(10, 8, shares=(3, 1)), local=4, steps=16)
    first, second = (
        [window for window in seen if window // (PER_STORE // S) == store] for store in (0, 1)
    )
    assert [window // 250 for window in seen[:8]] == [0, 0, 0, 1] * 2
    assert len(first) == 48 and len(second) == 16
    for windows, size in ((first, 10), (second, 8)):
        epochs = [windows[start : start + size] for start in range(0, 16, size)]
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
    assert first == trained(corpus(10), local=4, steps=12)


def test_held_out_windows_are_never_trained_on():
    held_out = validated(corpus(20, held_out=6))
    assert len(set(held_out)) == 6
    for seed in range(3):
        seen = trained(corpus(20, held_out=6, seed=seed), steps=14)  # an epoch has 14 windows
        assert sorted(seen[:14] + held_out) == sorted(seen[14:] + held_out) == list(range(20))


def test_held_out_windows_are_of_every_store_by_its_share():
    data = corpus(30, 20, shares=(2, 1), held_out=6)
    held_out = validated(data)
    assert [window // 250 for window in held_out] == [0, 0, 1] * 2
    assert [windows.held_out for windows in data.windows] == [4, 2]
    seen = trained(data, steps=39)  # of which 52 samples, two epochs, are of the first store
    assert set(seen) | set(held_out) == {*range(30), *range(250, 270)}
    assert not set(seen) & set(held_out)


def test_held_out_windows_are_spread_over_the_text():
    held_out = np.array(validated(corpus(2000, held_out=200), samples=200))
    assert abs(held_out.mean() - 1000) < 5 * 2000 / np.sqrt(12 * 200)


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
@pytest.mark.parametrize("samples", [5, 6])
def test_validation_is_the_same_on_any_number_of_ranks(dp, samples):
    data = corpus(20, 10, held_out=6)
    assert validated(data, samples=samples, dp=dp) == validated(data)[:samples]
    for rank in range(dp):
        own = list(
            ValidationBatches(data, local_batch_size=2, samples=samples, dp_rank=rank, dp_degree=dp)
        )
        assert len(own) == -(-3 // dp)
        for tokens, labels in own:
            for row, row_labels in zip(tokens, labels, strict=True):
                assert torch.equal(row_labels, row + 1) or (row_labels == -100).all()
            assert tokens.is_contiguous()


def test_validation_repeats():
    own = ValidationBatches(
        corpus(20, held_out=6), local_batch_size=2, samples=6, dp_rank=0, dp_degree=1
    )
    for (tokens, labels), (again, labels_again) in zip(own, own, strict=True):
        assert torch.equal(tokens, again)
        assert torch.equal(labels, labels_again)


LAYOUTS = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))


@settings(deadline=None)
@given(
    windows=st.lists(st.tuples(st.integers(8, 40), st.integers(1, 5)), min_size=1, max_size=4),
    held_out=st.integers(0, 6),
    runs=st.lists(st.tuples(LAYOUTS, st.integers(1, 4)), min_size=1, max_size=4),
)
def test_any_layouts_with_resumes_in_between_see_what_one_process_sees(windows, held_out, runs):
    sizes, shares = zip(*windows, strict=True)
    data = corpus(*sizes, shares=shares, held_out=held_out)
    step, sample, ids, seen = 0, 0, [], []
    for (dp, accum, local), steps in runs:
        options = {
            "dp": dp,
            "accum": accum,
            "local": local,
            "first_step": step + 1,
            "first_sample": sample,
        }
        options["steps"] = step + steps
        ranks = [batches(data, rank=rank, **options) for rank in range(dp)]
        for each in range(step + 1, step + steps + 1):
            ids += [
                i for a in range(accum) for rank in ranks for i in rank.sample_ids(each, a).tolist()
            ]
        seen += trained(data, **options)
        step, sample = step + steps, ranks[0].samples(step + steps)
    assert ids == list(range(sample))
    assert seen == trained(data, local=1, steps=sample)


def test_epochs_by_store():
    data = corpus(10, 4, shares=(1, 1), held_out=4)
    assert data.epochs(0) == {"a": 0.0, "b": 0.0}
    assert data.epochs(8) == {"a": 0.5, "b": 2.0}


@given(
    windows=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=4),
    epochs=st.sampled_from([0.29, 0.5, 1, 1.1, 3.0]),
)
def test_no_store_is_passed_more_often_than_the_limit_says_and_one_more_sample_would(
    windows, epochs
):
    sizes, shares = zip(*windows, strict=True)
    data = corpus(*sizes, shares=shares)
    limit = data.sample_limit(epochs)
    assert all(passed <= epochs for passed in data.epochs(limit).values())
    assert any(passed > epochs for passed in data.epochs(limit + 1).values())


def test_the_limit_is_exact():
    assert corpus(100).sample_limit(0.29) == 29  # though 0.29 * 100 is 28.999999999999996


def test_epochs_end_the_run_at_its_last_full_batch():
    own = batches(corpus(11), local=4, steps=100, epochs=2)
    assert (own.last_step, own.left_over) == (5, 2)
    assert len(list(own)) == 5
    resumed = batches(corpus(11), local=2, steps=100, epochs=2, first_step=4, first_sample=12)
    assert (resumed.last_step, resumed.left_over) == (8, 0)
    both = batches(corpus(11), local=4, steps=5, epochs=2)
    assert (both.last_step, both.left_over) == (5, 2)
    done = batches(corpus(11), steps=100, epochs=1, first_step=4, first_sample=12)
    assert (done.last_step, list(done)) == (3, [])


@pytest.mark.parametrize("steps", [1, 4])
def test_steps_end_the_run_where_the_data_is_enough(steps):
    own = batches(corpus(11), local=4, steps=steps, epochs=2)
    assert (own.last_step, own.left_over) == (steps, None)


def test_epochs_of_less_than_a_step():
    with pytest.raises(
        DataError, match=r"\[training\] epochs = 0.5: that is 5 samples, and a step takes 6"
    ):
        batches(corpus(11), local=6, epochs=0.5)


def test_too_few_tokens_to_train_on():
    with pytest.raises(
        DataError,
        match=r"^\[training\] seq_len = 4: b has 1 tokens, which make 0 windows of .*; 1 are "
        r"needed",
    ):
        corpus(5, 0)
    with pytest.raises(
        DataError,
        match=r"25 tokens, which make 6 windows of 4 \+ 1; 7 are needed, 6 of them to valid",
    ):
        corpus(6, held_out=6)
    assert corpus(7, held_out=6).windows[0].epoch_size == 1


def test_too_few_tokens_to_validate_on():
    with pytest.raises(
        DataError,
        match=r"21 tokens, which make 5 windows of 4 \+ 1; 6 are needed, 6 of them to valid",
    ):
        corpus(5, held_out=6, trained=0)
    assert sorted(validated(corpus(6, held_out=6, trained=0))) == list(range(6))


def test_ids_that_the_model_lacks_are_refused_at_start():
    assert corpus(5, vocab_size=21)
    with pytest.raises(
        DataError,
        match=r"a \(stores/fake\): its largest token id is 20, and the model has ids up to 19",
    ):
        corpus(5, vocab_size=20)


def test_identity_names_everything_that_decides_the_samples():
    assert corpus(10, 4, shares=(2, 1), held_out=3, seed=7).identity() == {
        "seq_len": 4,
        "seed": 7,
        "store 1 name": "a",
        "store 1 fingerprint": "0" * 16,
        "store 1 tokens": 41,
        "store 1 held out": 2,
        "store 1 share": "2/3",
        "store 2 name": "b",
        "store 2 fingerprint": "1" + "0" * 15,
        "store 2 tokens": 17,
        "store 2 held out": 1,
        "store 2 share": "1/3",
    }


def test_unigram_entropy_is_of_the_mix(monkeypatch):
    data = corpus(10, 10, shares=(3, 1))
    for windows, counts in zip(data.windows, ([5, 5, 0], [0, 0, 7]), strict=True):
        monkeypatch.setattr(
            windows.store, "token_counts", lambda counts=counts: np.array(counts), raising=False
        )
    assert data.unigram_entropy() == pytest.approx(
        -2 * 3 / 8 * np.log(3 / 8) - 1 / 4 * np.log(1 / 4)
    )
