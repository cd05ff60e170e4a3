"""The faults of torch and torchao that patches.py works around, without their patch and with it.

A test that fails after an upgrade because a fault no longer occurs says that its patch can go.
"""

import inspect
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import partitioners
from torch._inductor import config
from torch._inductor.codegen import cpp_utils
from torch._inductor.cpu_vec_isa import VecISA
from torch._inductor.scheduler import MixOrderReduction
from torch._inductor.virtualized import V
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchao.float8 import float8_ops, fsdp_utils
from torchao.float8.float8_training_tensor import LinearMMConfig

from torchtitan_lite import patches
from torchtitan_lite.config import ActivationCheckpointConfig
from torchtitan_lite.float8 import graph_passes
from torchtitan_lite.launch import Launch
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.parallel.activation_checkpoint import apply_activation_checkpointing
from torchtitan_lite.parallel.tensor_parallel import apply_tensor_parallel

TORCH = tuple(map(int, version("torch").split(".")[:2]))
torch_213 = pytest.mark.skipif(TORCH < (2, 13), reason="seen with torch 2.13 only")


@pytest.fixture
def as_rank() -> Iterator[Callable[[int], None]]:
    """Gives a function that makes this process one rank of two, whose collectives do nothing."""

    def join(rank: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)

    yield join
    dist.destroy_process_group()


