"""The time of a step: kernels and collectives against figures computed by hand, reference
implementations and published measurements; bytes counted by hand; and what float8 gains."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from pytest import approx
from sample_plans import B200, DEVICE, H100, RATES, linears_of, roofline_of, scheme_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig
from torchao.testing.training.roofline_utils import get_float8_mem_sympy

from torchtitan_lite.catalog.flavors import BLOCK_LINEARS, FLAVORS, OUTPUT, ModelArgs
from torchtitan_lite.catalog.recipes import RECIPES
from torchtitan_lite.float8.selection import LinearChoice
from torchtitan_lite.planner.constants import COMPILED, EAGER, Casts
from torchtitan_lite.planner.plan import find_device
from torchtitan_lite.planner.share import Share
from torchtitan_lite.planner.time import (
    CONTEXT,
    HOST,
    PIPELINE,
    SHARDING,
    TENSOR,
    Roofline,
    StepTime,
    time_step,
)
from torchtitan_lite.planner.workload import Gain

WQ, WK, WV, WO, W1, W3, W2 = BLOCK_LINEARS
LLAMA_8B, DEBUG = FLAVORS["8B"], replace(FLAVORS["debugmodel_gqa"], vocab_size=2256)
ARGS = ModelArgs(dim=1024, n_layers=4, n_heads=8, n_kv_heads=8, ffn_dim=4096, vocab_size=32000)
TOKENS = 8192
HIDDEN = TOKENS * 1024  # elements
LINEARS, NORMS = 4 * 1024**2 + 3 * 1024 * 4096, 2 * 1024  # parameters of a block
BLOCK, ENDS = LINEARS + NORMS, 2 * 32000 * 1024 + 1024
PARAMETERS = 4 * BLOCK + ENDS
SCHEMES = {"bf16": None} | {name: scheme_of(name) for name in RECIPES}
SCHEMES["gathered"] = scheme_of("tensorwise", gathered=True)

# Kernels and collectives start at once: they wait for links of 400 GB/s, for network adapters of
# 45 GB/s and for memory of 2 TB/s, unless they have no limit.
LINK, ADAPTER, MEMORY, START = 400e9, 45e9, 2e12, 3e-6
FREE = ("kernel_seconds", "hop_seconds", "host_seconds_per_block")
FREE_STARTS = replace(RATES, **dict.fromkeys(FREE, 0), in_training=1)
NO_NETWORK = replace(DEVICE, link_gb_s=1e30, network_gb_s=1e30)
NO_MEMORY = replace(DEVICE, bandwidth_tb_s=1e30)
M, N, K = 8192, 4096, 2048
KERNELS = roofline_of(M)
IN_BLOCKS = ("linears", "attention", "pointwise")


def one_linear(n: int, k: int) -> LinearChoice:
    return LinearChoice("x", ("x",), (n, k), (n, k))


# ----- move_s, gemm_s -----


def test_move_takes_the_bytes_and_a_launch():
    assert KERNELS.move_s(4e9) == approx(2e-3 + START)
    assert KERNELS.move_s(0) == 0


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        ((8192, 4096, 2048), {}, 2 * 8192 * 4096 * 2048 / 500e12),
        ((8192, 4096, 2048), {"fp8": True}, 2 * 8192 * 4096 * 2048 / 800e12),
        ((8192, 4096, 2048), {"slowdown": 1.5}, 1.5 * 2 * 8192 * 4096 * 2048 / 500e12),
        # Reading and writing 2 bytes an element, or reading 1, takes longer than to compute.
        ((8192, 8192, 16), {"slowdown": 1.5}, 2 * (2 * 8192 * 16 + 8192 * 8192) / MEMORY),
        ((8192, 8192, 16), {"fp8": True}, (2 * 8192 * 16 + 2 * 8192 * 8192) / MEMORY),
    ],
)
def test_gemm_takes_its_arithmetic_or_its_bytes(shape, options, expected):
    assert KERNELS.gemm_s(*shape, **options) == approx(expected + START, rel=1e-9)


# TFLOPS of single matmuls M x N x K, measured thermally settled on random data:
# Azure/AI-benchmarking-guide (float8 and A100), pytorch/pytorch#143465, pytorch/ao#2427 (B200),
# zzc0721/torch-performance-test-data#79 (bf16 on H100, short runs).
MEASURED_MATMULS = (
    ("H100 SXM", True, (16384, 16384, 16384), 1377),
    ("H100 SXM", True, (16384, 1280, 8192), 1239),
    ("H100 SXM", True, (16384, 8192, 1024), 1347),
    ("H100 SXM", True, (802816, 192, 768), 664),
    ("H100 SXM", False, (2048, 2048, 2048), 677),
    ("H100 SXM", False, (8192, 8192, 8192), 797),
    ("GB200", True, (8192, 8192, 8192), 2877),
    ("B200", False, (8192, 8192, 8192), 1420),
    ("A100 SXM 80GB", False, (8192, 8192, 8192), 254),
)


def test_gemm_beside_measured_matmuls():
    for device, fp8, shape, tflops in MEASURED_MATMULS:
        spec = find_device(device)
        seconds = roofline_of(M, device=spec).gemm_s(*shape, fp8=fp8)
        assert 2 * math.prod(shape) / seconds / 1e12 == approx(tflops, rel=0.15)


# ----- gather_s -----


@pytest.mark.parametrize(
    ("ranks", "stride", "gb_s"),
    [
        (8, 1, 400),
        (2, 4, 400),
        (16, 1, 8 * 45),  # 8 adapters, slower than the links
        (4, 4, 2 * 45),
        (4, 8, 45),
        (2, 16, 45),
    ],
)
def test_gather_sends_by_the_slowest_link_of_the_ring(ranks, stride, gb_s):
    seconds = ranks * 2e-6 + 1e9 * (ranks - 1) / ranks / (gb_s * 1e9)
    assert KERNELS.gather_s(1e9, ranks, stride) == approx(seconds)


def test_nothing_is_gathered_on_one_rank():
    assert KERNELS.gather_s(1e9, 1) == KERNELS.gather_s(0, 8) == 0


# NCCL's all-gathers of 8 H100 in a node, in GB/s of the algorithm: nccl#1047 and Azure.
def test_gather_beside_measured_collectives():
    assert 7 / roofline_of(M, device=H100).gather_s(8e9, 8) == approx(330, rel=0.1)


# ----- linear_s, linears_s -----


def test_a_linear_in_bf16_is_three_matmuls():
    linear = replace(one_linear(N, K), names=tuple("abcd"))
    matmuls = [KERNELS.gemm_s(*shape) for shape in ((M, N, K), (M, K, N), (N, K, M))]
    assert KERNELS.linears_s([linear, linear], []) == approx(8 * sum(matmuls))
    again = roofline_of(M, recomputed="ab").linear_s(linear, fp8=False)
    assert again == approx(4 * sum(matmuls) + 2 * matmuls[0])


def matmuls_s(recipe: str, at: Roofline) -> float:
    """Seconds of the matmuls of a recipe without casts: output, grad_input, grad_weight."""
    row, slow = (at.gemm_s(M, N, K, fp8=True, slowdown=by) for by in (1.125, 1.25))
    fast, last = at.gemm_s(M, N, K, fp8=True), at.gemm_s(M, N, K)
    output = fast if recipe == "tensorwise" else row
    return output + slow + (last if recipe == "rowwise_with_gw_hp" else slow)


@pytest.mark.parametrize("recipe", RECIPES)
def test_float8_casts_take_the_bytes_of_their_row(recipe, monkeypatch):
    monkeypatch.setitem(COMPILED, recipe, Casts((2, 3), grad_output=5, weight=7))
    sharded: dict[str, Any] = {"degrees": (1, 2, 1), "rates": FREE_STARTS}
    at = roofline_of(M, SCHEMES[recipe], **sharded)
    bytes_ = (2 + 3) * M * K + 5 * M * N + 7 * N * K
    alone = at.linear_s(one_linear(N, K), fp8=True)
    assert alone == approx(matmuls_s(recipe, at) + bytes_ / MEMORY)

    # wk and wv share the casts of their input with wq.
    shared = at.linear_s(replace(one_linear(N, K), kind=WK), fp8=True)
    assert alone - shared == approx(2 / 3 * (2 + 3) * M * K / MEMORY)

    # Weights that stay are cast once for all microbatches; those gathered in float8 never.
    four = {"training": {"global_batch_size": 4}}
    once = roofline_of(M, SCHEMES[recipe], rates=FREE_STARTS, **four)
    saved = alone - once.linear_s(one_linear(N, K), fp8=True)
    assert saved == approx((7 - 7 / 4) * N * K / MEMORY)
    if recipe == "tensorwise":
        gathered = roofline_of(M, SCHEMES["gathered"], **sharded)
        saved = alone - gathered.linear_s(one_linear(N, K), fp8=True)
        assert saved == approx(7 * N * K / MEMORY)


@pytest.mark.parametrize("recipe", sorted({*RECIPES} - {"blockwise"}))  # not in theirs
def test_float8_casts_move_about_as_many_bytes_as_torchaos_roofline_says(recipe):
    size = 16384
    device = replace(H100, bandwidth_tb_s=2.4)  # torchao's H100
    rates = replace(FREE_STARTS, contiguous=0.92)
    at = roofline_of(size, SCHEMES[recipe], device=device, rates=rates, degrees=(1, 2, 1))
    named = (None, "mxfp8_cublas_rceil") if recipe == "mxfp8" else (recipe, None)
    theirs = float(get_float8_mem_sympy(size, size, size, *named, False, "NVIDIA H100"))
    ours = at.move_s(size**2 * (sum(at.casts.input) + at.casts.grad_output + at.casts.weight))
    assert 0.9 < ours / theirs < 1.8  # kernels that transpose are slower


def test_casts_of_a_recipe_that_nobody_has_counted(monkeypatch):
    monkeypatch.delitem(COMPILED, "rowwise")
    assert roofline_of(M, SCHEMES["rowwise"]).casts == COMPILED["tensorwise"]
    assert roofline_of(M, SCHEMES["rowwise"], compiled=False).casts == EAGER
    assert roofline_of(M, SCHEMES["mxfp8"], compiled=False).casts == COMPILED["mxfp8"]


class TensorTraffic(TorchDispatchMode):
    """Counts the bytes of the tensors that kernels read and write."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten.detach.default:
            leaves = tree_leaves((args, result))
            self.bytes += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        return result


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_eager_casts_move_what_torchao_does(recipe):
    x, row = torch.randn(256, 1024).bfloat16(), recipe == "rowwise"
    with TensorTraffic() as traffic:
        hp_tensor_to_float8_dynamic(
            x,
            torch.float8_e4m3fn,
            LinearMMConfig(),
            scaling_granularity=ScalingGranularity["AXISWISE" if row else "TENSORWISE"],
            axiswise_dim=-1 if row else None,
            round_scales_to_power_of_2=row,
        )
    assert traffic.bytes / x.numel() == approx(EAGER.input[0], rel=0.01)


