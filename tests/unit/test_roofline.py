"""The roofline: kernels and collectives against figures computed by hand, reference implementations
and published measurements."""

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
from torchtitan_lite.planner.casts import COMPILED, EAGER, Casts, Traffic
from torchtitan_lite.planner.constants import rates_of
from torchtitan_lite.planner.plan import find_device
from torchtitan_lite.planner.roofline import Roofline

WQ, WK, WV, WO, W1, W3, W2 = BLOCK_LINEARS
LLAMA_8B, DEBUG = FLAVORS["8B"], replace(FLAVORS["debugmodel_gqa"], vocab_size=2256)
SMALL = ModelArgs(dim=1024, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=4096, vocab_size=32000)
SCHEMES = {name: scheme_of(name) for name in RECIPES}
GATHERED = scheme_of("tensorwise", gathered=True)
KERNELS = roofline_of(8192)
FREE_STARTS = replace(RATES, kernel_seconds=0)
MEMORY, MATMUL_S = 2e12, 3e-6  # bytes a second; seconds of a matmul beside its arithmetic
M, N, K = 8192, 4096, 2048
SHARDED: dict[str, Any] = {"degrees": (1, 2, 1)}


def one_linear(n: int, k: int) -> LinearChoice:
    return LinearChoice("x", ("x",), (n, k), (n, k))


def small(**changes: Any) -> Roofline:
    return roofline_of(8192, **{"args": SMALL, "rates": FREE_STARTS} | changes)


# ----- move_s, gemm_s -----


def test_move_takes_the_bytes_and_the_launches():
    assert KERNELS.move_s(4e9, 3) == approx(2e-3 + 3 * 2e-6)


def waves(count: int, inner: float) -> float:
    """Seconds of some waves of bf16 tiles of 128 x 128, at 5 TFLOPS in a multiprocessor."""
    return count * 2 * 128 * 128 * inner / 5e12


def moved(nbytes: float) -> float:
    return nbytes / MEMORY


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        # 10 x 10 tiles are one wave on 100 multiprocessors; one row or column more are two.
        ((1280, 1280, 4096), {}, waves(1, 4096)),
        ((1281, 1280, 512), {}, waves(2, 512)),
        ((1280, 1281, 512), {}, waves(2, 512)),
        ((12800, 12801, 512), {}, waves(101, 512)),
        # Reading and writing 2 bytes an element, or reading 1, takes longer than to compute.
        ((8192, 8192, 16), {}, moved(2 * (2 * 8192 * 16 + 8192 * 8192))),
        ((8192, 8192, 16), {"slowdown": 1.5}, moved(2 * (2 * 8192 * 16 + 8192 * 8192))),
        ((8192, 8192, 16), {"fp8": True}, moved(2 * 8192 * 16 + 2 * 8192 * 8192)),
        # In fp8 a multiprocessor has 8 TFLOPS; a slowdown lengthens the arithmetic.
        ((12800, 12800, 4096), {"fp8": True}, waves(100, 4096) * 5 / 8),
        ((2560, 1280, 4096), {"slowdown": 1.5}, 1.5 * waves(2, 4096)),
    ],
)
def test_gemm_takes_waves_of_tiles_or_its_bytes(shape, options, expected):
    assert KERNELS.gemm_s(*shape, **options) == approx(expected + MATMUL_S, rel=1e-9)


