"""That the blocks of a model are compiled, how often, and for which instruction set."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch import partitioners
from torch._inductor import config
from torch._inductor.cpu_vec_isa import VecISA

from torchtitan_lite.config import ActivationCheckpointConfig, CompileConfig, Float8Config
from torchtitan_lite.float8.convert import convert_linears
from torchtitan_lite.float8.selection import select_linears
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.parallel.parallelize import (
    apply_compile,
    trust_instruction_set,
    weigh_cudnn_attention,
)

ARGS = ModelArgs(
    dim=32, n_layers=6, n_heads=2, n_kv_heads=1, ffn_dim=48, vocab_size=48, max_seq_len=16
)
MESH: Any = type("Mesh", (dict,), {"device_type": "cuda"})(tp=SimpleNamespace(size=lambda: 1))
"""Of one rank; on a device for which the compiler is left as it is."""


def frames(n_layers: int, *, recipe: str | None) -> int:
    """How often the compiler was called in two steps of a model of that many layers, set up to be
    compiled."""
    with torch.device("meta"):
        model = Transformer(replace(ARGS, n_layers=n_layers))
    if recipe is not None:
        choices = select_linears(model, filter_fqns=(), tp_degree=1, tokens=32)
        convert_linears(model, choices, float8=Float8Config(recipe_name=recipe), emulate=True)
    apply_compile(model, MESH, CompileConfig(enable=True), ActivationCheckpointConfig(mode="none"))
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


def test_a_memory_budget_counts_cudnns_attention_as_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioners, "get_default_op_list", partitioners.get_default_op_list)
    before = partitioners.get_default_op_list()
    weigh_cudnn_attention()
    after = partitioners.get_default_op_list()
    assert after.compute_intensive_ops - before.compute_intensive_ops == {
        torch.ops.aten._scaled_dot_product_cudnn_attention
    }


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="a CPU without AVX2"
)
def test_the_best_instruction_set_is_used_without_a_program_for_each() -> None:
    code = (
        "from torch._inductor import cpu_vec_isa; "
        "from torchtitan_lite.parallel.parallelize import trust_instruction_set; "
        "build = cpu_vec_isa.VecISA.check_build; built = []; cpu_vec_isa.VecISA.check_build = "
        "lambda isa, code: built.append(isa.build_arch_flags()) or build(isa, code); "
        "trust_instruction_set(); print(cpu_vec_isa.pick_vec_isa()); print(all('amx' in flags for flags in built))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    found, only_amx = result.stdout.splitlines()
    assert (
        found.split()[0] == torch.backends.cpu.get_cpu_capability().lower() and only_amx == "True"
    )


def test_an_instruction_set_that_pytorch_does_not_use_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    check = VecISA.check_build
    with config.patch({"cpp.vec_isa_ok": None}):
        trust_instruction_set()
    assert VecISA.check_build is check


def test_what_the_environment_says_of_instruction_sets_stays() -> None:
    check = VecISA.check_build
    with config.patch({"cpp.vec_isa_ok": False}):
        trust_instruction_set()
    assert VecISA.check_build is check