# ----- ratio, choose -----


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("flavor", "tp", "device"), [("8B", 8, H100), ("405B", 4, DEVICE)])
def test_choose_takes_the_linears_of_an_input_if_float8_is_faster_for_all(
    flavor, tp, device, recipe
):
    linears = linears_of(FLAVORS[flavor], tp=tp)
    roofline = roofline_of(M, SCHEMES[recipe], device=device)
    chosen = roofline.choose(linears)
    for kinds in ({WQ, WK, WV}, {WO}, {W1, W3}, {W2}):
        group = [each for each in linears if each.kind in kinds]
        fp8_s, bf16_s = (roofline.linears_s(group, converted) for converted in (group, []))
        assert [each in chosen for each in group] == [fp8_s < bf16_s] * len(group)


@pytest.mark.parametrize(
    ("args", "recipe", "device", "compiled", "least"),
    [
        *((DEBUG, recipe, H100, True, set()) for recipe in RECIPES),
        (LLAMA_8B, "tensorwise", H100, True, {W1, W3, W2}),
        (LLAMA_8B, "tensorwise", H100, False, set()),
        (LLAMA_8B, "mxfp8", B200, True, {W1, W3, W2}),
        (LLAMA_8B, "mxfp8", B200, False, {W1, W3, W2}),  # its casts are kernels anyway
    ],
)
def test_choose_takes_large_linears_if_casts_are_fused(args, recipe, device, compiled, least):
    roofline = roofline_of(M, SCHEMES[recipe], args, device=device, compiled=compiled)
    chosen = {linear.kind for linear in roofline.choose(linears_of(args))}
    assert chosen >= least and bool(chosen) == bool(least)


