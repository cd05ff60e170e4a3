"""Batches: the shape of windows, the law of the order, and the same data on any number of ranks.

The stores here hold token i at place i, so the first token of a window tells which window it is.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_lite.data.dataloader import TrainingBatches, ValidationBatches
from torchtitan_lite.errors import DataError

S = 4
LAYOUT = {"local_batch_size": 2, "grad_accum_steps": 1, "dp_rank": 0, "dp_degree": 1}


def store(windows: int, rest: int = 0) -> SimpleNamespace:
    return SimpleNamespace(tokens=np.arange(windows * S + 1 + rest, dtype=np.uint16))


def training(windows: int, **options: int) -> TrainingBatches:
    return TrainingBatches(store(windows), **{"seq_len": S, "seed": 0, **LAYOUT, **options})


def windows_of(tokens: torch.Tensor) -> list[int]:
    return (tokens[:, 0] // S).tolist()


def global_batch(windows: int, step: int, *, dp_degree: int, grad_accum_steps: int, **options: int) -> list[list[int]]:
    """Windows of each microbatch of a step, in the order of samples."""
    return [
        windows_of(
            training(windows, dp_rank=rank, dp_degree=dp_degree, grad_accum_steps=grad_accum_steps, **options).batch(
                step, accum_step
            )[0]
        )
        for accum_step in range(grad_accum_steps)
        for rank in range(dp_degree)
    ]


def validation(windows: int, *, steps: int = 3, dp_degree: int = 1) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Batches of each rank."""
    options = {"seq_len": S, "local_batch_size": 2, "steps": steps, "dp_degree": dp_degree}
    return [list(ValidationBatches(store(windows), dp_rank=rank, **options)) for rank in range(dp_degree)]


def validated(per_rank: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> list[list[int]]:
    """Windows of each microbatch with labels, round by round."""
    return [
        windows_of(tokens) for batches in zip(*per_rank, strict=True) for tokens, labels in batches if labels[0, 0] >= 0
    ]


def test_tokens_and_labels():
    tokens, labels = training(5).batch(1, 0)
    assert tokens.shape == labels.shape == (2, S)
    assert tokens.dtype == labels.dtype == torch.int64
    assert tokens.is_contiguous()
    assert labels.is_contiguous()
    assert torch.equal(labels, tokens + 1)
    assert (tokens[:, 0] % S).tolist() == [0, 0]


@pytest.mark.parametrize(("rest", "count"), [(-1, 4), (0, 5), (S - 1, 5), (S, 6)])
def test_count_of_windows(rest, count):
    assert TrainingBatches(store(5, rest), seq_len=S, seed=0, **LAYOUT).epoch_size == count


def test_an_epoch_has_every_window_once_and_the_next_another_order():
    batches = training(10)
    epochs = [
        [w for step in range(first, first + 5) for w in windows_of(batches.batch(step, 0)[0])] for first in (1, 6)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]
    assert [batches.epoch_of(step) for step in (1, 5, 6, 10, 11)] == [0, 0, 1, 1, 2]


def test_a_batch_may_end_one_epoch_and_begin_the_next():
    batches = training(5)
    seen = [w for step in range(1, 6) for w in windows_of(batches.batch(step, 0)[0])]
    assert sorted(seen[:5]) == sorted(seen[5:]) == list(range(5))


def test_a_batch_larger_than_an_epoch():
    seen = windows_of(training(3, local_batch_size=7).batch(1, 0)[0])
    assert sorted(seen[:3]) == sorted(seen[3:6]) == [0, 1, 2]


def test_sample_ids_of_every_rank():
    ids = [
        [training(50, dp_rank=rank, dp_degree=2, grad_accum_steps=2).sample_ids(2, accum).tolist() for accum in (0, 1)]
        for rank in (0, 1)
    ]
    assert ids == [[[8, 9], [12, 13]], [[10, 11], [14, 15]]]


@pytest.mark.parametrize("step", [1, 2, 9])
def test_the_global_batch_does_not_depend_on_the_ranks(step):
    layouts = [(1, 4), (2, 2), (4, 1)]
    batches = [global_batch(37, step, dp_degree=dp, grad_accum_steps=accum) for dp, accum in layouts]
    assert batches[0] == batches[1] == batches[2]


def test_another_seed_is_another_order():
    orders = [[windows_of(training(50, seed=seed).batch(step, 0)[0]) for step in range(1, 26)] for seed in (0, 1)]
    assert orders[0] != orders[1]


def test_held_out_windows_are_never_trained_on():
    held_out = [w for batch in validated(validation(20)) for w in batch]
    assert len(set(held_out)) == 6
    for seed in range(3):
        batches = training(20, seed=seed, held_out=6)
        for first in (1, 8):  # an epoch has 14 windows
            trained = [w for step in range(first, first + 7) for w in windows_of(batches.batch(step, 0)[0])]
            assert sorted(trained + held_out) == list(range(20))


def test_held_out_windows_are_spread_over_the_text():
    held_out = np.array([w for batch in validated(validation(2000, steps=100)) for w in batch])
    assert abs(held_out.mean() - 1000) < 5 * 2000 / np.sqrt(12 * 200)


@pytest.mark.parametrize("dp_degree", [1, 2, 3, 4])
def test_validation_is_the_same_on_any_number_of_ranks(dp_degree):
    per_rank = validation(20, dp_degree=dp_degree)
    assert {len(batches) for batches in per_rank} == {-(-3 // dp_degree)}
    assert validated(per_rank) == validated(validation(20))
    for tokens, labels in (batch for batches in per_rank for batch in batches):
        assert torch.equal(labels, tokens + 1) or (labels == -100).all()
        assert tokens.is_contiguous()


def test_validation_repeats():
    batches = ValidationBatches(store(20), seq_len=S, local_batch_size=2, steps=3, dp_rank=0, dp_degree=1)
    for (tokens, labels), (again, labels_again) in zip(batches, batches, strict=True):
        assert torch.equal(tokens, again)
        assert torch.equal(labels, labels_again)


@given(
    windows=st.integers(7, 60),
    held_out=st.integers(0, 6),
    dp_degree=st.integers(1, 4),
    accum=st.integers(1, 3),
    local=st.integers(1, 3),
)
def test_any_layout_covers_every_epoch_exactly(windows, held_out, dp_degree, accum, local):
    size, epoch = dp_degree * accum * local, windows - held_out
    steps = range(1, -(-2 * epoch // size) + 1)
    layout = {"dp_degree": dp_degree, "grad_accum_steps": accum, "local_batch_size": local, "held_out": held_out}
    seen = [w for step in steps for batch in global_batch(windows, step, **layout) for w in batch]
    first, second = seen[:epoch], seen[epoch : 2 * epoch]
    assert len(set(first)) == epoch
    assert set(first) == set(second)


def test_too_few_tokens_to_train_on():
    with pytest.raises(
        DataError, match=r"^\[training\] seq_len = 4: 4 tokens make 0 windows of 4 \+ 1; 1 are needed, 0 of"
    ):
        TrainingBatches(store(1, -1), seq_len=S, seed=0, **LAYOUT)
    with pytest.raises(DataError, match=r"25 tokens make 6 windows of 4 \+ 1; 7 are needed, 6 of them to validate on"):
        training(6, held_out=6)
    assert training(7, held_out=6).epoch_size == 1


def test_too_few_tokens_to_validate_on():
    with pytest.raises(DataError, match=r"21 tokens make 5 windows of 4 \+ 1; 6 are needed, 6 of them to validate on"):
        validation(5)
    assert len(validated(validation(6))) == 3