PATCHED: list[tuple[Any, str]] = [
    (partitioners, "has_recomputable_rng_ops"),
    (partitioners, "get_default_op_list"),
    (VecISA, "check_build"),
    (MixOrderReduction, "get_fusion_score"),
]
ORIGINALS = [getattr(module, name) for module, name in PATCHED]
CPP_TYPES = dict(cpp_utils.DTYPE_TO_CPP)
"""As imported, before any test of this process applies a patch."""


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without patches, and undo afterwards what they change."""
    for (module, name), original in zip(PATCHED, ORIGINALS, strict=True):
        monkeypatch.setattr(module, name, original)
    monkeypatch.setattr(cpp_utils, "DTYPE_TO_CPP", dict(CPP_TYPES))


@torch_213
def test_the_key_of_the_compilers_cache_has_no_rank_unless_tagged(
    as_rank: Callable[[int], None],
) -> None:
    def key(rank: int) -> str:
        as_rank(rank)
        mesh = init_device_mesh("cpu", (2,))
        weight = DTensor.from_local(torch.zeros(4, 4), mesh, [Shard(0)], run_check=False)
        return weight._stable_hash_for_caching()

    assert key(0) == key(1)


def test_a_tag_of_the_compilers_cache_is_added_once() -> None:
    with torch.compiler.config.patch(cache_key_tag=""):
        for label in ("rank 1 of 2", "FLASH_ATTENTION", "rank 1 of 2", "rank 1 of 20"):
            patches.tag_compiler_cache(label)
        tag = torch.compiler.config.cache_key_tag
    assert tag == f"; {patches.VERSION}; rank 1 of 2; FLASH_ATTENTION; rank 1 of 20"


def compile_recomputed_block() -> None:
    """Compile a block of two ranks that recomputes all of its forward, without generating code."""
    args = ModelArgs(
        dim=64, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=48, max_seq_len=16
    )
    with torch.device("meta"):
        model = Transformer(args)
    apply_tensor_parallel(model, init_device_mesh("cpu", (2,)), loss_parallel=True)
    apply_activation_checkpointing(model, ActivationCheckpointConfig(mode="full"))
    model.to_empty(device="cpu")
    init_weights(model, seed=0)
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=lambda graph, example_inputs: make_boxed_func(graph),
        partition_fn=min_cut_rematerialization_partition,
    )
    model.layers["0"].compile(backend=backend, fullgraph=True)
    x = torch.randn(1, 8, 64, requires_grad=True)
    model.layers["0"](x, model.rope_cos, model.rope_sin, None).sum().backward()


@torch_213
def test_a_recomputed_block_saves_a_random_state_on_cpu_unless_patched(
    as_rank: Callable[[int], None],
) -> None:
    as_rank(0)
    with pytest.raises(AssertionError, match="expected all tensors_saved"):
        compile_recomputed_block()
    patches.save_no_rng_state()
    compile_recomputed_block()


def test_the_compiler_has_no_cpp_name_for_the_scales_of_mxfp8() -> None:
    assert "float8_e8m0fnu" not in inspect.getsource(cpp_utils)
    patches.name_mxfp8_scales_in_cpp()
    assert cpp_utils.DTYPE_TO_CPP[torch.float8_e8m0fnu] == "at::Float8_e8m0fnu"


def test_attention_by_cudnn_is_cheap_to_recompute_unless_patched() -> None:
    before = partitioners.get_default_op_list().compute_intensive_ops
    assert torch.ops.aten._scaled_dot_product_flash_attention in before
    for _ in range(2):
        patches.weigh_cudnn_attention()
    after = partitioners.get_default_op_list
    assert after().compute_intensive_ops - before == {
        torch.ops.aten._scaled_dot_product_cudnn_attention
    }
    assert not hasattr(after.__wrapped__, "__wrapped__")  # type: ignore[attr-defined]  # once


def test_a_norm_and_its_weight_gradient_are_rated_by_elements_unless_patched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
def test_a_mesh_has_no_size_under_a_memory_budget_unless_patched() -> None:
    from torch._library.fake_class_registry import FakeScriptObject

    node = SimpleNamespace(meta={"val": FakeScriptObject(None, "mesh", None)})
    with torch._functorch.config.patch(unsafe_treat_script_objects_as_zero_size=False):
        with pytest.raises(RuntimeError, match="size of"):
            partitioners._size_of(node)
        patches.count_no_memory_for_meshes()
        assert partitioners._size_of(node) == 0


def instruction_sets_built(setup: str) -> tuple[str, list[str]]:
    """The instruction set that the compiler takes in a new process, and those it builds for."""
    code = (
        "import json; from torch._inductor import cpu_vec_isa; from torchtitan_lite import patches;"
        "built = []; cpu_vec_isa.VecISA.check_build = lambda isa, code: "
        "not built.append(isa.build_arch_flags()); "
        f"{setup}; print(json.dumps([str(cpu_vec_isa.pick_vec_isa()), built]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    found, built = json.loads(result.stdout)
    return found, built


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="a CPU without AVX2"
)
def test_programs_are_built_for_instruction_sets_unless_patched() -> None:
    _, built = instruction_sets_built("pass")
    assert any("amx" not in flags for flags in built)
    found, built = instruction_sets_built("patches.trust_instruction_set()")
    assert found.split()[0] == torch.backends.cpu.get_cpu_capability().lower()
    assert all("amx" in flags for flags in built)


@pytest.mark.parametrize(("capability", "vec_isa_ok"), [("DEFAULT", None), (None, False)])
def test_an_instruction_set_that_pytorch_or_the_environment_excludes_is_not_trusted(
    capability: str | None, vec_isa_ok: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if capability is not None:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    check = VecISA.check_build
    with config.patch({"cpp.vec_isa_ok": vec_isa_ok}):
        patches.trust_instruction_set()
    assert VecISA.check_build is check


def test_a_transfer_between_stages_waits_as_long_as_when_its_group_was_made_unless_patched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups: dict[int, dist.ProcessGroupGloo] = {}
    store = dist.HashStore()

    def join(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    ranks = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    groups[0]._set_default_timeout(timedelta(milliseconds=50))

    received = torch.zeros(1)
    to_all = SimpleNamespace(_get_backend=lambda device: groups[0])
    op = SimpleNamespace(tensor=received, group=to_all)
    monkeypatch.setattr(
        schedules, "_batch_p2p", lambda ops, desc: [groups[0].recv([received], 1, 0)]
    )
    late = threading.Timer(1, lambda: groups[1].send([torch.ones(1)], 0, 0))
    late.start()
    schedules._wait_batch_p2p(schedules._batch_p2p([op], "fwd_recv"))
    assert received.item() == 1
    late.join()

    for _ in range(2):
        patches.time_out_transfers()
    with pytest.raises(RuntimeError, match="gloo.*Timed out waiting 50ms"):
        schedules._wait_batch_p2p(schedules._batch_p2p([op], "fwd_recv"))


X = torch.randn(32, 64).bfloat16()
ONE = torch.ones(())
WEIGHTS = [torch.randn(48, 64).to(torch.float8_e4m3fn).t() for _ in range(2)]


def multiply_twice(x: torch.Tensor) -> list[torch.Tensor]:
    cast = (x * 2).to(torch.float8_e4m3fn)
    return [
        torch._scaled_mm(cast, weight, ONE, ONE, out_dtype=torch.bfloat16) for weight in WEIGHTS
    ]


def compile_and_count() -> tuple[list[torch.Tensor], int]:
    """The compiled function's results, and how many elements it writes in float8."""
    written = []

    def count(nodes: list[Any]) -> list[Any]:
        outputs = [out.node for node in nodes if not node.is_extern() for out in node.get_outputs()]
        written.extend(
            int(out.get_numel()) for out in outputs if out.get_dtype() is torch.float8_e4m3fn
        )
        return nodes

    torch._dynamo.reset()
    with config.patch(force_disable_caches=True, _post_fusion_custom_pass=count):
        results = torch.compile(multiply_twice, fullgraph=True)(X)
    return results, sum(written)