# Single linears, M, K, N with the milliseconds in bf16 and the speedup: pytorch/ao#2185, compiled,
# on an H100 of 500 W. Its gradient is the constant 1 of a sum, whose cast the compiler folds. Then
# two examples of torchao's float8 README.
PUBLISHED_LINEARS = (
    (16384, 8192, 1280, "rowwise", 1.954, 1.11),
    (16384, 1024, 8192, "rowwise", 1.701, 1.43),
    (16384, 8192, 7168, "rowwise", 9.871, 1.73),
    (16384, 3584, 8192, "rowwise", 5.192, 1.71),
    (4096, 8192, 16384, "tensorwise", None, 1.39),
    (1024, 2048, 1024, "tensorwise", None, 0.80),
)


def test_ratio_beside_published_linears(monkeypatch):
    monkeypatch.setitem(COMPILED, "rowwise", COMPILED["rowwise"]._replace(grad_output=0))
    device = find_device("H100 500W")
    for m, k, n, recipe, bf16_ms, speedup in PUBLISHED_LINEARS:
        linear, roofline = one_linear(n, k), roofline_of(m, SCHEMES[recipe], device=device)
        tolerance = 0.2 if speedup > 1 else 0.3
        assert 1 / roofline.ratio(linear) == approx(speedup, rel=tolerance)
        if bf16_ms:
            assert roofline.linears_s([linear], []) * 1e3 == approx(bf16_ms, rel=0.2)


