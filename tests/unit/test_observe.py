"""StepObserver: the counts of what a step runs, and their comparison with the config."""

import re
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from sample_models import SMALL, on_meta, ready
from torch import nn
from torch._dynamo.utils import counters

from torchtitan_lite.float8.observe import Asked, StepObserver

# ----- StepObserver -----

TENSORWISE = Asked(linears=14, matmuls=42, matmuls_run_in="float32")


def build(recipe: str | None) -> nn.Module:
    return ready(on_meta(SMALL, recipe)).bfloat16()


def train(model: nn.Module) -> None:
    model(torch.arange(32).view(2, 16)).float().logsumexp(-1).sum().backward()


def observe(model: nn.Module) -> StepObserver:
    with StepObserver() as observer:
        train(model)
    return observer


@pytest.mark.parametrize(
    ("recipe", "matmuls"),
    [
        (None, {"bfloat16": 45}),
        ("tensorwise", {"float32": 42, "bfloat16": 3}),
        ("rowwise_with_gw_hp", {"float32": 28, "bfloat16": 17}),
    ],
)
def test_matmuls_are_counted_by_the_type_they_run_in(recipe, matmuls):
    observer = observe(build(recipe))
    assert observer.matmuls == matmuls
    assert not observer.fsdp_gathers and not observer.tp_gathers


def test_observing_changes_no_gradient() -> None:
    observed, plain = build("tensorwise"), build("tensorwise")
    observe(observed)
    train(plain)
    pairs = zip(observed.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


def test_a_step_that_runs_as_asked_has_no_mismatch_and_is_described() -> None:
    model = build("tensorwise")
    observer = observe(model)
    assert observer.mismatches(model, TENSORWISE) == []
    (line,) = observer.lines(model, TENSORWISE)
    assert re.match(r"14 of 15 linears .*: 42 in float32, 3 in bfloat16 .*emulated", line)


def test_a_linear_that_is_no_longer_of_float8_is_a_mismatch() -> None:
    model = build("tensorwise")
    attention = model.layers["1"].attention
    attention.wq, plain = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16), attention.wq
    plain.weight = attention.wq.weight
    assert observe(model).mismatches(model, TENSORWISE) == [
        "13 linears of float8, and at least 14 were asked for",
        "39 matmuls in float8, and at least 42 were asked for",
    ]


@pytest.mark.parametrize(
    ("seen", "asked", "mismatch"),
    [
        ({}, {"fsdp_gathers": 2}, "0 gathers of weights in float8, and at least 2 were"),
        ({}, {"tp_gathers": 8}, "0 gathers of activations in float8, and at least 8 were"),
        ({}, {"fused": 3}, "0 collectives fused with matmuls, and at least 3 were"),
        ({"matmuls": 2}, {}, "2 matmuls in float8, and none was"),
        ({"fsdp_gathers": 1}, {}, "1 gathers of weights in float8, and none was"),
    ],
)
def test_other_float8_than_was_asked_for_is_a_mismatch(seen, asked, mismatch):
    observer = StepObserver()
    for name, count in seen.items():
        getattr(observer, name)["float8"] = count
    assert observer.mismatches(nn.Module(), Asked(**asked)) == [f"{mismatch} asked for"]


def test_blocks_that_run_eager_though_they_are_compiled_are_a_mismatch() -> None:
    counters.clear()
    assert StepObserver().mismatches(nn.Module(), Asked(graphs=2)) == [
        "0 compiled graphs, and at least 2 were asked for"
    ]
    torch.compile(torch.sin, backend="eager")(torch.ones(2))
    assert StepObserver().mismatches(nn.Module(), Asked(graphs=1)) == []
    assert StepObserver().mismatches(nn.Module(), Asked()) == []  # as of FlexAttention
    assert StepObserver().lines(nn.Module(), Asked(graphs=1))[-1] == "torch.compile: 1 graphs"


def test_real_float8_matmuls_and_fused_ones_are_counted() -> None:
    shard = torch.zeros(16, 16, dtype=torch.float8_e4m3fn)
    one = torch.ones(())

    with StepObserver() as observer:
        torch._scaled_mm(shard, shard.t(), one, one, out_dtype=torch.bfloat16)
    assert observer.matmuls == {"float8": 1}
    fused = MagicMock(overloadpacket=SimpleNamespace(__name__="fused_all_gather_scaled_matmul"))
    observer.__torch_dispatch__(fused, (), (shard, [shard, shard, shard]))
    assert observer.matmuls == {"float8": 4} and observer.tp_gathers == {"float8": 1}
    assert "1 in float8, 1 collectives fused" in observer.lines(nn.Module(), Asked(fused=1))[-1]
