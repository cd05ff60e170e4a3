"""StepObserver: the counts of what a step runs, and their comparison with the config."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from torchtitan_lite.config import Float8Config
from torchtitan_lite.float8.convert import convert_linears
from torchtitan_lite.float8.observe import Asked, StepObserver
from torchtitan_lite.float8.selection import select_linears
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer

ARGS = ModelArgs(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=64, max_seq_len=16
)
TENSORWISE = Asked(linears=14, matmuls=42, matmuls_run_in="float32")


def build(recipe: str | None, *filters: str, emulate: bool = True) -> nn.Module:
    with torch.device("meta"):
        model = Transformer(ARGS)
    if recipe is not None:
        float8 = Float8Config(enable_float8_linear=True, recipe_name=recipe)
        choices = select_linears(model, filter_fqns=filters, tp_degree=1, tokens=32)
        convert_linears(model, choices, float8=float8, emulate=emulate)
    model.to_empty(device="cpu")
    init_weights(model, seed=0, buffer_device=torch.device("cpu"))
    return model.bfloat16()


def observe(model: nn.Module) -> StepObserver:
    with StepObserver() as observer:
        model(torch.arange(32).view(2, 16)).float().logsumexp(-1).sum().backward()
    return observer


@pytest.mark.parametrize(
    ("recipe", "matmuls"),
    [
        (None, {"bfloat16": 45}),
        ("tensorwise", {"float32": 42, "bfloat16": 3}),
        ("rowwise", {"float32": 42, "bfloat16": 3}),
        ("rowwise_with_gw_hp", {"float32": 28, "bfloat16": 17}),
    ],
)
def test_matmuls_are_counted_by_the_type_they_run_in(
    recipe: str | None, matmuls: dict[str, int]
) -> None:
    observer = observe(build(recipe))
    assert observer.matmuls == matmuls
    assert not observer.fsdp_gathers and not observer.tp_gathers


def test_observing_changes_no_gradient() -> None:
    gradients = []
    for seen in (True, False):
        model = build("tensorwise")
        if seen:
            observe(model)
        else:
            model(torch.arange(32).view(2, 16)).float().logsumexp(-1).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_a_step_that_runs_as_asked_has_no_mismatch_and_is_described() -> None:
    model = build("tensorwise")
    observer = observe(model)
    assert observer.mismatches(model, TENSORWISE) == []
    assert observer.lines(model, TENSORWISE) == [
        "14 of 15 linears are of float8; matmuls: 42 in float32, 3 in bfloat16 "
        "(float8 is emulated in float32)"
    ]


def test_a_linear_that_is_no_longer_of_float8_is_a_mismatch() -> None:
    model = build("tensorwise")
    attention = model.layers["1"].attention
    attention.wq, plain = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16), attention.wq
    plain.weight = attention.wq.weight
    assert observe(model).mismatches(model, TENSORWISE) == [
        "13 linears of float8, and at least 14 were asked for",
        "39 matmuls in float8, and at least 42 were asked for",
    ]


def test_float8_that_nobody_asked_for_is_a_mismatch() -> None:
    model = build("tensorwise")
    observer = observe(model)
    observer.matmuls["float8"] = 2
    observer.fsdp_gathers["float8"] = 1
    assert observer.mismatches(model, Asked(linears=14)) == [
        "2 matmuls in float8, and none was asked for",
        "1 gathers of weights in float8, and none was asked for",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fsdp_gathers": 2}, "0 gathers of weights in float8, and at least 2 were asked for"),
        ({"tp_gathers": 8}, "0 gathers of activations in float8, and at least 8 were asked for"),
        ({"fused": 2}, "0 collectives fused with matmuls, and at least 2 were asked for"),
    ],
)
def test_a_gather_that_did_not_happen_is_a_mismatch(change: dict[str, int], message: str) -> None:
    model = build("tensorwise")
    assert observe(model).mismatches(model, replace(TENSORWISE, **change)) == [message]


def test_real_float8_matmuls_and_fused_ones_are_counted() -> None:
    shard = torch.zeros(16, 16, dtype=torch.float8_e4m3fn)
    one = torch.ones(())

    with StepObserver() as observer:
        torch._scaled_mm(shard, shard.t(), one, one, out_dtype=torch.bfloat16)
    assert observer.matmuls == {"float8": 1}
    fused = MagicMock(overloadpacket=SimpleNamespace(__name__="fused_all_gather_scaled_matmul"))
    observer.__torch_dispatch__(fused, (), (shard, [shard, shard, shard]))
    assert observer.matmuls == {"float8": 4} and observer.tp_gathers == {"float8": 1}
    assert observer.lines(nn.Module(), Asked(fused=1))[-1] == (
        "gathers of activations: 1 in float8, 1 collectives fused with matmuls"
    )
