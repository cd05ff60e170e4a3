"""How often the blocks of a model are compiled, and how the compiler is set up."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor
from torch._inductor.graph import GraphLowering
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_lite import patches
from torchtitan_lite.config import ActivationCheckpointConfig, Float8Config
from torchtitan_lite.float8.convert import convert_linears
from torchtitan_lite.float8.selection import select_linears
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.parallel.parallelize import compile_blocks, set_up_compiler
from torchtitan_lite.parallel.tensor_parallel import apply_tensor_parallel

ARGS = ModelArgs(
    dim=32, n_layers=6, n_heads=2, n_kv_heads=1, ffn_dim=48, vocab_size=48, max_seq_len=16
)


def frames(n_layers: int, *, recipe: str | None) -> int:
    """How often the compiler was called in two steps of a model of that many layers, set up to be
    compiled."""
    with torch.device("meta"):
        model = Transformer(replace(ARGS, n_layers=n_layers))
    if recipe is not None:
        choices = select_linears(model, filter_fqns=(), tp_degree=1, tokens=32)
        convert_linears(model, choices, float8=Float8Config(recipe_name=recipe), emulate=True)
    compile_blocks(model)
    model.to_empty(device="cpu")
    init_weights(model, seed=0, buffer_device=torch.device("cpu"))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    with torch.compiler.set_stance("default", force_backend=counter):
        for _ in range(2):
            model(torch.zeros(2, 16, dtype=torch.long)).sum().backward()
    return counter.frame_count


@pytest.mark.parametrize("recipe", [None, "tensorwise", "rowwise"])
def test_blocks_that_are_equal_are_compiled_once_however_many_they_are(recipe: str | None) -> None:
    assert frames(6, recipe=recipe) == 1
    assert frames(32, recipe=recipe) == 1


class Generated(Exception):
    """Generated code, which is not compiled."""


def test_float8_scales_of_tensor_parallelism_share_an_all_reduce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 4 inputs and 7 weights, all weights and the first input are there from the start."""

    def stop(code: str) -> None:
        raise Generated(code)

    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(stop))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp_shard", "cp", "tp"))
        with torch.device("meta"):
            model = Transformer(replace(ARGS, n_layers=1, n_kv_heads=2, ffn_dim=64))
        choices = select_linears(model, filter_fqns=("output",), tp_degree=2, tokens=32)
        convert_linears(model, choices, float8=Float8Config(), emulate=True)
        with inductor.patch(bucket_all_reduces_fx="none", fx_graph_cache=False):
            set_up_compiler(mesh, ActivationCheckpointConfig(mode="none"))
            apply_tensor_parallel(model, mesh["tp"], loss_parallel=True)
            compile_blocks(model)
            model.to_empty(device="cpu")
            with pytest.raises(Exception, match="all_reduce") as raised:
                model(torch.zeros(2, 16, dtype=torch.long))
    finally:
        dist.destroy_process_group()
    assert str(raised.value).count("_c10d_functional.all_reduce_.default(") == 4


def set_up(
    monkeypatch: pytest.MonkeyPatch,
    *,
    device: str,
    cp: int = 1,
    tp: int = 1,
    **checkpointing: Any,
) -> tuple[set[str], float]:
    """The patches that are applied for rank 2 of 4, and the compiler's memory budget."""
    applied = set()
    for name in (
        "tag_compiler_cache",
        "save_no_rng_state",
        "name_mxfp8_scales_in_cpp",
        "trust_instruction_set",
        "weigh_cudnn_attention",
        "count_no_memory_for_meshes",
        "fuse_norms_with_their_gradients",
        "store_transposes_in_tiles",
    ):
        monkeypatch.setattr(
            patches, name, lambda *label, name=name: applied.add(" ".join([name, *label]))
        )
    mesh: Any = type("Mesh", (dict,), {"device_type": device})(
        cp=SimpleNamespace(size=lambda: cp), tp=SimpleNamespace(size=lambda: tp)
    )
    mesh.get_rank, mesh.size = lambda: 2, lambda: 4
    with torch._functorch.config.patch(activation_memory_budget=0.7):
        set_up_compiler(mesh, ActivationCheckpointConfig(**checkpointing))
        return applied, torch._functorch.config.activation_memory_budget


def test_the_compiler_is_patched_where_it_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"fuse_norms_with_their_gradients", "store_transposes_in_tiles"}
    assert set_up(monkeypatch, device="cuda") == (gpu, 1.0)
    for split in ({"cp": 2}, {"tp": 2}):
        tagged = gpu | {"tag_compiler_cache rank 2 of 4"}
        assert set_up(monkeypatch, device="cuda", **split)[0] == tagged
    cpu = {"save_no_rng_state", "name_mxfp8_scales_in_cpp", "trust_instruction_set"}
    assert set_up(monkeypatch, device="cpu")[0] == cpu
    budget = {"weigh_cudnn_attention", "count_no_memory_for_meshes"}
    assert set_up(monkeypatch, device="cuda", mode="memory_budget", memory_budget=0.3) == (
        gpu | budget,
        0.3,
    )