# TFLOPS of single matmuls M x N x K, measured thermally settled on random data:
# Azure/AI-benchmarking-guide (float8 and A100), pytorch/pytorch#143465, pytorch/ao#2427 (B200),
# zzc0721/torch-performance-test-data#79 (bf16 on H100, short runs).
MEASURED_MATMULS = (
    ("H100 SXM", True, (2048, 2048, 2048), 1011),
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
        seconds = roofline_of(8192, device=spec, rates=rates_of(spec)).gemm_s(*shape, fp8=fp8)
        assert 2 * math.prod(shape) / seconds / 1e12 == approx(tflops, rel=0.15)


# ----- gather_s, ring_gb_s -----


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
def test_a_ring_sends_by_the_slowest_of_its_links(ranks, stride, gb_s):
    assert KERNELS.ring_gb_s(ranks, stride) == approx(gb_s)
    latency = 7e-6 + (ranks - 1) * 2e-6
    seconds = latency + 1e9 * (ranks - 1) / ranks / (gb_s * 1e9)
    assert KERNELS.gather_s(1e9, ranks, stride) == approx(seconds)


def test_nothing_is_gathered_on_one_rank():
    assert KERNELS.gather_s(1e9, 1) == KERNELS.gather_s(0, 8) == 0


# NCCL's all-gathers of 8 H100 in a node, in GB/s of the algorithm: nccl#1047 and Azure.
def test_ring_beside_measured_collectives():
    at = roofline_of(8192, device=H100)
    assert 8e9 / at.gather_s(8e9, 8) / 1e9 * 7 / 8 == approx(330, rel=0.1)


# ----- linears_s, matmuls_s -----


def matmuls_s(at: Roofline, **options: Any) -> float:
    """Seconds of the three matmuls of a linear: of the output, its input, and its weight."""
    return sum(at.gemm_s(*shape, **options) for shape in ((M, N, K), (M, K, N), (N, K, M)))


def test_bf16_is_three_matmuls():
    linear = one_linear(N, K)
    assert KERNELS.linears_s([linear], []) == approx(matmuls_s(KERNELS))
    shapes = {"output": (M, N, K), "grad_input": (M, K, N), "grad_weight": (N, K, M)}
    expected = {name: KERNELS.gemm_s(*shape) for name, shape in shapes.items()}
    assert KERNELS.matmuls_s(linear, []) == approx(expected)


@pytest.mark.parametrize("recipe", sorted({*RECIPES} - {"blockwise"}))  # not in theirs
def test_float8_casts_move_about_as_many_bytes_as_torchaos_roofline_says(recipe):
    m = k = n = 16384
    device = replace(H100, bandwidth_tb_s=2.4)  # torchao's H100; for it, bytes are of one kind
    rates = replace(RATES, contiguous=0.92, transposing=0.92, strided=0.92)
    roofline = roofline_of(m, SCHEMES[recipe], device=device, rates=rates, **SHARDED)
    # Time of the matmuls of each recipe: output, grad_input, grad_weight.
    fp8, bf16 = (roofline.gemm_s(m, n, k, fp8=fp8) for fp8 in (True, False))
    row, slow = (roofline.gemm_s(m, n, k, fp8=True, slowdown=by) for by in (1.125, 1.25))
    matmuls = {
        "tensorwise": fp8 + 2 * slow,
        "rowwise": row + 2 * slow,
        "rowwise_with_gw_hp": row + slow + bf16,
        "mxfp8": row + 2 * slow,
    }
    casts = roofline.linears_s([one_linear(n, k)], [one_linear(n, k)]) - matmuls[recipe]
    named = (None, "mxfp8_cublas_rceil") if recipe == "mxfp8" else (recipe, None)
    theirs = float(get_float8_mem_sympy(m, k, n, *named, False, "NVIDIA H100"))
    assert casts == approx(theirs, rel=0.2)


NO_CASTS = Casts((Traffic(), Traffic()), (Traffic(), Traffic()), Traffic())


def test_float8_casts_take_bytes_by_kind_of_access_and_launches(monkeypatch):
    casts = Casts(
        input=(Traffic(contiguous=3, kernels=2), Traffic(transposing=5, kernels=4)),
        weight=(Traffic(strided=7, kernels=6), Traffic(-1, 11, 1, kernels=8)),
        grad_output=Traffic(13, kernels=10),
    )

    def seconds(casts: Casts) -> dict[str, float]:
        monkeypatch.setitem(COMPILED, "tensorwise", casts)
        pair = [replace(one_linear(N, K), kind=kind) for kind in (WK, WV)]
        return roofline_of(M, SCHEMES["tensorwise"], **SHARDED).matmuls_s(pair[0], pair)

    # Two linears share the casts of the input. Bytes are at 0.8, 0.6 and 0.4 of 2.5 TB/s.
    expected = {
        "output": 1e-12 * (3 / 2 / 2 * M * K + 7 / 1 * N * K) + (2 / 2 + 6) * 2e-6,
        "grad_input": 1e-12 * ((-1 / 2 + 11 / 1.5 + 1 / 1) * N * K + 13 / 2 * M * N) + 18 * 2e-6,
        "grad_weight": 1e-12 * 5 / 1.5 / 2 * M * K + 4 / 2 * 2e-6,
    }
    without = seconds(NO_CASTS)
    added = {name: each - without[name] for name, each in seconds(casts).items()}
    assert added == approx(expected)


def test_casts_of_a_recipe_that_nobody_has_counted(monkeypatch):
    monkeypatch.delitem(COMPILED, "rowwise")
    assert roofline_of(M, SCHEMES["rowwise"]).casts == COMPILED["tensorwise"]


# Bytes that transpose are at 0.6 of 2.5 TB/s.
SAVED = 5 * N * K / MEMORY + 1 * N * K / 1.5e12 + 2 * 2e-6


def test_float8_weight_that_was_gathered_in_float8_is_not_cast_again():
    # Casts of the weight took 5 bytes an element and 3 kernels forward, now only a kernel; backward
    # 3 bytes, now 2. A tied weight is gathered for the embedding too.
    output = LinearChoice(OUTPUT, (OUTPUT,), (N, K), (N, K))
    for linear, tied, saved in (
        (one_linear(N, K), False, SAVED),
        (output, False, SAVED),
        (output, True, 0),
    ):
        cast, gathered = (
            roofline_of(M, each, replace(SMALL, tie_embeddings=tied), **SHARDED).linears_s(
                [linear], [linear]
            )
            for each in (SCHEMES["tensorwise"], GATHERED)
        )
        assert cast - gathered == approx(saved)


# Bytes an element at 2 and, if they transpose, 1.5 TB/s, and launches: of casts in each microbatch,
# of one cast before a step, and of what is left for a microbatch then.
CAST_ONCE = {
    "tensorwise": ((5 / 2 + 3 / 1.5, 4), (5 / 2, 3), (2 / 1.5, 2)),
    "rowwise": ((9 / 2 + 3 / 1.5, 4.7), (5 / 2 + 3 / 1.5, 4), (2.9 / 2 - 2.8 / 1.5, 1.8)),
    "rowwise_with_gw_hp": ((5 / 2 + 3 / 1.5, 4), (5 / 2 + 3 / 1.5, 4), (1 / 2, 1.1)),
    "mxfp8": ((6 / 2, 4), (6 / 2, 2), (0, 2)),
    "blockwise": ((5 / 2 + 3 / 1.5, 4.3), (5 / 2 + 3 / 1.5, 4.3), (0, 0)),
}


@pytest.mark.parametrize("recipe", CAST_ONCE)
def test_microbatches_share_the_casts_of_weights_that_stay(recipe: str) -> None:
    def seconds(microbatches: int, reshard: str = "default", ranks: int = 1) -> float:
        tables = {
            "training": {"global_batch_size": ranks * microbatches},
            "parallelism": {"fsdp_reshard_after_forward": reshard},
        }
        roofline = roofline_of(M, SCHEMES[recipe], degrees=(1, ranks, 1), **tables)
        return roofline.linears_s([one_linear(N, K)], [one_linear(N, K)])

    each, before, left = (1e-12 * size * N * K + 2e-6 * n for size, n in CAST_ONCE[recipe])
    in_each = seconds(4, "default", ranks=2)
    for microbatches, reshard, ranks in (4, "default", 1), (4, "never", 2), (8, "default", 1):
        once = before / microbatches + left
        assert in_each - seconds(microbatches, reshard, ranks) == approx(each - once)
    # With one scale, one cast also serves both passes of one microbatch.
    saved = each - before - left if recipe == "tensorwise" else 0
    assert in_each - seconds(1) == approx(saved)


def test_linears_that_are_recomputed_run_their_forward_again():
    linear = replace(one_linear(N, K), names=tuple("abcd"))
    once, half = (roofline_of(M, recomputed=linear.names[:n]).matmuls_s(linear, []) for n in (0, 2))
    assert half["output"] - once.pop("output") == approx(2 * KERNELS.gemm_s(M, N, K))
    assert half.items() >= once.items()


class TensorTraffic(TorchDispatchMode):
    """Counts kernels, and the bytes of the tensors that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten.detach.default:
            leaves = tree_leaves((args, result))
            self.bytes += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
            self.kernels += 1
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
    cast = EAGER[recipe].input[0]
    assert traffic.kernels == cast.kernels
    assert traffic.bytes / x.numel() == approx(cast.contiguous, rel=0.01)


# ----- ratio, choose -----


def test_ratio_of_a_linear_beside_others_that_share_its_cast():
    wq, wk, *_ = linears_of(LLAMA_8B)
    assert (wq.reads, wq.kind, wk.kind) == (wk.reads, WQ, WK)
    compiled, eager = (
        roofline_of(8192, SCHEMES["tensorwise"], compiled=each).ratio for each in (True, False)
    )
    assert compiled(wk, []) == compiled(wk, [wk])
    assert compiled(wk, [wq]) == compiled(wk, [wq, wk]) < compiled(wk, [])
    assert eager(wk, [wq, wk]) == eager(wk, [wk])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("flavor", "tp", "device"), [("8B", 8, H100), ("405B", 4, DEVICE)])
def test_choose_takes_the_linears_of_an_input_if_float8_is_faster_for_all(
    flavor, tp, device, recipe
):
    linears = linears_of(FLAVORS[flavor], tp=tp)
    roofline = roofline_of(8192, SCHEMES[recipe], device=device)
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
    roofline = roofline_of(8192, SCHEMES[recipe], args, device=device, compiled=compiled)
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
    casts = COMPILED["rowwise"]._replace(grad_output=Traffic())
    monkeypatch.setitem(COMPILED, "rowwise", casts)
    device = find_device("H100 500W")
    for m, k, n, recipe, bf16_ms, speedup in PUBLISHED_LINEARS:
        linear, roofline = one_linear(n, k), roofline_of(m, SCHEMES[recipe], device=device)
        tolerance = 0.2 if speedup > 1 else 0.3
        assert 1 / roofline.ratio(linear, [linear]) == approx(speedup, rel=tolerance)
        if bf16_ms:
            assert roofline.linears_s([linear], []) * 1e3 == approx(bf16_ms, rel=0.2)


# ----- attention_s, runs_attention_in -----

FORWARD_MATMUL = 8192 * 8192 * 1024 / 1000e12  # flops of half the square over the peak, in seconds


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
    at = small(args=replace(SMALL, document_bos_id=bos_id), cp=cp)
    # In 4 blocks; checkpointing repeats the forward of 2.
    seconds = FORWARD_MATMUL / fraction / cp
    again = frozenset({"layers.0.attention", "layers.2.attention", "layers.2.attention.wq"})
    for recomputed, matmuls in ((frozenset(), 4 * 7), (again, 4 * 7 + 2 * 2)):
        roofline = replace(at, recomputed=recomputed)
        assert roofline.attention_s(kernel) == approx(matmuls * seconds)


def test_runs_attention_in_cudnn_where_that_is_the_fastest_but_no_mask_or_part():
    kernels = {"Ampere": "flash", "CDNA3": "flash", "Hopper": "cudnn", "Blackwell": "cudnn"}
    for architecture, kernel in kernels.items():
        device: Any = replace(DEVICE, architecture=architecture)
        masked = replace(SMALL, document_bos_id=1)
        assert small(device=device).runs_attention_in == kernel
        assert small(device=device, cp=2).runs_attention_in == "flash"
        assert small(device=device, args=masked).runs_attention_in == "flex"


# ----- pointwise_s, loss_s -----


@pytest.mark.parametrize("compiled", [True, False])
def test_pointwise_moves_what_was_counted(compiled):
    # Elements moved per token, by unit of dim, of queries and keys, and of ffn_dim.
    counted = ((9, 2, 3), (12, 2, 5)) if compiled else ((10, 10, 5), (22, 10, 9))
    forward, backward = (
        2 * 8192 * 4 * (dim * 1024 + qk * (1024 + 512) + ffn * 4096) / MEMORY
        for dim, qk, ffn in counted
    )
    for mode, option, again in (
        *(("none", "op", 0), ("selective", "2", 0.5)),
        *(("selective", "op", 1), ("full", "op", 1)),
    ):
        ac = {"mode": mode, "selective_ac_option": option}
        seconds = small(compiled=compiled, activation_checkpoint=ac).pointwise_s()
        assert seconds == approx((1 + again) * forward + backward)


def test_loss_reads_and_writes_the_logits():
    logits = 8192 * 32000
    assert small().loss_s() == approx(8 * logits / MEMORY)
    assert small(compiled=False).loss_s() == approx(26 * logits / MEMORY)


def test_tensor_parallelism_splits_everything_beside_the_linears():
    alone, split = (small(degrees=(1, 1, tp)) for tp in (1, 4))
    assert split.attention_s() == approx(alone.attention_s() / 4)
    assert split.pointwise_s() == approx(alone.pointwise_s() / 4)
    assert split.loss_s() == approx(alone.loss_s() / 4)