def test_a_cast_is_computed_for_each_matmul_that_reads_it_unless_patched() -> None:
    expected = multiply_twice(X)
    with config.patch(post_grad_custom_post_pass=None):
        plain, written = compile_and_count()
        assert written == 2 * X.numel()
        graph_passes.add_passes(["post_grad_custom_post_pass"])
        shared, written = compile_and_count()
        assert written == X.numel()
    for results in (plain, shared):
        assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


class Linear(torch.autograd.Function):
    """A linear in float8 whose backward pass copies the weight to transpose it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return torch._scaled_mm(x.to(weight.dtype), weight.t(), ONE, ONE, out_dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        transposed = weight.t().contiguous().t()
        cast = grad.to(weight.dtype)
        return torch._scaled_mm(cast, transposed, ONE, ONE, out_dtype=torch.bfloat16), None


def compile_and_save() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The gradient of a compiled linear's input, and what it saved in float8 beside its weight."""
    x, weight = X.clone().requires_grad_(), WEIGHTS[0].t()
    saved = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is weight.dtype and tensor.data_ptr() != weight.data_ptr():
            saved.append(tensor)
        return tensor

    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            result = torch.compile(Linear.apply, fullgraph=True)(x, weight)
        result.sum().backward()
    assert x.grad is not None
    return x.grad, saved


def test_the_transpose_of_a_weight_in_float8_is_kept_unless_patched() -> None:
    with config.patch(joint_custom_post_pass=None):
        plain, saved = compile_and_save()
        assert [tensor.shape for tensor in saved] == [(48, 64)]
        graph_passes.add_passes(["joint_custom_post_pass"])
        patched, saved = compile_and_save()
        assert saved == []
    assert torch.equal(patched, plain)


