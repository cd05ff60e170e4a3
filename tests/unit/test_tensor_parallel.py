"""The plan of a block follows what its linears are."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchao.float8.float8_tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)

from torchtitan_lite.config import Float8Config
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.float8.convert import convert_linears
from torchtitan_lite.float8.selection import select_linears
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.parallel.tensor_parallel import (
    _block_plan,
    apply_tensor_parallel,
    enable_async_tensor_parallel,
    float8_gathers,
)

ARGS = ModelArgs(
    dim=64, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=50, max_seq_len=16
)


def plan(float8: Float8Config | None) -> dict[str, type]:
    with torch.device("meta"):
        model = Transformer(ARGS)
    if float8 is not None:
        choices = select_linears(model, filter_fqns=float8.filter_fqns, tp_degree=2, tokens=64)
        convert_linears(model, choices, float8=float8, emulate=True)
    return {name: type(style) for name, style in _block_plan(model.layers["0"]).items()}


def test_without_float8_and_under_rowwise_activations_are_gathered_in_high_precision() -> None:
    for float8 in (None, Float8Config(recipe_name="rowwise")):
        styles = plan(float8)
        assert styles["attention"] is styles["feed_forward"] is PrepareModuleInput
        assert styles["attention.wq"] is styles["feed_forward.w3"] is ColwiseParallel
        assert styles["attention.wo"] is styles["feed_forward.w2"] is RowwiseParallel


def test_under_tensorwise_all_are_the_float8_styles() -> None:
    styles = plan(Float8Config())
    assert styles["attention"] is styles["feed_forward"] is PrepareFloat8ModuleInput
    assert {styles[f"attention.{name}"] for name in ("wq", "wk", "wv")} == {Float8ColwiseParallel}
    assert styles["attention.wo"] is styles["feed_forward.w2"] is Float8RowwiseParallel


def test_an_input_that_a_kept_linear_reads_too_is_gathered_in_high_precision() -> None:
    styles = plan(Float8Config(filter_fqns=("wk", "w2")))
    assert styles["attention"] is PrepareModuleInput
    assert (styles["attention.wk"], styles["attention.wq"]) == (
        ColwiseParallel,
        Float8ColwiseParallel,
    )
    assert styles["feed_forward"] is PrepareFloat8ModuleInput
    assert styles["feed_forward.w2"] is RowwiseParallel


def test_float8_gathers_are_those_of_parts_whose_readers_all_are_tensorwise() -> None:
    linears = [f"attention.{name}" for name in ("wq", "wk", "wv", "wo")] + [
        f"feed_forward.w{i}" for i in (1, 2, 3)
    ]
    names = {f"layers.{i}.{name}" for i in range(3) for name in linears}
    assert (
        float8_gathers(names) == 3 * 4
    )  # each part's input, and the gradient of each part's output
    assert float8_gathers(names | {"output"}) == 3 * 4 + 1
    assert float8_gathers(names - {"layers.1.attention.wk"}) == 3 * 4 - 1
    assert float8_gathers(names - {"layers.2.feed_forward.w2"}) == 3 * 4 - 1
    assert float8_gathers([]) == 0


def test_both_ends_split_the_vocabulary_alike_and_stay_tied() -> None:
    with torch.device("meta"):
        tied, untied = (Transformer(replace(ARGS, tie_embeddings=tie)) for tie in (True, False))
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    for model in (tied, untied):
        apply_tensor_parallel(model, mesh, loss_parallel=True)
    dist.destroy_process_group()
    embedding, output = untied.tok_embeddings.weight, untied.output.weight
    assert embedding is not output and embedding.placements == output.placements == (Shard(0),)
    assert embedding.to_local().shape == output.to_local().shape == (13, 64)  # of 50
    assert tied.output.weight is tied.tok_embeddings.weight
    assert tied.output.weight.placements == (Shard(0),)


def test_async_tensor_parallelism_is_refused_without_symmetric_memory() -> None:
    mesh = SimpleNamespace(
        device_type="cpu", get_group=lambda: SimpleNamespace(size=lambda: 2, group_name="tp")
    )
    with pytest.raises(
        ConfigError,
        match=r"enable_async_tensor_parallel = true needs symmetric memory .* 2 GPUs.*none on cpu",
    ):
        enable_async_tensor_parallel(mesh)
    assert not torch._inductor.config._micro_pipeline_tp


def test_async_tensor_parallelism_lets_the_compiler_fuse_over_the_group(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    group = SimpleNamespace(size=lambda: 2, group_name="tp")
    memory = torch.distributed._symmetric_memory
    met = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(memory, "empty", lambda *size, device: (size, device))
    monkeypatch.setattr(memory, "rendezvous", lambda probe, group: met.append((probe, group)))
    enabled = []
    monkeypatch.setattr(memory, "enable_symm_mem_for_group", enabled.append)
    with torch._inductor.config.patch(_micro_pipeline_tp=False):
        enable_async_tensor_parallel(SimpleNamespace(device_type="cuda", get_group=lambda: group))
        assert torch._inductor.config._micro_pipeline_tp
    assert met == [(((1,), torch.device("cuda", 0)), group)]
    assert enabled == ["tp"] and not recwarn
