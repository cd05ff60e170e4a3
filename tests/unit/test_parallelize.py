"""How often the blocks of a model are compiled, and how the compiler is set up."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from torchtitan_lite import patches
from torchtitan_lite.config import ActivationCheckpointConfig, Float8Config
from torchtitan_lite.float8.convert import convert_linears
from torchtitan_lite.float8.selection import select_linears
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.parallel.parallelize import compile_blocks, set_up_compiler

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


def set_up(
    monkeypatch: pytest.MonkeyPatch, *, device: str, tp: int = 1, **checkpointing: Any
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
    ):
        monkeypatch.setattr(
            patches, name, lambda *label, name=name: applied.add(" ".join([name, *label]))
        )
    mesh: Any = type("Mesh", (dict,), {"device_type": device})(tp=SimpleNamespace(size=lambda: tp))
    mesh.get_rank, mesh.size = lambda: 2, lambda: 4
    with torch._functorch.config.patch(activation_memory_budget=0.7):
        set_up_compiler(mesh, ActivationCheckpointConfig(**checkpointing))
        return applied, torch._functorch.config.activation_memory_budget


def test_the_compiler_is_patched_where_it_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set_up(monkeypatch, device="cuda") == (set(), 1.0)
    assert set_up(monkeypatch, device="cuda", tp=2)[0] == {"tag_compiler_cache rank 2 of 4"}
    cpu = {"save_no_rng_state", "name_mxfp8_scales_in_cpp", "trust_instruction_set"}
    assert set_up(monkeypatch, device="cpu")[0] == cpu
    budget = {"weigh_cudnn_attention", "count_no_memory_for_meshes"}
    assert set_up(monkeypatch, device="cuda", mode="memory_budget", memory_budget=0.3) == (
        budget,
        0.3,
    )
