"""That the blocks of a model are compiled, how often, and for which instruction set."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config, cpu_vec_isa
from torch._inductor.cpu_vec_isa import VecISA

from torchtitan_lite.config import ActivationCheckpointConfig, CompileConfig, Float8Config
from torchtitan_lite.float8.convert import convert_linears
from torchtitan_lite.float8.selection import select_linears
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.parallel.parallelize import apply_compile, trust_instruction_set

ARGS = ModelArgs(dim=32, n_layers=6, n_heads=2, n_kv_heads=1, ffn_dim=48, vocab_size=48, max_seq_len=16)
MESH: Any = type("Mesh", (dict,), {"device_type": "cuda"})(tp=SimpleNamespace(size=lambda: 1))
"""Of one rank; on a device for which the compiler is left as it is."""


def frames(n_layers: int, *, recipe: str | None) -> int:
    """How often the compiler was called in two steps of a model of that many layers, set up to be compiled."""
    with torch.device("meta"):
        model = Transformer(replace(ARGS, n_layers=n_layers))
    if recipe is not None:
        choices = select_linears(model, filter_fqns=(), sharded_dims={}, tp_degree=1, tokens=32)
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


def build_no_program(isa: VecISA, code: str) -> bool:
    raise AssertionError(f"a program was built for {isa}")


def forget_what_was_tried() -> None:
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    VecISA._VecISA__bool__impl.cache_clear()


@pytest.fixture
def undecided() -> Iterator[None]:
    """The compiler knows of no instruction set whether it can be used."""
    with config.patch({"cpp.vec_isa_ok": None}):
        forget_what_was_tried()
        yield
    forget_what_was_tried()


@pytest.mark.skipif(not cpu_vec_isa.x86_isa_checker(), reason="a CPU without AVX")
def test_the_best_instruction_set_is_used_without_a_program_for_each(
    undecided: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = cpu_vec_isa.pick_vec_isa()  # by such programs
    forget_what_was_tried()
    monkeypatch.setattr(VecISA, "check_build", build_no_program)
    trust_instruction_set()
    assert expected and cpu_vec_isa.pick_vec_isa() == expected


@pytest.mark.skipif(not cpu_vec_isa.x86_isa_checker(), reason="a CPU without AVX")
@pytest.mark.parametrize(
    ("target", "name", "value"),
    [(VecISA, "build_arch_flags", "-mno-such-set"), (torch.backends.cpu, "get_cpu_capability", "NO SUCH SET")],
    ids=["the C++ compiler knows it", "PyTorch uses it"],
)
def test_instruction_sets_are_tried_unless(
    target: Any, name: str, value: str, undecided: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, name, lambda *isa: value)
    trust_instruction_set()
    tried: list[VecISA] = []
    monkeypatch.setattr(VecISA, "check_build", lambda isa, code: tried.append(isa))
    assert not cpu_vec_isa.pick_vec_isa() and tried


def test_what_the_environment_says_of_instruction_sets_stays() -> None:
    with config.patch({"cpp.vec_isa_ok": False}):
        trust_instruction_set()
        assert config.cpp.vec_isa_ok is False
