"""A run's state by name, without torchao's wrapper, and the random generators' state."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchao.float8.config import Float8LinearConfig
from torchao.float8.float8_training_tensor import LinearMMConfig
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from torchtitan_lite.checkpoint.manifest import BrokenCheckpoint, TensorEntry
from torchtitan_lite.checkpoint.state import (
    Snapshot,
    check_finite,
    entries,
    load_random_state,
    model_state,
    random_state,
    training_state,
)
from torchtitan_lite.errors import NumericError
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.llama3 import Transformer

CPU = torch.device("cpu")


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build() -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, bias=False))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def test_names_shapes_and_types() -> None:
    model, optimizer = build()
    assert entries(model_state(model)) == {
        "model.0.weight": TensorEntry("float32", (2, 3)),
        "model.0.bias": TensorEntry("float32", (2,)),
        "model.1.weight": TensorEntry("float32", (1, 2)),
    }
    state = entries(training_state(model, optimizer))
    assert len(state) == 3 + 3 * 3
    assert (
        state["optimizer.0.weight.exp_avg"]
        == state["optimizer.0.weight.exp_avg_sq"]
        == state["model.0.weight"]
    )
    assert state["optimizer.0.weight.step"] == TensorEntry("float32", ())


def test_asking_for_the_state_changes_nothing() -> None:
    model, optimizer = build()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    state = training_state(model, optimizer)
    assert all(
        (tensor == 0).all() for name, tensor in state.items() if name.startswith("optimizer.")
    )
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_loading_into_the_state_is_loading_into_the_run() -> None:
    model, optimizer = build()
    for tensor in training_state(model, optimizer).values():
        tensor.fill_(7.0)
    assert all((parameter == 7).all() for parameter in model.parameters())
    assert all((tensor == 7).all() for kept in optimizer.state.values() for tensor in kept.values())


def test_a_tied_weight_has_one_name_and_one_optimizer_state() -> None:
    args = ModelArgs(dim=8, n_layers=1, n_heads=1, n_kv_heads=1, ffn_dim=8, vocab_size=4)
    model = Transformer(replace(args, tie_embeddings=True))
    state = training_state(model, torch.optim.AdamW(model.parameters(), fused=True))
    assert len(state) == (9 + 2) * 4
    ends = {name for name in state if "output" in name or "tok_embeddings" in name}
    moments = {f"optimizer.tok_embeddings.weight.{n}" for n in ("step", "exp_avg", "exp_avg_sq")}
    assert ends == {"model.tok_embeddings.weight", *moments}
    state["model.tok_embeddings.weight"].fill_(7.0)
    assert (model.output.weight == 7).all()


def test_a_wrapped_weight_is_saved_plain_and_shared(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    inner = torch.ones(4, 2)
    config = LinearMMConfig()
    wrapped = WeightWithDynamicFloat8CastTensor(
        inner, config, Float8LinearConfig().cast_config_weight.target_dtype
    )
    sharded = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    model = nn.Module()
    model.weight = nn.Parameter(DTensor(wrapped, sharded._spec, requires_grad=False))
    state = model_state(model)["model.weight"]
    assert (
        isinstance(state, DTensor)
        and type(state.to_local()) is torch.Tensor
        and state.shape == (4, 2)
    )
    state.to_local().fill_(3.0)
    assert (inner == 3).all()


def test_a_snapshot_is_of_the_moment_and_reuses_its_memory(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    state = {
        "a": torch.arange(3.0),
        "b": distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]),
        "c": torch.tensor(1.0),
    }
    snapshot = Snapshot(pinned=False)
    first = snapshot.take(state)
    expected = [torch.arange(3.0), torch.ones(4, 2), torch.tensor(1.0)]
    for tensor in state.values():
        tensor.fill_(7)
    assert all(
        torch.equal(_whole(copy), was) for copy, was in zip(first.values(), expected, strict=True)
    )
    assert isinstance(first["b"], DTensor) and first["b"]._spec == state["b"]._spec
    memory = [_whole(copy).data_ptr() for copy in first.values()]
    second = snapshot.take(state)
    assert second.keys() == state.keys() and all(
        (_whole(copy) == 7).all() for copy in second.values()
    )
    assert [_whole(copy).data_ptr() for copy in second.values()] == memory


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_found(bad: float) -> None:
    state = {"a": torch.full((1000,), 3e38), "b": torch.zeros(2, 3), "empty": torch.zeros(0)}
    check_finite(state, step=3)  # though the sum of a is past float32
    state["b"][1, 2] = bad
    with pytest.raises(NumericError, match=r"^b is no longer finite after step 3, .* not saved"):
        check_finite(state, step=3)


def test_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),
            float(np.random.rand()),
            float(np.random.randn()),
            torch.rand(1).item(),
        ]

    draw()  # an odd number of Gaussian values, so that the other of each pair is kept
    path = tmp_path / "rank-00000.json"
    path.write_text(json.dumps(random_state(CPU)))
    drawn = draw()
    assert draw() != drawn
    load_random_state(path, device=CPU)
    assert draw() == drawn


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"python": [3, [1], null], "numpy": {"state": {"key": [1]}}, "torch": "AAAA"}',
    ],
)
def test_a_file_of_another_kind_is_broken(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.json"
    path.write_text(text)
    before = random.getstate()
    with pytest.raises(BrokenCheckpoint, match=r"rank-00000\.json: \w+Error: "):
        load_random_state(path, device=CPU)
    random.setstate(before)