class Scaled(torch.autograd.Function):
    """x [2, 16, 64] times its amax; the gradient is multiplied by the amax of x as [32, 64]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x.abs().max()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.view(-1, 64).abs().max()


def compile_and_reduce() -> tuple[torch.Tensor, int]:
    """The gradient of the compiled function, and how many reductions both passes compute."""
    x = X.view(2, 16, 64).clone().requires_grad_()
    reductions = []

    def note(nodes: list[Any]) -> list[Any]:
        reductions.extend(one for node in nodes for one in node.get_nodes() if one.is_reduction())
        return nodes

    torch._dynamo.reset()
    with config.patch(force_disable_caches=True, _post_fusion_custom_pass=note):
        torch.compile(Scaled.apply, fullgraph=True)(x).backward(torch.ones_like(x))
    assert x.grad is not None
    return x.grad, len(reductions)


def test_the_amax_of_an_input_is_computed_again_for_its_view_unless_patched() -> None:
    with config.patch(joint_custom_pre_pass=None):
        plain, reductions = compile_and_reduce()
        assert reductions == 2
        graph_passes.add_passes(["joint_custom_pre_pass"])
        patched, reductions = compile_and_reduce()
        assert reductions == 1
    assert torch.equal(patched, plain)


def test_the_amax_of_a_gathered_weight_is_taken_over_fsdps_ranks_unless_patched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Weight = fsdp_utils.WeightWithDynamicFloat8CastTensor
    monkeypatch.setattr(Weight, "fsdp_pre_all_gather", Weight.fsdp_pre_all_gather)
    meshes: list[Any] = []

    def cast(*args: Any, device_mesh: Any, **options: Any) -> Any:
        meshes.append(device_mesh)
        return SimpleNamespace(_data=None, _scale=None)

    monkeypatch.setattr(fsdp_utils, "hp_tensor_to_float8_dynamic", cast)
    weight = Weight(torch.ones(2, 2), LinearMMConfig(), torch.float8_e4m3fn)
    fsdp: Any = "FSDP's mesh"
    patches.scale_gathered_weights_over(None)  # other tests of this process may have patched it
    weight.fsdp_pre_all_gather(fsdp)
    for mesh in ("all shards", "those of another model"):
        patches.scale_gathered_weights_over(mesh)  # type: ignore[arg-type]
        weight.fsdp_pre_all_gather(fsdp)
    patches.scale_gathered_weights_over(None)
    weight.fsdp_pre_all_gather(fsdp)
    assert meshes == [fsdp, "all shards", "those of another model", fsdp]


def test_gloo_gathers_no_float8_tensors() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        data = torch.ones(4).to(torch.float8_e4m3fn)
        with pytest.raises(RuntimeError, match="Invalid scalar type"):
            dist.all_gather_into_tensor(torch.empty_like(data), data)
        dist.all_gather_into_tensor(torch.empty(4, dtype=torch.uint8), data.view(torch.uint8))
    finally:
        dist.destroy_process_group()


def test_float8_activations_are_gathered_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    table = dict(float8_ops.FLOAT8_OPS_TABLE)
    monkeypatch.setattr(float8_ops, "FLOAT8_OPS_TABLE", table)
    patches.gather_float8_as_bytes()
    op = torch.ops._c10d_functional.all_gather_into_tensor.default
    sent: list[torch.dtype] = []

    def send(shard: torch.Tensor, *args: Any) -> torch.Tensor:
        sent.append(shard.dtype)
        return torch.cat([shard, shard])

    shard = cast_to_float8(torch.ones(2, 4))
    gathered = table[op](send, (shard, 2, "group"), {})
    assert sent == [torch.uint8] and gathered._data.dtype is torch.float8_e4m3fn
    assert torch.equal(gathered.to_original_precision(), torch.ones(4, 4))


def multiply_exactly(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    **options: Any,
) -> torch.Tensor:
    """What `torch._scaled_mm` computes on a GPU: it rounds once, after scaling."""
    return (a.float() @ b.float() * scale_a * scale_b).to(out_dtype)


def scaled_by_torchao_and_in_matmul(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product without fast accumulation, unpatched and patched."""
    types = torch.float8_e4m3fn, torch.bfloat16

    def multiply() -> Any:
        operands = a.to(types[0]), a_scale, b.to(types[0]), b_scale
        return float8_ops.addmm_float8_unwrapped(*operands, types[1], use_fast_accum=False)

    plain = multiply()
    patches.scale_gradients_in_matmul()
    return plain, multiply()