# ----- attention_s, runs_attention_in, pointwise_s, loss_s -----


def small(**changes: Any) -> Roofline:
    return roofline_of(TOKENS, **{"args": ARGS, "rates": FREE_STARTS} | changes)


@pytest.mark.parametrize(
    ("kernel", "fraction", "cp", "bos_id"),
    [
        ("cudnn", 0.5, 1, None),
        ("flash", 0.25, 1, None),
        ("flex", 0.2, 1, 1),
        ("flash", 0.25, 8, None),
    ],
)
def test_attention_is_2_matmuls_forward_and_5_backward(kernel, fraction, cp, bos_id):
    at = small(args=replace(ARGS, document_bos_id=bos_id), cp=cp)
    # Half the square, in 4 blocks; checkpointing repeats the forward of 2.
    seconds = 8192 * 8192 * 1024 / 1000e12 / fraction / cp
    again = frozenset({"layers.0.attention", "layers.2.attention", "layers.2.attention.wq"})
    for recomputed, matmuls in ((frozenset(), 4 * 7), (again, 4 * 7 + 2 * 2)):
        roofline = replace(at, recomputed=recomputed)
        assert roofline.attention_s(kernel) == approx(matmuls * seconds)


def test_runs_attention_in_cudnn_where_that_is_the_fastest_but_no_mask_or_part():
    kernels = {"Ampere": "flash", "CDNA3": "flash", "Hopper": "cudnn", "Blackwell": "cudnn"}
    for architecture, kernel in kernels.items():
        device: Any = replace(DEVICE, architecture=architecture)
        masked = replace(ARGS, document_bos_id=1)
        assert small(device=device).runs_attention_in == kernel
        assert small(device=device, cp=2).runs_attention_in == "flash"
        assert small(device=device, args=masked).runs_attention_in == "flex"


@pytest.mark.parametrize("compiled", [True, False])
def test_pointwise_and_loss_move_what_was_counted(compiled):
    # Elements moved per token, by unit of dim, of queries and keys, and of ffn_dim.
    forward, backward = (
        (2 if compiled else 4) * TOKENS * 4 * (dim * 1024 + 2 * 2048 + ffn * 4096) / MEMORY
        for dim, ffn in ((9, 3), (12, 5))
    )
    for mode, option, again in ("none", "op", 0), ("selective", "2", 0.5), ("full", "op", 1):
        ac = {"mode": mode, "selective_ac_option": option}
        seconds = small(compiled=compiled, activation_checkpoint=ac).pointwise_s()
        assert seconds == approx((1 + again) * forward + backward)
    loss_s = (8 if compiled else 26) * TOKENS * 32000 / MEMORY
    assert small(compiled=compiled).loss_s() == approx(loss_s)


