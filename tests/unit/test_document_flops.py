"""The attention that document masks leave, counted from the tokens and from the mask itself."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchtitan_lite.metrics.flops import document_squares, document_values
from torchtitan_lite.models.llama3 import document_mask, document_starts
from torchtitan_lite.parallel.context_parallel import ContextParallel

BOS, SEQ_LEN = 0, 48


def part(rank: int, degree: int) -> ContextParallel:
    """What rank `rank` of `degree` computes of a sequence."""
    mesh: Any = SimpleNamespace(size=lambda: degree, get_local_rank=lambda: rank)
    return ContextParallel(mesh, flash=False)


def squares(tokens: Tensor, rank: int = 0, degree: int = 1) -> Tensor:
    shard_sequence = part(rank, degree).shard_sequence
    return document_squares(tokens, bos_id=BOS, shard_sequence=shard_sequence)


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


# ----- document_squares -----

windows = st.lists(st.sets(st.integers(0, SEQ_LEN - 1)), min_size=1, max_size=3)


@settings(max_examples=40)
@given(starts=windows)
def test_squares_are_those_of_the_mask_and_of_the_lengths(starts):
    tokens = tokens_with(starts)
    found = squares(tokens)
    assert found.dtype == torch.int64 and found.shape == ()
    # A document of n tokens has n (n + 1) / 2 pairs.
    assert found.item() == 2 * seen(tokens, torch.arange(SEQ_LEN)) - tokens.numel()
    bounds = [sorted({0, *places, SEQ_LEN}) for places in starts]
    assert found.item() == sum((b - a) ** 2 for row in bounds for a, b in pairwise(row))


@pytest.mark.parametrize("degree", [2, 3])
@settings(max_examples=20)
@given(starts=windows)
def test_squares_of_a_rank_are_those_of_its_part(degree, starts):
    tokens, counted = tokens_with(starts), 0
    for rank in range(degree):
        queries = part(rank, degree).shard_sequence(torch.arange(SEQ_LEN), 0)
        own = squares(tokens, rank, degree).item()
        assert own == 2 * seen(tokens, queries) - tokens.numel() // degree
        counted += own
    assert counted == squares(tokens)


# ----- document_values -----


@pytest.mark.parametrize("degree", [1, 4])
def test_values_of_windows_of_one_document_are_1(degree):
    tokens = tokens_with([set(), {0}])
    ranks = torch.stack([squares(tokens, rank, degree) for rank in range(degree)])
    values = document_values(ranks[:, None], whole=2 * SEQ_LEN**2)
    assert values == (1.0, 1.0)


def test_values_of_a_step_are_exact_beyond_float32():
    ranks = torch.tensor([[2**40 + 1], [2**40 - 2], [2**40 - 2]])
    share, imbalance = document_values(ranks, whole=2**43)
    assert share.item() == (3 * 2**40 - 3) / 2**43
    assert imbalance.item() == 3 * (2**40 + 1) / (3 * 2**40 - 3) > 1


def test_values_have_the_busiest_rank_of_each_microbatch():
    values = document_values(torch.tensor([[1, 5], [3, 3]]), whole=16)
    assert values == (12 / 16, (3 + 5) / (2 + 4))


def test_counting_reads_no_value():
    """On a GPU it would wait for the device. A meta tensor has no value."""
    tokens = tokens_with([{3}]).to("meta")
    ranks = torch.stack([squares(tokens, rank, 2) for rank in range(2)])
    for value in document_values(ranks[:, None], whole=SEQ_LEN**2):
        assert value.is_meta and value.dtype == torch.float64
