"""A run's state by name, without torchao's wrapper."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchao.float8.config import Float8LinearConfig
from torchao.float8.float8_training_tensor import LinearMMConfig
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from torchtitan_lite.base.errors import NumericError
from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.checkpoint.manifest import TensorEntry
from torchtitan_lite.checkpoint.state import (
    check_finite,
    entries,
    model_state,
    training_state,
)
from torchtitan_lite.models.llama3 import Transformer


@pytest.fixture
def sharded():
    """Ones of [4, 2], on the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])


def build() -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, bias=False))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


# ----- model_state, training_state, entries -----


def test_names_shapes_and_types():
    model, optimizer = build()
    weights = {
        "model.0.weight": TensorEntry("float32", (2, 3)),
        "model.0.bias": TensorEntry("float32", (2,)),
        "model.1.weight": TensorEntry("float32", (1, 2)),
    }
    assert entries(model_state(model)) == weights
    moments = {
        f"{name.replace('model', 'optimizer')}.{kind}": entry
        for name, entry in weights.items()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    steps = {f"optimizer.{name}.step" for name in ("0.weight", "0.bias", "1.weight")}
    expected = weights | moments | dict.fromkeys(steps, TensorEntry("float32", ()))
    assert entries(training_state(model, optimizer)) == expected


def test_reading_the_state_changes_nothing():
    model, optimizer = build()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    state = training_state(model, optimizer)
    assert not any(state[name].any() for name in state if name.startswith("optimizer."))
    assert all(map(torch.equal, model.parameters(), before))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_state_shares_memory_with_the_run():
    model, optimizer = build()
    for tensor in training_state(model, optimizer).values():
        tensor.fill_(7.0)
    kept = [tensor for each in optimizer.state.values() for tensor in each.values()]
    assert all((tensor == 7).all() for tensor in (*model.parameters(), *kept))


def test_a_tied_weight_has_one_name_and_one_optimizer_state():
    args = ModelArgs(dim=8, n_layers=1, n_heads=1, n_kv_heads=1, ffn_dim=8, vocab_size=4)
    model = Transformer(replace(args, tie_embeddings=True))
    state = training_state(model, torch.optim.AdamW(model.parameters(), fused=True))
    assert len(state) == (9 + 2) * 4
    ends = {name for name in state if "output" in name or "tok_embeddings" in name}
    moments = {f"optimizer.tok_embeddings.weight.{n}" for n in ("step", "exp_avg", "exp_avg_sq")}
    assert ends == {"model.tok_embeddings.weight", *moments}
    state["model.tok_embeddings.weight"].fill_(7.0)
    assert (model.output.weight == 7).all()


def test_a_wrapped_weight_is_saved_plain_and_shared(sharded):
    inner, dtype = torch.ones(4, 2), Float8LinearConfig().cast_config_weight.target_dtype
    wrapped = WeightWithDynamicFloat8CastTensor(inner, LinearMMConfig(), dtype)
    model = nn.Module()
    model.weight = nn.Parameter(DTensor(wrapped, sharded._spec, requires_grad=False))
    state = model_state(model)["model.weight"]
    assert isinstance(state, DTensor) and state.shape == (4, 2)
    assert type(state.to_local()) is torch.Tensor
    state.to_local().fill_(3.0)
    assert (inner == 3).all()


# ----- check_finite -----
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_found(bad):
    state = {"a": torch.full((1000,), 3e38), "b": torch.zeros(2, 3), "empty": torch.zeros(0)}
    check_finite(state, step=3)  # though the sum of a is past float32
    state["b"][1, 2] = bad
    with pytest.raises(NumericError, match=r"^b is no longer finite after step 3, .* not saved"):
        check_finite(state, step=3)
