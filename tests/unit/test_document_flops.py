"""The attention that document masks leave, counted from the tokens and from the mask itself."""

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torchtitan_lite.metrics.flops import document_squares, document_values
from torchtitan_lite.models.llama3 import document_mask, document_starts
from torchtitan_lite.parallel.context_parallel import ContextParallel

BOS, SEQ_LEN = 0, 48


def whole(x: Tensor, dim: int) -> Tensor:
    return x


def part_of(rank: int, degree: int) -> Callable[[Tensor, int], Tensor]:
    """What rank `rank` of `degree` computes of a sequence."""
    mesh: Any = SimpleNamespace(size=lambda: degree, get_local_rank=lambda: rank)
    return ContextParallel(mesh, flash=False).shard_sequence


def tokens_with(starts: list[set[int]]) -> Tensor:
    """Tokens [B, S] with a BOS at each of `starts`."""
    tokens = torch.ones(len(starts), SEQ_LEN, dtype=torch.long)
    for row, places in zip(tokens, starts, strict=True):
        row[list(places)] = BOS
    return tokens


def seen(tokens: Tensor, queries: Tensor) -> int:
    """The pairs of a query of `queries` and a key that the dense mask lets take part."""
    mask = document_mask(document_starts(tokens, bos_id=BOS), queries)
    assert isinstance(mask, Tensor) and mask.dtype == torch.bool
    return int(mask.sum())


windows = st.lists(st.sets(st.integers(0, SEQ_LEN - 1)), min_size=1, max_size=3)


@given(starts=windows)
def test_squares_are_those_of_the_mask_and_of_the_lengths(starts: list[set[int]]) -> None:
    tokens = tokens_with(starts)
    squares = document_squares(tokens, bos_id=BOS, shard_sequence=whole)
    assert squares.dtype == torch.int64 and squares.shape == ()
    # A document of n tokens has n (n + 1) / 2 pairs.
    assert squares.item() == 2 * seen(tokens, torch.arange(SEQ_LEN)) - tokens.numel()
    bounds = [sorted({0, *places, SEQ_LEN}) for places in starts]
    assert squares.item() == sum((b - a) ** 2 for row in bounds for a, b in pairwise(row))


@pytest.mark.parametrize("degree", [2, 3, 4])
@given(starts=windows)
def test_each_rank_counts_its_part(degree: int, starts: list[set[int]]) -> None:
    tokens, counted = tokens_with(starts), 0
    for rank in range(degree):
        part = part_of(rank, degree)
        squares = document_squares(tokens, bos_id=BOS, shard_sequence=part)
        pairs = seen(tokens, part(torch.arange(SEQ_LEN), 0))
        assert squares.item() == 2 * pairs - tokens.numel() // degree
        counted += int(squares)
    assert counted == document_squares(tokens, bos_id=BOS, shard_sequence=whole)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_windows_of_one_document_are_whole_and_balanced(degree: int) -> None:
    tokens = tokens_with([set(), {0}])
    ranks = [
        document_squares(tokens, bos_id=BOS, shard_sequence=part_of(rank, degree))
        for rank in range(degree)
    ]
    values = document_values(torch.stack(ranks)[:, None], whole=2 * SEQ_LEN**2)
    assert {name: value.item() for name, value in values.items()} == {
        "attention_share": 1.0,
        "attention_imbalance": 1.0,
    }


def test_values_of_a_step_are_exact_beyond_float32() -> None:
    squares = torch.tensor([[2**40 + 1], [2**40 - 2], [2**40 - 2]])
    values = document_values(squares, whole=2**43)
    assert values["attention_share"].item() == (3 * 2**40 - 3) / 2**43
    assert values["attention_imbalance"].item() == 3 * (2**40 + 1) / (3 * 2**40 - 3) > 1


def test_the_busiest_rank_of_each_microbatch_counts() -> None:
    values = document_values(torch.tensor([[1, 5], [3, 3]]), whole=16)
    assert values["attention_share"].item() == 12 / 16
    assert values["attention_imbalance"].item() == (3 + 5) / (2 + 4)


def test_counting_reads_no_value() -> None:
    """On a GPU it would wait for the device. A meta tensor has no value."""
    tokens = tokens_with([{3}]).to("meta")
    ranks = [
        document_squares(tokens, bos_id=BOS, shard_sequence=part_of(rank, 2)) for rank in range(2)
    ]
    for value in document_values(torch.stack(ranks)[:, None], whole=SEQ_LEN**2).values():
        assert value.is_meta and value.dtype == torch.float64
