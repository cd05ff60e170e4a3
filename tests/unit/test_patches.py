"""The faults of torch and torchao that patches.py works around, without their patch and with it.

A test that fails after an upgrade because a fault no longer occurs says that its patch can go. The
patches are undone after each test, in tests/conftest.py. Of graphs: test_graph_passes.py.
"""

import inspect
import signal
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from sample_models import SMALL, on_meta, ready
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import partitioners
from torch._inductor import cpu_vec_isa
from torch._inductor.codegen import cpp_utils
from torch._inductor.scheduler import MixOrderReduction
from torch._inductor.virtualized import V
from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import float8_ops, fsdp_utils
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig

from torchtitan_lite import patches
from torchtitan_lite.config import ActivationCheckpointConfig
from torchtitan_lite.parallel.activation_checkpoint import apply_activation_checkpointing
from torchtitan_lite.parallel.tensor_parallel import apply_tensor_parallel

TORCH = tuple(map(int, version("torch").split(".")[:2]))
torch_213 = pytest.mark.skipif(TORCH < (2, 13), reason="seen with torch 2.13 only")
E4M3 = torch.float8_e4m3fn


def join_as(rank: int) -> None:
    """Make this process one rank of two, whose collectives do nothing."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)


@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_update_shards_lets_adam_change_the_shards_as_it_changes_dtensors(kind: str) -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func.__name__.startswith(("_fused_adamw_", "_foreach_lerp_")):
                seen.append(type(args[0][0]))
            return func(*args, **(kwargs or {}))

    join_as(0)
    mesh, results, seen = init_device_mesh("cpu", (2,)), [], []
    for patch in (lambda: None, patches.update_shards, patches.update_shards):
        patch()
        shards = [DTensor.from_local(torch.arange(4.0) + i, mesh, [Shard(0)]) for i in range(2)]
        weight = torch.nn.Parameter(shards[0])
        weight.grad = shards[1]
        with Seen():
            torch.optim.AdamW([weight], lr=0.1, **{kind: True}).step()
        results.append(weight.to_local())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert seen[-1] not in (DTensor, torch.nn.Parameter), seen


def test_ignore_vnni_and_amx() -> None:
    patches.ignore_vnni_and_amx()
    names = list(map(str, cpu_vec_isa.supported_vec_isa_list))
    assert {"avx512", "avx2"} <= set(names)
    assert not [name for name in names if "vnni" in name or "amx" in name]


@torch_213
def test_tag_compiler_cache_because_its_key_has_no_rank() -> None:
    keys = set()
    for rank in range(2):
        join_as(rank)
        mesh = init_device_mesh("cpu", (2,))
        weight = DTensor.from_local(torch.zeros(4, 4), mesh, [Shard(0)], run_check=False)
        keys.add(weight._stable_hash_for_caching())
    assert len(keys) == 1


def test_tag_compiler_cache_adds_a_tag_once() -> None:
    torch.compiler.config.cache_key_tag = ""
    for label in ("rank 1 of 2", "FLASH_ATTENTION", "rank 1 of 2", "rank 1 of 20"):
        patches.tag_compiler_cache(label)
    tag = torch.compiler.config.cache_key_tag
    assert tag == f"; {patches.VERSION}; rank 1 of 2; FLASH_ATTENTION; rank 1 of 20"


def compile_recomputed_block() -> None:
    """Compile a block of two ranks that recomputes all of its forward, without generating code."""
    model = on_meta(replace(SMALL, n_layers=1))
    apply_tensor_parallel(model, init_device_mesh("cpu", (2,)), loss_parallel=True)
    apply_activation_checkpointing(model, ActivationCheckpointConfig(mode="full"))
    ready(model)
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=lambda graph, example_inputs: make_boxed_func(graph),
        partition_fn=min_cut_rematerialization_partition,
    )
    model.layers["0"].compile(backend=backend, fullgraph=True)
    x = torch.randn(1, 8, 64, requires_grad=True)
    model.layers["0"](x, model.rope_cos, model.rope_sin, None).sum().backward()


@torch_213
def test_save_no_rng_state_of_a_recomputed_block() -> None:
    join_as(0)
    with pytest.raises(AssertionError, match="expected all tensors_saved"):
        compile_recomputed_block()
    patches.save_no_rng_state()
    compile_recomputed_block()


def test_name_mxfp8_scales_in_cpp() -> None:
    assert torch.float8_e8m0fnu not in cpp_utils.DTYPE_TO_CPP
    patches.name_mxfp8_scales_in_cpp()
    assert cpp_utils.DTYPE_TO_CPP[torch.float8_e8m0fnu] == "at::Float8_e8m0fnu"


def test_weigh_cudnn_attention() -> None:
    before = partitioners.get_default_op_list().compute_intensive_ops
    assert torch.ops.aten._scaled_dot_product_flash_attention in before
    for _ in range(2):
        patches.weigh_cudnn_attention()
    after = partitioners.get_default_op_list
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    assert after().compute_intensive_ops - before == {cudnn}
    assert not hasattr(after.__wrapped__, "__wrapped__")  # type: ignore[attr-defined]  # once


def test_fuse_norms_with_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    types = {"x": torch.bfloat16, "grad": torch.float32}
    monkeypatch.setattr(MixOrderReduction, "get_numel", lambda rows: 1000)
    monkeypatch.setattr(MixOrderReduction, "get_common_read", lambda rows, columns: list(types))
    graph: Any = SimpleNamespace(get_dtype=types.get)
    rows: Any = None
    with V.set_graph_handler(graph):
        assert MixOrderReduction.get_fusion_score(rows, rows) == 1000
        patches.fuse_norms_with_their_gradients()
        assert MixOrderReduction.get_fusion_score(rows, rows) == 6000


@torch_213
def test_count_no_memory_for_meshes() -> None:
    node = SimpleNamespace(meta={"val": FakeScriptObject(None, "mesh", None)})
    with pytest.raises(RuntimeError, match="size of"):
        partitioners._size_of(node)
    patches.count_no_memory_for_meshes()
    assert partitioners._size_of(node) == 0


def test_scale_gathered_weights_over_all_shards_and_not_over_fsdps_ranks(monkeypatch):
    meshes: list[Any] = []

    def cast(*args: Any, device_mesh: Any, **options: Any) -> Any:
        meshes.append(device_mesh)
        return SimpleNamespace(_data=None, _scale=None)

    monkeypatch.setattr(fsdp_utils, "hp_tensor_to_float8_dynamic", cast)
    options = LinearMMConfig(), E4M3
    weight = fsdp_utils.WeightWithDynamicFloat8CastTensor(torch.ones(2, 2), *options)
    fsdp: Any = "FSDP's mesh"
    weight.fsdp_pre_all_gather(fsdp)
    for mesh in ("all shards", "those of another model", None):
        patches.scale_gathered_weights_over(mesh)  # type: ignore[arg-type]
        weight.fsdp_pre_all_gather(fsdp)
    assert meshes == [fsdp, "all shards", "those of another model", fsdp]


def cast_to_float8(tensor: torch.Tensor) -> Any:
    return hp_tensor_to_float8_dynamic(tensor, E4M3, LinearMMConfig())


def test_gather_float8_as_bytes_because_gloo_gathers_no_float8_tensors() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    data = torch.ones(4).to(E4M3)
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        dist.all_gather_into_tensor(torch.empty_like(data), data)

    patches.gather_float8_as_bytes()
    sent: list[torch.dtype] = []

    def send(shard: torch.Tensor, *args: Any) -> torch.Tensor:
        sent.append(shard.dtype)
        return torch.cat([shard, shard])

    shard = cast_to_float8(torch.ones(2, 4))
    gather = float8_ops.FLOAT8_OPS_TABLE[torch.ops._c10d_functional.all_gather_into_tensor.default]
    gathered = gather(send, (shard, 2, "group"), {})
    assert sent == [torch.uint8] and gathered._data.dtype is E4M3
    assert torch.equal(gathered.to_original_precision(), torch.ones(4, 4))


def test_observe_float8_casts_until_the_context_ends() -> None:
    seen: list[tuple[torch.Tensor, Any]] = []
    x = torch.ones(2, 4)
    with patches.observe_float8_casts(lambda tensor, cast: seen.append((tensor, cast))):
        cast = cast_to_float8(x)
    cast_to_float8(x)
    assert len(seen) == 1 and seen[0][0] is x and seen[0][1] is cast


PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_allow_long_saves_of_a_stopped_run_for_as_long_as_the_variable_says(monkeypatch):
    assert "torch>=2.11," in PYPROJECT.read_text(), "remove allow_long_saves when torch 2.11 goes"
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "45")
    close = inspect.signature(PContext.close).parameters
    assert close["timeout"].default == 30
    if "shutdown_timeout" in LaunchConfig.__dataclass_fields__:
        assert LaunchConfig(1, 1, 1).shutdown_timeout == 45
        patches.allow_long_saves()
        assert inspect.signature(PContext.close).parameters == close

    # torch 2.11 has no such field.
    old = SimpleNamespace(__dataclass_fields__={})
    monkeypatch.setattr("torch.distributed.launcher.api.LaunchConfig", old)
    patches.allow_long_saves()
    assert inspect.signature(PContext.close).parameters["timeout"].default == 45


def test_spare_compilers_sends_a_signal_to_the_worker_alone(tmp_path):
    patches.spare_compilers()
    started = tmp_path / "started"
    code = f"sleep 60 & echo $! > {started}.new; mv {started}.new {started}; wait"
    worker = SubprocessHandler("bash", ("-c", code), {}, None, None, 0, None)
    wait_until(started.exists)
    compiler = Path(f"/proc/{int(started.read_text())}/stat")

    worker.close(signal.SIGTERM)
    assert worker.proc.wait(10) == -signal.SIGTERM
    assert compiler.read_text().split()[2] != "Z"
    worker.close(signal.SIGKILL)
    wait_until(lambda: not compiler.exists() or compiler.read_text().split()[2] == "Z")


def wait_until(done):
    for _ in range(200):
        if done():
            return
        time.sleep(0.05)
    raise TimeoutError
