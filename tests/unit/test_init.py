"""Initial values: the counter-based generator against Python integers, their distribution, and
nothing left out."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.models import init
from torchtitan_lite.models.init import init_std, init_weights, truncated_normal
from torchtitan_lite.models.llama3 import Transformer

# ----- truncated_normal, init_weights, init_std -----

ARGS = ModelArgs(
    dim=64, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=40, max_seq_len=16
)
MASK = (1 << 64) - 1
TRUNCATED_STD = 0.98658
"""Of a normal truncated at 3: sqrt(1 - 2 * 3 phi(3) / (2 Phi(3) - 1))."""


def reference_uniform(index: int, key: int) -> float:
    """splitmix64 of key + index in Python's integers, its top 53 bits as a number within (0, 1)."""
    z = (index + key) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return ((z ^ z >> 31) >> 11) / 2**53 + 2**-54


def test_values_are_truncated_normals_of_splitmix64s_uniform_numbers() -> None:
    indices, key = [0, 1, 77, 2**31, 10**12], -(2**62) + 5
    values = truncated_normal(torch.tensor(indices), key=key, std=0.5)
    tail = 0.5 * (1 - math.erf(3 / math.sqrt(2)))
    for index, value in zip(indices, values.tolist(), strict=True):
        below = 0.5 * (1 + math.erf(value / 0.5 / math.sqrt(2)))  # share of an untruncated normal
        uniform = (below - tail) / (1 - 2 * tail)
        assert uniform == pytest.approx(reference_uniform(index, key), abs=1e-6)


def test_values_have_the_moments_and_bounds_of_the_truncated_normal() -> None:
    values = truncated_normal(torch.arange(1_000_000), key=3, std=2.0)
    assert 5.9 < values.abs().max() <= 6.0
    assert values.mean().abs() < 0.01
    assert values.std().item() == pytest.approx(2 * TRUNCATED_STD, rel=0.005)


def make_model(seed: int, *, tied: bool = False) -> Transformer:
    with torch.device("meta"):
        model = Transformer(replace(ARGS, tie_embeddings=tied))
    model.to_empty(device="cpu")
    init_weights(model, seed=seed)
    return model


def test_weights_depend_on_seed_and_name_only() -> None:
    one, same, other = make_model(0), make_model(0), make_model(1)
    for name, weight in one.named_parameters():
        assert torch.equal(weight, same.get_parameter(name))
        assert weight.ndim == 1 or not torch.equal(weight, other.get_parameter(name))
    feed_forward = one.layers["0"].feed_forward
    assert not torch.equal(feed_forward.w1.weight, feed_forward.w3.weight)
    assert torch.equal(one.norm.weight, torch.ones(64))


def test_a_part_of_a_weight_has_the_values_it_has_in_the_whole(monkeypatch):
    whole = make_model(0).output.weight
    monkeypatch.setattr(init, "CHUNK", 64 * 7)  # rows made 7 at a time
    assert torch.equal(make_model(0).output.weight, whole)


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("tok_embeddings.weight", 1.0),
        ("layers.2.attention.wq.weight", 0.02),
        ("layers.2.feed_forward.w1.weight", 0.02),
        ("layers.2.attention.wo.weight", 0.02 / math.sqrt(6)),
        ("layers.0.feed_forward.w2.weight", 0.02 / math.sqrt(2)),
        ("output.weight", 0.125),
    ],
)
def test_standard_deviations(name: str, std: float) -> None:
    assert init_std(name, ARGS) == pytest.approx(std)
    weight = make_model(0).get_parameter(name)
    assert weight.std().item() == pytest.approx(TRUNCATED_STD * std, rel=0.05)


def test_a_tied_matrix_has_the_embeddings_values_by_the_outputs_deviation() -> None:
    tied, untied = make_model(0, tied=True), make_model(0)
    torch.testing.assert_close(tied.output.weight, untied.tok_embeddings.weight / 8)
    assert torch.equal(tied.layers["1"].attention.wo.weight, untied.layers["1"].attention.wo.weight)


def test_a_shard_has_the_values_of_its_part_of_the_whole() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=10, world_size=12)
    mesh = init_device_mesh("cpu", (4, 3), mesh_dim_names=("dp_shard", "tp"))
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.empty(50, 5), mesh["tp"], [Shard(0)]))
    fully_shard(model, mesh=mesh["dp_shard"])
    init._fill(model.weight, key=7, std=1.0)
    whole = torch.empty(50, 5)
    init._fill(whole, key=7, std=1.0)
    part = whole.chunk(3)[1].chunk(4)[3]  # tensor parallelism splits first
    assert torch.equal(model.weight.to_local(), part)