def test_tensor_parallelism_splits_everything_beside_the_linears():
    alone, split = (small(degrees=(1, 1, tp)) for tp in (1, 4))
    for part in ("attention_s", "pointwise_s", "loss_s"):
        assert getattr(split, part)() == approx(getattr(alone, part)() / 4)


# ----- StepTime, time_step -----


def roofline(
    recipe: str = "bf16",
    *,
    args: ModelArgs = ARGS,
    tokens: int = TOKENS,
    passes: int = 1,
    **settings: Any,
) -> Roofline:
    """Return a roofline with one sequence a pass, and `passes` of them on each rank in a step."""
    sequences = passes * math.prod(settings.get("degrees", (1, 1, 1))[:2])
    batch = {"training": {"local_batch_size": 1, "global_batch_size": sequences}}
    given = {"rates": FREE_STARTS} | batch | settings
    return roofline_of(tokens, SCHEMES[recipe], args, **given)


def time(recipe: str = "bf16", **settings: Any) -> StepTime:
    """Time a step in which all linears of the blocks train in float8 if there is a recipe."""
    at = roofline(recipe, **settings)
    linears = linears_of(at.job.model_args, tp=at.job.degrees.tp, output=True)
    return time_step(at, linears, linears[:7] if SCHEMES[recipe] else [])


def sharding_s(step: StepTime) -> float:
    """Seconds of all collectives of FSDP, hidden or not."""
    return step.hidden_s + step.waits_s[SHARDING]


@pytest.mark.parametrize("degrees", [(1, 1, 1), (2, 8, 4)])
def test_step_time_is_the_sum_of_its_parts(degrees):
    step = time("gathered", degrees=degrees)
    assert step.step_s == approx(sum(step.compute_s.values()) + sum(step.waits_s.values()))
    named = {*IN_BLOCKS, "output and loss", "weights and optimizer"}
    assert step.compute_s.keys() == named | {"beside communication"}
    assert all(step.compute_s[name] > 0 for name in named)
    assert (step.hidden_s == sum(step.waits_s.values()) == 0) == (degrees == (1, 1, 1))


def test_step_time_of_an_output_in_float8():
    at, (*linears, kept) = roofline("tensorwise"), linears_of(ARGS, output=True)
    output = replace(kept, kept_because="")
    assert output.kind == OUTPUT
    parts = time_step(at, [*linears, output], [*linears, output]).compute_s
    assert parts["output and loss"] == approx(at.linears_s([output], [output]) + at.loss_s())
    in_bf16 = time_step(at, [*linears, kept], linears).compute_s
    assert in_bf16["output and loss"] == approx(at.linears_s([output], []) + at.loss_s())
    assert in_bf16["linears"] == parts["linears"]


@pytest.mark.parametrize("degrees", [(1, 8, 1), (1, 2, 4)])
def test_step_time_in_bf16_does_not_depend_on_the_recipe(degrees):
    linears = linears_of(ARGS, tp=degrees[2], output=True)
    steps = [time_step(roofline(recipe, degrees=degrees), linears, []) for recipe in SCHEMES]
    assert [step for step in steps if step != steps[0]] == []


def test_step_time_of_kernels_that_are_slower_in_training():
    alone, slow = (time(rates=replace(FREE_STARTS, in_training=each)) for each in (1.0, 1.5))
    for name in (*IN_BLOCKS, "output and loss", "weights and optimizer"):
        assert slow.compute_s[name] == approx(1.5 * alone.compute_s[name])


def test_step_time_is_the_hosts_if_that_is_longer():
    step = time(rates=replace(FREE_STARTS, host_seconds_per_block=1), passes=3)
    assert step.step_s == 4 * (3 + 1)
    assert step.waits_s[HOST] == approx(16 - sum(step.compute_s.values()))
    assert step.compute_s == time(passes=3).compute_s


