"""Batches: the shape of windows, the law of the order, and the same data on any number of ranks,
through any resumes.

Token i of the stores here is 1000 d + i, for store d, so the first token of a window tells which
window it is.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_stores import SEQ_LEN as S
from sample_stores import FakeStore, windows_of

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.config import BatchSizes
from torchtitan_lite.data.dataloader import Corpus, TrainingBatches, ValidationBatches
from torchtitan_lite.data.mixture import Mixture


def corpus(*windows: int, shares: tuple[int, ...] = (), held_out=0, **options) -> Corpus:
    """Stores named a, b, ... with so many windows each."""
    stores: Any = {
        "abcdefgh"[number]: FakeStore(count, first=1000 * number)
        for number, count in enumerate(windows)
    }
    mixture = Mixture(shares or (1,) * len(windows))
    counts = mixture.counts(held_out).tolist()
    shape = {"seq_len": S, "vocab_size": 10**6, "seed": 0, "held_out": counts, "trained": 1}
    return Corpus(stores, mixture, **{**shape, **options})


def batches(data, *, local=2, accum=1, rank=0, dp=1, steps=1, **options) -> TrainingBatches:
    sizes = BatchSizes(local, local * accum * dp, accum)
    ranks = {"dp_rank": rank, "dp_degree": dp}
    return TrainingBatches(corpus=data, sizes=sizes, steps=steps, **ranks, **options)


def validation(data, *, samples=6, rank=0, dp=1) -> ValidationBatches:
    return ValidationBatches(data, local_batch_size=2, samples=samples, dp_rank=rank, dp_degree=dp)


def samples_of(ranks: list[Any]) -> list[int]:
    """Windows with labels, in the order of samples, as all ranks see them."""
    return [
        window
        for microbatches in zip(*ranks, strict=True)
        for tokens, labels in microbatches
        for window in windows_of(tokens[labels[:, 0] >= 0])
    ]


def trained(data, *, dp=1, **options) -> list[int]:
    return samples_of([batches(data, dp=dp, rank=rank, **options) for rank in range(dp)])


def validated(data, *, samples=6, dp=1) -> list[int]:
    return samples_of([validation(data, samples=samples, rank=r, dp=dp) for r in range(dp)])


# ----- TrainingBatches, Corpus -----


def test_tokens_and_labels():
    ((tokens, labels),) = batches(corpus(5))
    assert tokens.shape == labels.shape == (2, S)
    assert tokens.dtype == labels.dtype == torch.int64
    assert tokens.is_contiguous() and labels.is_contiguous()
    assert torch.equal(labels, tokens + 1)
    assert (tokens[:, 0] % S).tolist() == [0, 0]


def test_the_order_of_a_store_by_itself_does_not_change():
    """Or a run that is resumed with a later version would repeat and skip windows."""
    seen = trained(corpus(12, held_out=2), steps=10)
    assert seen == [1, 4, 2, 8, 6, 11, 5, 9, 0, 7, 8, 2, 0, 9, 11, 6, 7, 4, 5, 1]


@pytest.mark.parametrize(("rest", "count"), [(-1, 4), (0, 5), (S - 1, 5), (S, 6)])
def test_count_windows(rest, count):
    stores: Any = {"a": FakeStore(5, rest=rest)}
    data = Corpus(stores, Mixture((1,)), seq_len=S, vocab_size=99, seed=0, held_out=[0], trained=1)
    assert data.windows[0].epoch_size == count


@pytest.mark.parametrize("local", [2, 5, 7, 25])  # of windows of one epoch, of two, of many
def test_each_epoch_has_every_window_once_in_an_order_of_its_own(local):
    seen = trained(corpus(10), local=local, steps=-(-50 // local))
    epochs = [tuple(seen[start : start + 10]) for start in range(0, 50, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(epochs)) == 5


def test_sample_ids_of_every_rank():
    def ids(rank, accum_step):
        own = batches(corpus(50), rank=rank, dp=2, accum=2)
        return own.sample_ids(2, accum_step).tolist()

    assert [ids(0, 0), ids(0, 1)] == [[8, 9], [12, 13]]
    assert [ids(1, 0), ids(1, 1)] == [[10, 11], [14, 15]]


def test_another_seed_is_another_order():
    assert trained(corpus(50), steps=25) != trained(corpus(50, seed=1), steps=25)


def test_stores_give_samples_by_their_shares_each_in_its_own_order():
    seen = trained(corpus(10, 8, shares=(3, 1)), local=4, steps=16)
    first, second = ([window for window in seen if window // 250 == store] for store in (0, 1))
    assert [window // 250 for window in seen[:8]] == [0, 0, 0, 1] * 2
    assert (len(first), len(second)) == (48, 16)
    assert first == trained(corpus(10), local=4, steps=12)
    assert sorted(second[:8]) == sorted(second[8:]) == list(range(250, 258))


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
        last = step + steps
        resumed = {"first_step": step + 1, "first_sample": sample, "steps": last}
        options = {"dp": dp, "accum": accum, "local": local, **resumed}
        ranks = [batches(data, rank=rank, **options) for rank in range(dp)]
        for each in range(step + 1, last + 1):
            ids += [i for a in range(accum) for rank in ranks for i in rank.sample_ids(each, a)]
        seen += trained(data, **options)
        step, sample = last, ranks[0].samples(last)
    assert ids == list(range(sample))
    assert seen == trained(data, local=1, steps=sample)


# ----- ValidationBatches, held_out -----


@pytest.mark.parametrize("seed", range(3))
def test_held_out_windows_are_of_every_store_by_its_share_and_never_trained_on(seed):
    data = corpus(30, 20, shares=(2, 1), held_out=6, seed=seed)
    held_out = validated(data)
    assert held_out == validated(corpus(30, 20, shares=(2, 1), held_out=6))
    assert [window // 250 for window in held_out] == [0, 0, 1] * 2
    assert [windows.held_out for windows in data.windows] == [4, 2]
    seen = trained(data, steps=39)  # of which 52 samples, two epochs, are of the first store
    assert set(seen) | set(held_out) == {*range(30), *range(250, 270)}
    assert len({*seen, *held_out}) == len(set(seen)) + len(held_out) == 50


def test_held_out_windows_are_spread_over_the_text():
    held_out = np.array(validated(corpus(2000, held_out=200), samples=200))
    assert abs(held_out.mean() - 1000) < 5 * 2000 / np.sqrt(12 * 200)


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
@pytest.mark.parametrize("samples", [5, 6])
def test_validation_is_the_same_on_any_number_of_ranks(dp, samples):
    data = corpus(20, 10, held_out=6)
    assert validated(data, samples=samples, dp=dp) == validated(data)[:samples]
    for rank in range(dp):
        own = validation(data, samples=samples, rank=rank, dp=dp)
        assert len(list(own)) == -(-3 // dp)
        for (tokens, labels), (again, labels_again) in zip(own, own, strict=True):
            assert torch.equal(tokens, again) and torch.equal(labels, labels_again)
            assert tokens.is_contiguous()
            for row, row_labels in zip(tokens, labels, strict=True):
                assert torch.equal(row_labels, row + 1) or (row_labels == -100).all()


# ----- epochs, sample_limit, last_step, left_over -----


def test_epochs_by_store():
    data = corpus(10, 4, shares=(1, 1), held_out=4)
    assert data.epochs(0) == {"a": 0.0, "b": 0.0}
    assert data.epochs(8) == {"a": 0.5, "b": 2.0}


@given(
    windows=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=4),
    epochs=st.sampled_from([0.29, 0.5, 1, 1.1, 3.0]),
)
def test_sample_limit_passes_no_store_too_often_and_one_more_sample_would(windows, epochs):
    sizes, shares = zip(*windows, strict=True)
    data = corpus(*sizes, shares=shares)
    limit = data.sample_limit(epochs)
    assert all(passed <= epochs for passed in data.epochs(limit).values())
    assert any(passed > epochs for passed in data.epochs(limit + 1).values())


def test_sample_limit_is_exact():
    assert corpus(100).sample_limit(0.29) == 29  # though 0.29 * 100 is 28.999999999999996


RESUMED = {"first_step": 4, "first_sample": 12}


@pytest.mark.parametrize(("options", "last_step", "left_over"), [
    ({"steps": 100, "epochs": 2, "local": 4}, 5, 2),
    ({"steps": 5, "epochs": 2, "local": 4}, 5, 2),
    ({"steps": 4, "epochs": 2, "local": 4}, 4, None),
    ({"steps": 1, "epochs": 2, "local": 4}, 1, None),
    ({"steps": 100, "epochs": 2, "local": 2, **RESUMED}, 8, 0),
    ({"steps": 100, "epochs": 1, "local": 2, **RESUMED}, 3, 0),
])  # fmt: skip
def test_epochs_or_steps_end_the_run(options, last_step, left_over):
    own = batches(corpus(11), **options)
    assert (own.last_step, own.left_over) == (last_step, left_over)
    assert len(list(own)) == last_step + 1 - options.get("first_step", 1)


# ----- Corpus, TrainingBatches: DataError -----


def test_epochs_of_less_than_a_step_are_refused():
    with pytest.raises(DataError, match=r"^\[training\] epochs = 0.5: .* 5 samples, .* takes 6"):
        batches(corpus(11), local=6, epochs=0.5)


@pytest.mark.parametrize(("sizes", "options", "message"), [
    ((5, 0), {}, r"^\[training\] seq_len = 4: b has 1 tokens, .* 0 windows of 4 \+ 1; 1 are "),
    ((6,), {"held_out": 6}, r"25 tokens, which make 6 windows of 4 \+ 1; 7 are needed, 6 of them"),
    ((5,), {"held_out": 6, "trained": 0}, "21 tokens, which make 5 windows .*; 6 are needed, 6 of"),
    ((5,), {"vocab_size": 20}, r"a \(stores/fake\): its largest token id is 20, .* ids up to 19; "),
])  # fmt: skip
def test_too_few_tokens_and_too_large_ids_are_refused(sizes, options, message):
    with pytest.raises(DataError, match=message):
        corpus(*sizes, **options)


def test_just_enough_tokens_and_ids():
    assert corpus(7, held_out=6).windows[0].epoch_size == 1
    assert sorted(validated(corpus(6, held_out=6, trained=0))) == list(range(6))
    assert corpus(5, vocab_size=21)


# ----- identity -----


def test_identity_names_everything_that_decides_the_samples():
    assert corpus(10, 4, shares=(2, 1), held_out=3, seed=7).identity() == {
        "seq_len": 4, "seed": 7,
        "store 1 name": "a", "store 1 fingerprint": "0" * 16, "store 1 tokens": 41,
        "store 1 held out": 2, "store 1 share": "2/3",
        "store 2 name": "b", "store 2 fingerprint": "1" + "0" * 15, "store 2 tokens": 17,
        "store 2 held out": 1, "store 2 share": "1/3",
    }  # fmt: skip