@pytest.fixture
def scaled_mm(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Counts the calls of `torch._scaled_mm`, and computes without a GPU."""
    counter = Mock(side_effect=multiply_exactly)
    monkeypatch.setattr(torch, "_scaled_mm", counter)
    multiply = inspect.unwrap(float8_ops.addmm_float8_unwrapped)
    monkeypatch.setattr(float8_ops, "addmm_float8_unwrapped", multiply)
    return counter


def test_gradients_are_scaled_after_their_matmul_unless_patched(scaled_mm: Mock) -> None:
    m, n, k = 48, 32, 64
    a_scale, b_scale = (2.0 ** torch.randint(-30, 30, shape) for shape in ((m, 1), (1, n)))
    plain, patched = scaled_by_torchao_and_in_matmul(
        torch.randn(m, k) * 50, a_scale, torch.randn(k, n) * 50, b_scale
    )
    assert torch.equal(plain, patched)
    first, second = (call.kwargs | dict(enumerate(call.args)) for call in scaled_mm.call_args_list)
    assert first["scale_a"].shape == first["scale_b"].shape == ()
    assert (second[2].shape, second[3].shape) == ((m, 1), (1, n))

    # Fast accumulation, and a scale per tensor, stay torchao's.
    operands = torch.ones(16, 16), torch.full((16, 1), 2.0), torch.ones(16, 16)
    for b_scale, fast in ((torch.full((1, 16), 2.0), True), (torch.tensor(2.0), False)):
        out = float8_ops.addmm_float8_unwrapped(
            *operands, b_scale, torch.bfloat16, use_fast_accum=fast
        )
        assert scaled_mm.call_args.kwargs["use_fast_accum"] is fast
        assert out.unique().tolist() == [4.0]


def test_a_gradient_below_the_normal_numbers_of_bf16_is_rounded_once(
    scaled_mm: Mock,
) -> None:
    # Between 8 and 9 times the smallest number, 2^-133, a little above the middle: rounded to bf16
    # first, it is in the middle, and goes to the even one.
    a = torch.zeros(1, 16)
    a[0, :3] = torch.tensor([1, 2**-4, 2**-9])
    scale = torch.full((1, 1), 2.0**65)
    plain, patched = scaled_by_torchao_and_in_matmul(a, scale, torch.ones(16, 1), scale)
    assert (plain.item(), patched.item()) == (8 * 2.0**-133, 9 * 2.0**-133)


def cast_to_float8(tensor: torch.Tensor) -> Any:
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

    return hp_tensor_to_float8_dynamic(tensor, torch.float8_e4m3fn, LinearMMConfig())


def test_casts_to_float8_are_observed_until_the_context_ends() -> None:
    seen: list[tuple[torch.Tensor, Any]] = []
    x = torch.ones(2, 4)
    with patches.observe_float8_casts(lambda tensor, cast: seen.append((tensor, cast))):
        cast = cast_to_float8(x)
    cast_to_float8(x)
    assert len(seen) == 1 and seen[0][0] is x and seen[0][1] is cast


PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


class OldContext:
    """Workers as torch 2.11 closes them."""

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> int:
        return timeout


class OldConfig:
    """A launch config without a time-out for the end of the workers."""

    __dataclass_fields__: Mapping[str, object] = {}


def test_a_stopped_run_may_save_for_as_long_as_the_variable_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "torch>=2.11," in PYPROJECT.read_text(), "remove allow_long_saves when torch 2.11 goes"
    monkeypatch.setattr("torch.distributed.elastic.multiprocessing.PContext", OldContext)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "45")
    if "shutdown_timeout" in LaunchConfig.__dataclass_fields__:
        elastic = Launch({}, [], columns=0).elastic
        assert LaunchConfig(**elastic).shutdown_timeout == 45
        patches.allow_long_saves()
        assert OldContext().close() == 30

    monkeypatch.setattr("torch.distributed.launcher.api.LaunchConfig", OldConfig)
    patches.allow_long_saves()
    assert OldContext().close() == 45