# ----- Collectives: FSDP, TENSOR, CONTEXT -----


def fsdp(reshard: str) -> dict[str, Any]:
    return {"degrees": (1, 8, 1), "parallelism": {"fsdp_reshard_after_forward": reshard}}


def mode(name: str, **settings: Any) -> dict[str, Any]:
    """Tensor parallelism over 8 ranks, with this mode of activation checkpointing."""
    given = {"degrees": (1, 1, 8), "device": NO_MEMORY, "activation_checkpoint": {"mode": name}}
    return given | settings


def context(device: Any, name: str = "none") -> dict[str, Any]:
    """8 ranks that share 131,072 tokens of 8B."""
    return mode(name, args=LLAMA_8B, tokens=131072, cp=8, degrees=(1, 1, 1), device=device)


EIGHT = 7 / 8 / LINK  # seconds a byte over 8 ranks
WEIGHTS, SUMS = 2 * PARAMETERS, 4 * PARAMETERS  # gradients are summed in float32
IN_BF16 = {"local_batch_size": 1, "mixed_precision_reduce": "bfloat16"}
KEYS_AND_VALUES = 2 * 131072 * 8 * 128 * 2  # bytes of whole sequences, of 8 heads of 128
COLLECTIVES: list[tuple[str, str, dict[str, Any], float]] = [
    # Weights are gathered for the forward and, unless they stay, for the backward pass.
    (SHARDING, "bf16", fsdp("never"), (WEIGHTS + SUMS) * EIGHT),
    (SHARDING, "bf16", fsdp("never") | {"passes": 3}, (WEIGHTS + SUMS) * EIGHT),
    (SHARDING, "bf16", fsdp("default"), (2 * WEIGHTS + SUMS) * EIGHT),
    (SHARDING, "gathered", fsdp("default"), (2 * (WEIGHTS - 4 * LINEARS) + SUMS) * EIGHT),
    (SHARDING, "bf16", fsdp("never") | {"training": IN_BF16}, (WEIGHTS + SUMS / 2) * EIGHT),
    # Replicas sum gradients twice over, or shards of them by one adapter of each node.
    (SHARDING, "gathered", {"degrees": (2, 1, 1)}, 2 * SUMS / 2 / LINK),
    (
        *(SHARDING, "bf16", {"degrees": (4, 8, 1)}),
        (2 * WEIGHTS + SUMS) * EIGHT + 2 * SUMS / 8 * 3 / 4 / ADAPTER,
    ),
    # Bytes an element that a block gathers and scatters in both passes, and again.
    (TENSOR, "bf16", mode("none"), HIDDEN * 4 * 16 * EIGHT),
    (TENSOR, "bf16", mode("selective"), HIDDEN * 4 * (16 + 4) * EIGHT),
    (TENSOR, "bf16", mode("full"), HIDDEN * 4 * (16 + 8) * EIGHT),
    (TENSOR, "rowwise", mode("selective"), HIDDEN * 4 * (16 + 4) * EIGHT),
    (TENSOR, "tensorwise", mode("none"), HIDDEN * 4 * 12 * EIGHT),
    (TENSOR, "tensorwise", mode("full"), HIDDEN * 4 * (12 + 6) * EIGHT),
    # What is scattered is copied, 2 bytes read and 2 written of each element, 4 times a block.
    (TENSOR, "bf16", {"degrees": (1, 1, 2), "device": NO_NETWORK}, HIDDEN * 4 * 4 * 4 / MEMORY),
    # Keys and values are gathered forward, recomputed and, as gradients, backward, with copies.
    (CONTEXT, "bf16", context(NO_MEMORY), 32 * 2 * KEYS_AND_VALUES * EIGHT),
    (CONTEXT, "bf16", context(NO_MEMORY, "full"), 32 * 3 * KEYS_AND_VALUES * EIGHT),
    (CONTEXT, "bf16", context(NO_NETWORK), 32 * 2 * 3 * KEYS_AND_VALUES / MEMORY),
]


