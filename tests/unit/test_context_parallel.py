"""A rank's part of a sequence: its chunks, its share of the work, its attention to all keys."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from torchtitan_lite.models.llama3 import attend, document_mask
from torchtitan_lite.parallel.context_parallel import ContextParallel

# ----- ContextParallel -----


def place(rank: int, degree: int) -> ContextParallel:
    """The place of a rank in a group that has not been started."""
    mesh: Any = SimpleNamespace(size=lambda: degree, get_local_rank=lambda: rank)
    return ContextParallel(mesh, flash=False)


def test_a_part_is_a_chunk_from_the_start_and_one_from_the_end() -> None:
    sequence = torch.arange(8).view(1, 8)
    parts = [place(rank, 2).shard_sequence(sequence, 1).tolist() for rank in range(2)]
    assert parts == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]


@pytest.mark.parametrize("degree", [2, 3, 8])
def test_causal_attention_is_the_same_work_on_every_rank(degree: int) -> None:
    # A query at index i attends to i + 1 keys.
    index = torch.arange(96)
    work = {int((place(rank, degree).shard_sequence(index, 0) + 1).sum()) for rank in range(degree)}
    assert work == {96 * 97 // 2 // degree}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_parts_attend_as_the_whole_does(degree, masked, monkeypatch):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 16, 8, requires_grad=True) for heads in (4, 2, 2))
    starts = torch.tensor([[0] * 5 + [5] * 6 + [11] * 5, [0] * 16]) if masked else None

    def mask(queries: Tensor) -> Any:
        return None if starts is None else document_mask(starts, queries)

    index = torch.arange(16)
    expected = attend(q, k, v, mask(index))

    # The collective is the business of tests with several processes.
    monkeypatch.setattr(ContextParallel, "_gather", lambda *_: torch.cat((k, v)))
    rows, outs = [], []
    for rank in range(degree):
        context = place(rank, degree)
        own = [context.shard_sequence(t, 2) for t in (q, k, v)]
        rows.append(context.shard_sequence(index, 0))
        outs.append(context.attend(*own, mask(rows[-1])))
    found = torch.cat(outs, dim=2)[:, :, torch.cat(rows).argsort()]
    torch.testing.assert_close(found, expected)

    gradient = torch.randn_like(expected)
    of_parts, of_whole = (
        torch.autograd.grad(out, (q, k, v), gradient) for out in (found, expected)
    )
    torch.testing.assert_close(of_parts, of_whole)
