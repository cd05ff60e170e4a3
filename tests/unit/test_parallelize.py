"""How often the blocks of a model are compiled, and how the compiler is set up."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from sample_models import SMALL, on_meta, ready
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor
from torch._inductor.graph import GraphLowering
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_lite import patches
from torchtitan_lite.config import ActivationCheckpointConfig
from torchtitan_lite.parallel import parallelize
from torchtitan_lite.parallel.parallelize import compile_blocks, set_up_compiler
from torchtitan_lite.parallel.tensor_parallel import apply_tensor_parallel

# ----- compile_blocks, set_up_compiler -----


@pytest.mark.parametrize(
    "recipe", [None, "tensorwise", pytest.param("rowwise", marks=pytest.mark.slow)]
)
def test_blocks_that_are_equal_are_compiled_once_however_many_they_are(recipe: str | None) -> None:
    model = on_meta(replace(SMALL, n_layers=torch._dynamo.config.recompile_limit + 2), recipe)
    compile_blocks(model)
    ready(model)
    counter = CompileCounterWithBackend("aot_eager")
    with torch.compiler.set_stance("default", force_backend=counter):
        for _ in range(2):
            model(torch.zeros(2, 16, dtype=torch.long)).sum().backward()
    assert counter.frame_count == 1


def test_blocks_are_compiled_by_the_backend_and_once_more_for_another_shape(monkeypatch):
    model, backends, shapes = on_meta(replace(SMALL, n_layers=2)), set(), []

    def note(graph: Any, inputs: list[Any]) -> Any:
        shapes.append({type(size) for x in inputs for size in x.shape})
        return graph

    def compile(call: Any, *, backend: str, **options: Any) -> Any:
        backends.add(backend)
        return torch_compile(call, backend=note, **options)

    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", compile)
    compile_blocks(model, backend="aot_eager")
    ready(model)
    for shape in ((2, 16), (3, 8), (2, 16)):
        model(torch.zeros(shape, dtype=torch.long))
    assert (backends, shapes) == ({"aot_eager"}, [{int}, {int}])


class Generated(Exception):
    """Generated code, which is not compiled."""


def test_float8_scales_of_tensor_parallelism_share_an_all_reduce(monkeypatch):
    """Of 4 inputs and 7 weights, all weights and the first input are there from the start."""

    def stop(code: str) -> None:
        raise Generated(code)

    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(stop))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp_shard", "cp", "tp"))
    model = on_meta(replace(SMALL, n_layers=1), "tensorwise")
    set_up_compiler(mesh, ActivationCheckpointConfig(mode="none"))
    apply_tensor_parallel(model, mesh["tp"], loss_parallel=True)
    compile_blocks(model)
    model.to_empty(device="cpu")
    inductor.fx_graph_cache = False
    with torch.no_grad(), pytest.raises(Exception, match="all_reduce") as raised:
        model(torch.zeros(2, 16, dtype=torch.long))
    assert str(raised.value).count("_c10d_functional.all_reduce_.default(") == 4


def set_up(
    monkeypatch: pytest.MonkeyPatch, *, device: str, cp: int = 1, tp: int = 1, **checkpointing: Any
) -> tuple[set[str], float]:
    """The patches that are applied for rank 2 of 4, and the compiler's memory budget."""
    applied = Mock(spec=patches)
    monkeypatch.setattr(parallelize, "patches", applied)
    mesh: Any = type("Mesh", (dict,), {"device_type": device})(
        cp=SimpleNamespace(size=lambda: cp), tp=SimpleNamespace(size=lambda: tp)
    )
    mesh.get_rank, mesh.size = lambda: 2, lambda: 4
    torch._functorch.config.activation_memory_budget = 0.7
    set_up_compiler(mesh, ActivationCheckpointConfig(**checkpointing))
    names = {" ".join([name, *labels]) for name, labels, _ in applied.method_calls}
    return names, torch._functorch.config.activation_memory_budget


def test_the_compiler_is_patched_where_it_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"fuse_norms_with_their_gradients", "store_transposes_in_tiles"}
    assert set_up(monkeypatch, device="cuda") == (gpu, 1.0)
    for split in ({"cp": 2}, {"tp": 2}):
        tagged = gpu | {"tag_compiler_cache rank 2 of 4"}
        assert set_up(monkeypatch, device="cuda", **split)[0] == tagged
    for capability, trusted in (("DEFAULT", None), ("AVX2", True)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda of=capability: of)
        cpu = {"save_no_rng_state", "name_mxfp8_scales_in_cpp"}
        ignored = {"ignore_vnni_and_amx"} if trusted else set()
        assert set_up(monkeypatch, device="cpu")[0] == cpu | ignored
        assert inductor.cpp.vec_isa_ok is trusted
    budget = {"weigh_cudnn_attention", "count_no_memory_for_meshes"}
    found = set_up(monkeypatch, device="cuda", mode="memory_budget", memory_budget=0.3)
    assert found == (gpu | budget, 0.3)