@pytest.mark.parametrize(("kind", "recipe", "settings", "seconds"), COLLECTIVES)
def test_collectives_take_the_bytes_that_were_counted(kind, recipe, settings, seconds):
    step = time(recipe, **settings)
    found = sharding_s(step) if kind == SHARDING else step.waits_s[kind]
    assert found == approx(seconds)


def test_only_linears_in_float8_are_gathered_in_float8():
    def step(degrees: tuple[int, int, int], *kept: str) -> StepTime:
        at = roofline("gathered", degrees=degrees, device=NO_MEMORY)
        linears = linears_of(ARGS, tp=degrees[2], output=True)
        chosen = [each for each in linears[:7] if each.kind.split(".")[1] not in kept]
        return time_step(at, linears, chosen)

    # FSDP: a byte an element of w2, of 4 blocks twice.
    fsdp8, tp8 = (1, 8, 1), (1, 1, 8)
    saved = sharding_s(step(fsdp8, "w2")) - sharding_s(step(fsdp8))
    assert saved == approx(8 * 1024 * 4096 * EIGHT)

    # Tensor parallelism: a byte an element of an input that any linear reads in bf16.
    for kept, inputs in ((["w3"], 1), (["w1", "w3"], 1), (["wv", "wo"], 2)):
        saved = step(tp8, *kept).waits_s[TENSOR] - step(tp8).waits_s[TENSOR]
        assert saved == approx(4 * inputs * HIDDEN * EIGHT)


def test_sharding_is_waited_for_as_far_as_computation_does_not_hide_it():
    # The first gather waits for nothing, and nothing waits for the last reduction: a part of five,
    # of four blocks and the ends.
    fast = time(degrees=(1, 8, 1), device=replace(DEVICE, link_gb_s=5e4))
    assert fast.waits_s[SHARDING] == approx(sharding_s(fast) / 5)

    # On slow links computation hides as much as it takes, however long communication takes.
    for n in (1, 2):
        slow = time(degrees=(1, 8, 1), device=replace(DEVICE, link_gb_s=1 / n))
        hides = sum(slow.compute_s[part] for part in IN_BLOCKS)
        assert slow.hidden_s == approx(hides)
        assert slow.compute_s["beside communication"] == approx(hides / 8)


@pytest.mark.parametrize(
    ("recipe", "hidden"), [("bf16", 0.25), ("tensorwise", 0.25), ("rowwise", 0)]
)
def test_enable_async_tensor_parallel_hides_its_share(recipe, hidden):
    waited, overlapped = (
        time(recipe, **mode("none", parallelism={"enable_async_tensor_parallel": each}))
        for each in (False, True)
    )
    assert overlapped.waits_s[TENSOR] == approx((1 - hidden) * waited.waits_s[TENSOR])


# ----- Copies, the optimizer, and gradient accumulation -----

# Bytes a weight: FSDP reads and writes a gathered one, of 2 bytes or 1 in float8, beside 10 of its
# shard. A gradient is cast, from 2 bytes to 4; each other is added. AdamW moves 6 * 4 + 2 * 8 of a
# shard.
WHOLE, THREE_SUMMED = 4 + 10 / 8, 6 + 2 * 10
UPDATE = (6 * 4 + 2 * 8) / 8
EACH = {"degrees": (1, 8, 1), "parallelism": {"fsdp_reduce_gradients": "each"}}


@pytest.mark.parametrize(
    ("recipe", "settings", "passes", "nbytes"),
    [
        ("bf16", fsdp("never"), 1, WHOLE + 6 + UPDATE),
        ("bf16", fsdp("default"), 1, 2 * WHOLE + 6 + UPDATE),
        ("gathered", fsdp("never"), 1, WHOLE - 2 * 4 * LINEARS / PARAMETERS + 6 + UPDATE),
        ("bf16", fsdp("never"), 3, WHOLE + THREE_SUMMED + UPDATE),
        ("bf16", EACH, 3, 6 * WHOLE + 3 * 6 + UPDATE),
        ("bf16", {}, 3, 14 + THREE_SUMMED + 8 * UPDATE),
    ],
)
def test_copies_of_weights_and_gradients_and_the_update(recipe, settings, passes, nbytes):
    step = time(recipe, passes=passes, **settings)
    assert step.compute_s["weights and optimizer"] == approx(nbytes * PARAMETERS / MEMORY)


def test_muon_has_one_moment_of_matrices_and_ranks_share_its_iterations():
    muon = {"optimizer": {"name": "Muon"}}
    assert Share(roofline(**muon).job, ()).state_width == approx(8 - 4 * 4 * LINEARS / PARAMETERS)
    at = roofline()
    square = 3 * at.gemm_s(1024, 1024, 1024)
    wide = sum(at.gemm_s(*sizes) for sizes in ((1024, 1024, 4096), (1024,) * 3, (1024, 4096, 1024)))
    iterations = 5 * 4 * (4 * square + 3 * wide)
    assert time(**muon).compute_s["Newton-Schulz"] == approx(iterations)

    # Each of 8 ranks has 4 of 28 matrices at most, and sends 7/8 of its shards twice, in bfloat16.
    exchanges = 2 * 2 * 4 * LINEARS / 8 * 7 / 8 / LINK
    step = time(degrees=(1, 8, 1), **muon)
    assert step.compute_s["Newton-Schulz"] == approx(iterations * 4 / 28 + exchanges)


@pytest.mark.parametrize("reduced", ["last", "each"])
def test_gradient_accumulation_repeats_all_but_reductions_and_the_optimizer(reduced):
    once, thrice = (
        time(degrees=(1, 8, 1), passes=n, parallelism={"fsdp_reduce_gradients": reduced})
        for n in (1, 3)
    )
    for part in (*IN_BLOCKS, "output and loss"):
        assert thrice.compute_s[part] == approx(3 * once.compute_s[part])
    summed = 0 if reduced == "each" else SUMS * EIGHT
    assert sharding_s(thrice) == approx(3 * (sharding_s(once) - summed) + summed)


# ----- PIPELINE -----


def pipeline(schedule: str, pp: int, passes: int, **settings: Any) -> StepTime:
    tables = {"pipeline_parallel_degree": pp, "pipeline_parallel_schedule": schedule}
    tables["pipeline_parallel_microbatch_size"] = 1
    args = replace(ARGS, n_layers=16, vocab_size=1)  # so that all stages are equal
    batch = {"local_batch_size": passes, "global_batch_size": passes}
    ends = {"pipeline_parallel_first_stage_less_layers": 0}
    ends["pipeline_parallel_last_stage_less_layers"] = 0
    parallelism = {"parallelism": tables | ends, "training": batch}
    return time(args=args, degrees=(1, 1, 1), pp=pp, device=NO_NETWORK, **parallelism, **settings)


@pytest.mark.parametrize(
    ("schedule", "stages"), [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2)]
)
def test_a_pipeline_pauses_for_a_microbatch_of_each_other_rank(schedule, stages):
    ac = {"activation_checkpoint": {"mode": "none"}}
    step = pipeline(schedule, 4, 8, **ac)
    work = sum(step.compute_s[name] for name in IN_BLOCKS)  # of 8 microbatches
    assert step.waits_s[PIPELINE] == approx(3 / 8 * work / stages, rel=0.03)


def test_a_pipeline_takes_the_time_of_its_busiest_rank():
    alone, four = time(args=replace(ARGS, n_layers=16)), pipeline("1F1B", 4, 8)
    assert four.compute_s["linears"] == approx(8 * alone.compute_s["linears"] / 4)
    assert alone.waits_s[PIPELINE] == 0


# ----- Gain -----


@pytest.mark.parametrize(
    ("speedup", "effect"),
    [(1.25, "helps"), (1.05, "may help or hurt"), (0.95, "may help or hurt"), (0.5, "hurts")],
)
def test_verdict_claims_what_the_whole_range_says(speedup, effect):
    fast, slow = (StepTime({"linears": seconds}, {}, 0) for seconds in (1.0, speedup))
    gain = Gain("rowwise", slow, fast)
    low, high = gain.speedup_range
    assert low < speedup < high
    verdict = gain.verdict()
    assert verdict.startswith(f"rowwise float8 {effect}: ")
    assert f"{speedup:.2f}x the speed of bf16 ({low:.2f} to {high:.2f})" in verdict
    assert replace(gain, float8=slow).verdict().startswith("no linear is in float8")
