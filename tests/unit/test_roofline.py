"""The roofline: kernels against figures computed by hand, reference implementations and what
torchao really runs; linears also beside published measurements of them."""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from hypothesis import given
from hypothesis import strategies as st
from sample_plans import B200, DEVICE, H100, RATES, linears_of, roofline_of, scheme_of
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig
from torchao.testing.training.roofline_utils import get_float8_mem_sympy, get_gemm_time_sympy

from torchtitan_lite.config import Float8Config
from torchtitan_lite.float8.recipes import RECIPES, Casts, Traffic
from torchtitan_lite.float8.selection import LinearChoice
from torchtitan_lite.metrics.devices import Architecture, DeviceSpec
from torchtitan_lite.models.flavors import BLOCK_LINEARS, FLAVORS, OUTPUT, ModelArgs
from torchtitan_lite.models.llama3 import TransformerBlock, rope_table
from torchtitan_lite.planner.constants import rates_of
from torchtitan_lite.planner.plan import find_device
from torchtitan_lite.planner.rank import Group
from torchtitan_lite.planner.roofline import Cost, Passes

WQ, WK, WV, WO, W1, W3, W2 = BLOCK_LINEARS
DEBUG = replace(FLAVORS["debugmodel_gqa"], vocab_size=2256)
SMALL = ModelArgs(dim=1024, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=4096, vocab_size=32000)
TENSORWISE, ROWWISE = scheme_of("tensorwise"), scheme_of("rowwise")
GATHERED = scheme_of("tensorwise", gathered=True)


def one_linear(n: int, k: int) -> LinearChoice:
    return LinearChoice("x", ("x",), (n, k), (n, k))


# Kernels.


KERNELS = roofline_of(8192)


def test_kernels_that_move_data_take_their_bytes_and_their_launches() -> None:
    assert KERNELS.move(4e9, 3) == Cost(pytest.approx(2e-3 + 3 * 2e-6), 3)  # 2 TB/s


def waves(count: int, inner: float) -> float:
    """Seconds of some waves of bf16 tiles of 128 x 128, at 5 TFLOPS in a multiprocessor."""
    return count * 2 * 128 * 128 * inner / 5e12


@pytest.mark.parametrize(
    ("rows", "columns", "inner", "expected"),
    [
        # 10 x 10 tiles are one wave on 100 multiprocessors; one row or column more are two.
        (1280, 1280, 4096, waves(1, 4096)),
        (1281, 1280, 512, waves(2, 512)),
        (1280, 1281, 512, waves(2, 512)),
        (12800, 12800, 512, waves(100, 512)),
        (12800, 12801, 512, waves(101, 512)),
        # One tile: 8 multiprocessors share its sum, and add their parts of 128 x 128 in float32.
        (128, 128, 65536, waves(1, 65536 / 8) + 8 * 8 * 128 * 128 / 2e12 + 2e-6),
        (1, 128, 65536, waves(1, 65536 / 8) + 8 * 8 * 128 / 2e12 + 2e-6),
        # 110 tiles would be two waves; in halves, they are three of half the length.
        (1408, 1280, 8192, waves(3, 8192 / 2) + 8 * 2 * 1408 * 1280 / 2e12 + 2e-6),
        # Reading and writing 2 bytes an element takes longer than to compute.
        (8192, 8192, 16, 2 * (2 * 8192 * 16 + 8192 * 8192) / 2e12),
        (1, 1, 1, waves(1, 1)),
        (0, 0, 0, 0.0),
    ],
)
def test_a_matmul_takes_waves_of_tiles_or_its_bytes(
    rows: int, columns: int, inner: int, expected: float
) -> None:
    assert KERNELS.gemm(rows, columns, inner) == Cost(pytest.approx(expected + 3e-6, rel=1e-9), 1)


@pytest.mark.parametrize(("fp8", "tflops"), [(False, 500), (True, 800)])
def test_a_huge_matmul_reaches_the_fraction_of_the_peak(fp8: bool, tflops: float) -> None:
    size = 2**15
    assert 2e-12 * size**3 / KERNELS.gemm(size, size, size, fp8=fp8).seconds == pytest.approx(
        tflops, rel=0.01
    )


def test_a_slowdown_lengthens_the_arithmetic_only() -> None:
    once, slow = (KERNELS.gemm(2560, 1280, 4096, slowdown=by).seconds for by in (1, 1.5))
    assert slow - once == pytest.approx(0.5 * waves(2, 4096))
    assert KERNELS.gemm(8192, 8192, 16, slowdown=1.5) == KERNELS.gemm(8192, 8192, 16)


def test_float8_reads_half_the_bytes_and_writes_bf16() -> None:
    seconds = KERNELS.gemm(8192, 8192, 16, fp8=True).seconds
    assert seconds - 3e-6 == pytest.approx((2 * 8192 * 16 + 2 * 8192 * 8192) / 2e12)


@pytest.mark.parametrize("shape", [(128, 1280, 4096), (64, 1280, 4096), (1, 1280, 4096)])
def test_a_thin_matmul_leaves_multiprocessors_idle(shape: tuple[int, int, int]) -> None:
    # 10 tiles on 80 multiprocessors at most, as a sum has 8 parts: twice as many do not help.
    more = replace(DEVICE, bf16_tflops=2000, multiprocessors=200)
    assert replace(KERNELS, device=more).gemm(*shape) == KERNELS.gemm(*shape)
    large = 8192, 8192, 8192
    assert replace(KERNELS, device=more).gemm(*large).seconds < 0.6 * KERNELS.gemm(*large).seconds


SIZES = st.integers(1, 40_000)


@given(shape=st.tuples(SIZES, SIZES, SIZES), more=SIZES, fp8=st.booleans())
def test_a_larger_matmul_is_never_faster(shape: tuple[int, int, int], more: int, fp8: bool) -> None:
    seconds = KERNELS.gemm(*shape, fp8=fp8).seconds
    for i in range(3):
        larger = [size + more * (i == j) for j, size in enumerate(shape)]
        assert KERNELS.gemm(*larger, fp8=fp8).seconds >= seconds * (1 - 1e-12)


@given(rows=SIZES, columns=SIZES, inner=SIZES)
def test_a_transposed_matmul_takes_as_long(rows: int, columns: int, inner: int) -> None:
    assert KERNELS.gemm(rows, columns, inner) == KERNELS.gemm(columns, rows, inner)


# Linears.


@pytest.mark.parametrize("shape", [(8192, 4096, 14336), (8192, 4096, 2048), (16384, 8192, 8192)])
def test_bf16_linears_take_what_torchaos_roofline_says_if_no_multiprocessor_idles(
    shape: tuple[int, int, int],
) -> None:
    m, k, n = shape
    device = replace(H100, bandwidth_tb_s=2.4, multiprocessors=1)  # torchao's H100
    rates = replace(RATES, bf16_matmul=0.78, contiguous=0.92, matmul_seconds=0)
    both = roofline_of(m, device=device, rates=rates).bf16(one_linear(n, k)).both
    theirs = float(get_gemm_time_sympy(m, k, n, torch.bfloat16, None, None, "NVIDIA H100"))
    assert both == Cost(pytest.approx(theirs, rel=1e-6), 3)


def test_a_linear_in_bf16_is_its_three_matmuls() -> None:
    m, n, k = 8192, 1280, 4096
    backward = KERNELS.gemm(m, k, n) + KERNELS.gemm(n, k, m)  # of the input, of the weight
    assert KERNELS.bf16(one_linear(n, k)) == Passes(KERNELS.gemm(m, n, k), backward)


@pytest.mark.parametrize("recipe", RECIPES)
def test_casts_move_about_as_many_bytes_as_torchaos_roofline_says(recipe: Any) -> None:
    m = k = n = 16384
    device = replace(H100, bandwidth_tb_s=2.4)  # torchao's H100; for it, bytes are of one kind
    rates = replace(RATES, contiguous=0.92, transposing=0.92, strided=0.92)
    roofline = roofline_of(m, scheme_of(recipe), device=device, rates=rates)
    # Time of the matmuls of each recipe: output, grad_input, grad_weight.
    fp8, bf16 = (roofline.gemm(m, n, k, fp8=fp8).seconds for fp8 in (True, False))
    row, slow = (
        roofline.gemm(m, n, k, fp8=True, slowdown=slowdown).seconds for slowdown in (1.125, 1.25)
    )
    matmuls = {
        "tensorwise": fp8 + 2 * slow,
        "rowwise": row + 2 * slow,
        "rowwise_with_gw_hp": row + slow + bf16,
        "mxfp8": 3 * row,
    }
    casts = roofline.float8(one_linear(n, k)).both.seconds - matmuls[recipe]
    named = (None, "mxfp8_cublas_rceil") if recipe == "mxfp8" else (recipe, None)
    theirs = float(get_float8_mem_sympy(m, k, n, *named, False, "NVIDIA H100"))
    assert casts == pytest.approx(theirs, rel=0.2)


@pytest.mark.parametrize(
    ("traffic", "picoseconds"),
    [
        (Traffic(contiguous=3), 3 / 2),  # at 0.8 of 2.5 TB/s,
        (Traffic(transposing=3), 3 / 1.5),  # at 0.6,
        (Traffic(strided=3), 3 / 1),  # and at 0.4
        (Traffic(-1, 3, 1), -1 / 2 + 3 / 1.5 + 1 / 1),
    ],
)
def test_a_cast_takes_its_bytes_by_kind_of_access_and_its_launches(
    traffic: Traffic, picoseconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n, k = 8192, 4096, 2048
    bare = Casts((Traffic(), Traffic()), (Traffic(), Traffic()), Traffic())

    def linear(casts: Casts) -> Passes:
        row = replace(RECIPES["tensorwise"], compiled_casts=casts)
        monkeypatch.setitem(RECIPES, "tensorwise", row)
        return roofline_of(m, TENSORWISE).float8(one_linear(n, k), readers=2)

    launched = traffic._replace(kernels=5)
    seconds, without = 1e-12 * picoseconds, linear(bare)
    for casts, forward, backward in (
        (bare._replace(input=(launched, Traffic())), 0.5 * m * k, 0),  # shared by two linears
        (bare._replace(input=(Traffic(), launched)), 0, 0.5 * m * k),
        (bare._replace(weight=(launched, Traffic())), n * k, 0),
        (bare._replace(weight=(Traffic(), launched)), 0, n * k),
        (bare._replace(grad_output=launched), 0, m * n),
    ):
        launches = 0.5 if casts.input != bare.input else 1
        passes = linear(casts)
        for found, base, elements in (
            (passes.forward, without.forward, forward),
            (passes.backward, without.backward, backward),
        ):
            kernels = 5 * launches * bool(elements)
            assert found.kernels - base.kernels == kernels
            more = elements * seconds + kernels * 2e-6
            assert found.seconds - base.seconds == pytest.approx(more, abs=1e-12)


@pytest.mark.parametrize(
    ("recipe", "forward", "grad_input", "grad_weight"),
    [
        ("tensorwise", 1, 1.25, 1.25),
        ("rowwise", 1.125, 1.25, 1.25),
        ("rowwise_with_gw_hp", 1.125, 1.25, None),  # in bf16
        ("mxfp8", 1.125, 1.125, 1.125),
    ],
)
def test_which_matmuls_accumulate_slowly_and_which_have_row_scales(
    recipe: str,
    forward: float,
    grad_input: float,
    grad_weight: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    m, n, k = 8192, 4096, 2048
    bare = Casts((Traffic(), Traffic()), (Traffic(), Traffic()), Traffic())
    monkeypatch.setitem(RECIPES, recipe, replace(RECIPES[recipe], compiled_casts=bare))
    at = roofline_of(m, scheme_of(recipe))
    passes = at.float8(one_linear(n, k))
    assert passes.forward == at.gemm(m, n, k, fp8=True, slowdown=forward)
    of_weight = at.gemm(n, k, m, fp8=grad_weight is not None, slowdown=grad_weight or 1)
    assert passes.backward == at.gemm(m, k, n, fp8=True, slowdown=grad_input) + of_weight


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_gradients_scaled_in_matmul_have_row_scales_and_casts_of_their_own(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n, k = 8192, 4096, 2048
    bare = Casts((Traffic(), Traffic()), (Traffic(), Traffic()), Traffic())
    scaled = scheme_of(recipe).model_copy(update={"scale_gradients_in_matmul": True})
    row = replace(RECIPES[recipe], casts_scaled_in_matmul=bare)
    monkeypatch.setitem(RECIPES, recipe, row)
    at = roofline_of(m, scaled)
    slow = 1.25 * 1.125
    in_float8 = recipe == "rowwise"
    of_weight = at.gemm(n, k, m, fp8=in_float8, slowdown=slow if in_float8 else 1)
    passes = at.float8(one_linear(n, k))
    assert passes.backward == at.gemm(m, k, n, fp8=True, slowdown=slow) + of_weight
    assert passes.forward == at.gemm(m, n, k, fp8=True, slowdown=1.125)


def test_a_weight_gathered_in_float8_is_not_cast_again() -> None:
    linear = one_linear(4096, 4096)
    cast, gathered = (roofline_of(8192, each).float8(linear) for each in (TENSORWISE, GATHERED))
    assert gathered.forward.seconds < cast.forward.seconds
    assert gathered.both.kernels < cast.both.kernels


def test_a_tied_weight_is_not_gathered_in_float8() -> None:
    output = LinearChoice(OUTPUT, (OUTPUT,), (32000, 1024), (32000, 1024))
    for tied in (False, True):
        roofline = roofline_of(8192, GATHERED, replace(SMALL, tie_embeddings=tied))
        assert roofline.gathers_float8(output) != tied
        assert roofline.gathers_float8(one_linear(4096, 4096))


def test_recomputation_runs_the_forward_pass_again() -> None:
    linear = replace(one_linear(4096, 4096), names=tuple("abcdefghij"))
    for time in ("bf16", "float8"):
        none, half, all_again = (
            getattr(roofline_of(8192, ROWWISE, recomputed=linear.names[:n]), time)(linear)
            for n in (0, 5, 10)
        )
        assert none.forward == half.forward == all_again.forward
        more = [passes.backward.seconds - none.backward.seconds for passes in (half, all_again)]
        assert more == pytest.approx([none.forward.seconds / 2, none.forward.seconds])


def test_a_linear_beside_others_pays_for_its_own_casts_only() -> None:
    wq, wk, *_ = linears_of(FLAVORS["8B"])
    assert (wq.reads, wq.kind, wk.kind) == (wk.reads, WQ, WK)
    roofline = roofline_of(8192, TENSORWISE)
    alone = roofline.ratio(wk, [])
    assert alone == pytest.approx(roofline.ratio(wk, [wk]))
    assert roofline.ratio(wk, [wq]) < roofline.ratio(wk, [wq, wk]) < alone


def test_eager_linears_share_no_casts() -> None:
    wq, wk, *_ = linears_of(FLAVORS["8B"])
    roofline = roofline_of(8192, TENSORWISE, compiled=False)
    assert roofline.ratio(wk, [wq, wk]) == roofline.ratio(wk, [wk])


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    tokens=st.integers(16, 65536),
    recipe=st.sampled_from(list(RECIPES)),
    flavor=st.sampled_from(["8B", "70B", "405B"]),
    device=st.sampled_from([DEVICE, H100, B200]),
)
def test_the_choice_is_the_fastest_of_all(
    tp: int, tokens: int, recipe: Any, flavor: str, device: DeviceSpec
) -> None:
    linears = linears_of(FLAVORS[flavor], tp=tp)
    roofline = roofline_of(tokens, scheme_of(recipe), device=device)
    chosen = roofline.choose(linears)

    def seconds(converted: Collection[LinearChoice]) -> float:
        return sum(cost.both.seconds for cost in roofline.linears(linears, converted))

    every = [subset for size in range(8) for subset in combinations(linears, size)]
    assert len(every) == 128
    assert seconds(chosen) <= min(map(seconds, every)) * (1 + 1e-12)
    for linear in linears:
        if linear not in chosen:
            assert roofline.ratio(linear, chosen) >= 1 - 1e-9


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("seq_len", [256, 2048])
def test_nothing_of_the_debug_model_is_chosen(recipe: Any, seq_len: int) -> None:
    roofline = roofline_of(8 * seq_len, scheme_of(recipe), DEBUG, device=H100)
    assert roofline.choose(linears_of(DEBUG)) == []


@pytest.mark.parametrize("scheme", [TENSORWISE, GATHERED])
def test_the_large_linears_of_8b_are_chosen_under_fsdp_alone(scheme: Float8Config) -> None:
    linears = linears_of(FLAVORS["8B"])
    chosen = roofline_of(8192, scheme, device=H100).choose(linears)
    assert {W1, W3, W2} <= {linear.kind for linear in chosen}


def test_nothing_pays_where_the_casts_are_not_compiled() -> None:
    roofline = roofline_of(8192, TENSORWISE, device=H100, compiled=False)
    assert roofline.choose(linears_of(FLAVORS["8B"])) == []


def test_mxfp8_pays_also_where_casts_are_not_compiled_as_they_are_kernels_anyway() -> None:
    linears = linears_of(FLAVORS["8B"])
    compiled, eager = (
        set(roofline_of(8192, scheme_of("mxfp8"), device=B200, compiled=each).choose(linears))
        for each in (True, False)
    )
    assert {W1, W3, W2} <= {linear.kind for linear in eager}
    assert eager <= compiled  # what is not compiled shares no casts


# TFLOPS of single matmuls M x N x K, measured thermally settled on random data:
# Azure/AI-benchmarking-guide (float8 and A100), pytorch/pytorch#143465, pytorch/ao#2427 (B200),
# zzc0721/torch-performance-test-data#79 (bf16 on H100, short runs).
MEASURED_MATMULS = (
    *(("H100 SXM", True, (n, n, n), tflops) for n, tflops in ((2048, 1011), (4096, 1217))),
    *(("H100 SXM", True, (n, n, n), tflops) for n, tflops in ((8192, 1290), (16384, 1377))),
    ("H100 SXM", True, (16384, 7168, 8192), 1332),
    ("H100 SXM", True, (16384, 1280, 8192), 1239),
    ("H100 SXM", True, (16384, 8192, 1024), 1347),
    ("H100 SXM", True, (16384, 8192, 3584), 1309),
    ("H100 SXM", True, (802816, 192, 768), 664),
    *(("H100 SXM", False, (n, n, n), tflops) for n, tflops in ((2048, 677), (8192, 797))),
    ("GB200", True, (8192, 8192, 8192), 2877),
    *(("B200", False, (n, n, n), tflops) for n, tflops in ((2048, 1130), (8192, 1420))),
    *(("A100 SXM 80GB", False, (n, n, n), tflops) for n, tflops in ((2048, 222), (8192, 254))),
)


@pytest.mark.parametrize(("device", "fp8", "shape", "tflops"), MEASURED_MATMULS)
def test_matmuls_beside_measured_ones(
    device: str, fp8: bool, shape: tuple[int, int, int], tflops: float
) -> None:
    spec = find_device(device)
    roofline = roofline_of(8192, TENSORWISE, device=spec, rates=rates_of(spec))
    seconds = roofline.gemm(*shape, fp8=fp8).seconds
    assert 2 * math.prod(shape) / seconds / 1e12 == pytest.approx(tflops, rel=0.15)


# Linears beside measurements of single ones: pytorch/ao#2185, compiled, on an H100 of 500 W with
# M, K, N, the milliseconds in bf16 and the speedup. Its gradient is the constant 1 of a sum, whose
# cast the compiler folds. Then an example of torchao's float8 README.
H100_500W = find_device("H100 500W")
PUBLISHED_LINEARS = (
    (16384, 8192, 1280, "rowwise", 1.954, 1.11),
    (16384, 1024, 8192, "rowwise", 1.701, 1.43),
    (16384, 8192, 7168, "rowwise", 9.871, 1.73),
    (16384, 3584, 8192, "rowwise", 5.192, 1.71),
    (4096, 8192, 16384, "tensorwise", None, 1.39),
)


@pytest.mark.parametrize(("m", "k", "n", "recipe", "bf16_ms", "speedup"), PUBLISHED_LINEARS)
def test_linears_beside_published_ones(
    m: int,
    k: int,
    n: int,
    recipe: Any,
    bf16_ms: float | None,
    speedup: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if bf16_ms is not None:
        casts = RECIPES[recipe].compiled_casts._replace(grad_output=Traffic())
        monkeypatch.setitem(RECIPES, recipe, replace(RECIPES[recipe], compiled_casts=casts))
    linear, roofline = one_linear(n, k), roofline_of(m, scheme_of(recipe), device=H100_500W)
    predicted = 1 / roofline.ratio(linear, [linear])
    assert predicted == pytest.approx(speedup, rel=0.2)
    if bf16_ms is not None:
        assert roofline.bf16(linear).both.seconds * 1e3 == pytest.approx(bf16_ms, rel=0.2)


def test_a_small_linear_is_slower_in_float8() -> None:
    # torchao's float8 README has 0.80 for 1024 x 2048 x 1024.
    linear, roofline = one_linear(1024, 2048), roofline_of(1024, TENSORWISE, device=H100_500W)
    assert 0.5 < 1 / roofline.ratio(linear, [linear]) < 1


# About 1.4 (pytorch/ao#2410): wk and wv on an H100 under rowwise and tensor parallelism, 8B with
# seq_len 8192 and batch 1, 70B with batch 16.
@pytest.mark.parametrize(
    ("flavor", "tp", "tokens"), [("8B", 4, 8192), ("8B", 8, 8192), ("70B", 8, 16 * 8192)]
)
def test_wk_and_wv_are_slower_in_rowwise_under_tensor_parallelism(
    flavor: str, tp: int, tokens: int
) -> None:
    linears = linears_of(FLAVORS[flavor], tp=tp)
    roofline = roofline_of(tokens, ROWWISE, device=H100)
    ratios = {linear.kind: roofline.ratio(linear, linears) for linear in linears}
    assert ratios[WK] == ratios[WV] > 1


# What torchao runs.


@pytest.mark.parametrize(
    ("recipe", "casts"), [("tensorwise", 29), ("rowwise", 36), ("rowwise_with_gw_hp", 25)]
)
def test_a_compiled_block_casts_as_often_as_the_model_has_it(recipe: str, casts: int) -> None:
    # 7 weights in each pass, 4 inputs (three linears read one, two another) in the forward and,
    # unless grad_weight is in high precision, in the backward pass; 7 grad_outputs, twice under
    # rowwise.
    converted: Counter[str] = Counter()

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for target in (
            torch.ops.aten._to_copy.default,
            torch.ops.prims.convert_element_type.default,
        ):
            nodes = graph.graph.find_nodes(op="call_function", target=target)
            converted.update(str(node.meta["val"].dtype) for node in nodes)
        return make_boxed_func(graph.forward)

    args = ModelArgs(
        dim=64, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=50, max_seq_len=32
    )
    block = TransformerBlock(args).bfloat16()
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(block, config=config)
    backend = aot_autograd(
        fw_compiler=count, partition_fn=min_cut_rematerialization_partition
    )  # as Inductor has it
    block.compile(backend=backend, fullgraph=True)
    x = torch.randn(1, 32, 64, dtype=torch.bfloat16, requires_grad=True)
    block(x, *rope_table(args), None).sum().backward()
    assert converted["torch.float8_e4m3fn"] + converted["torch.float8_e5m2"] == casts


class TensorTraffic(TorchDispatchMode):
    """Counts kernels, and the bytes of the tensors that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten.detach.default:
            tensors = [
                leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)
            ]
            self.bytes += sum(tensor.nbytes for tensor in tensors)
            self.kernels += 1
        return result


@pytest.mark.parametrize(
    ("granularity", "recipe"), [("TENSORWISE", "tensorwise"), ("AXISWISE", "rowwise")]
)
def test_an_eager_cast_moves_what_the_recipes_say(granularity: str, recipe: str) -> None:
    x = torch.randn(256, 1024).bfloat16()
    with TensorTraffic() as traffic:
        hp_tensor_to_float8_dynamic(
            x,
            torch.float8_e4m3fn,
            LinearMMConfig(),
            scaling_granularity=ScalingGranularity[granularity],
            axiswise_dim=-1 if granularity == "AXISWISE" else None,
            round_scales_to_power_of_2=granularity == "AXISWISE",
        )
    cast = RECIPES[recipe].eager_casts.input[0]
    assert traffic.kernels == cast.kernels
    assert traffic.bytes / x.numel() == pytest.approx(cast.contiguous, rel=0.01)


# Other parts of the model.

FORWARD_MATMUL = 8192 * 8192 * 1024 / 1000e12  # flops of half the square over the peak, in seconds


@pytest.mark.parametrize(
    ("kernel", "fraction"), [("cudnn", 0.5), ("flash", 0.25), ("flex", 0.2), ("", 0.5)]
)
def test_causal_attention_is_2_matmuls_forward_and_5_backward(kernel: str, fraction: float) -> None:
    attention = replace(roofline_of(8192, args=SMALL), attention_kernel=kernel).attention()
    matmul = 4 * FORWARD_MATMUL / fraction  # in 4 blocks
    assert attention.forward.seconds == pytest.approx(2 * matmul)
    assert attention.backward.seconds == pytest.approx(5 * matmul)


@pytest.mark.parametrize(
    ("architecture", "fraction"),
    [("Ampere", 0.25), ("CDNA3", 0.25), ("Hopper", 0.5), ("Blackwell", 0.5)],
)
def test_cudnn_computes_attention_where_it_is_the_fastest_but_no_document_mask(
    architecture: Architecture, fraction: float
) -> None:
    for document_bos_id, expected in ((None, fraction), (1, 0.2)):
        roofline = roofline_of(8192, args=replace(SMALL, document_bos_id=document_bos_id))
        roofline = replace(roofline, device=replace(DEVICE, architecture=architecture))
        forward = roofline.attention().forward.seconds
        assert forward == pytest.approx(8 * FORWARD_MATMUL / expected)


def test_checkpointing_repeats_the_attention_of_its_blocks() -> None:
    again = {"layers.0.attention", "layers.2.attention", "layers.2.attention.wq"}
    once, twice = (
        roofline_of(8192, args=SMALL, recomputed=each).attention() for each in ((), again)
    )
    assert twice.forward == once.forward
    more = twice.backward.seconds - once.backward.seconds
    assert more == pytest.approx(once.forward.seconds / 2)  # 2 of 4 blocks


def test_checkpointing_repeats_the_pointwise_kernels_of_its_blocks() -> None:
    def pointwise(mode: str, option: str = "op") -> Passes:
        settings = {"mode": mode, "selective_ac_option": option}
        return roofline_of(8192, args=SMALL, activation_checkpoint=settings).pointwise()

    once, half = pointwise("none"), pointwise("selective", "2")
    assert once.forward == half.forward == pointwise("full").forward
    for mode, share in ((half, 0.5), (pointwise("full"), 1), (pointwise("selective"), 1)):
        more = mode.backward.seconds - once.backward.seconds
        assert more == pytest.approx(share * once.forward.seconds)


def test_tensor_parallelism_splits_everything_beside_the_linears() -> None:
    alone, split = (
        replace(
            roofline_of(8192, args=SMALL, degrees=(1, 1, tp)),
            rates=replace(RATES, kernel_seconds=0),
        )
        for tp in (1, 4)
    )
    assert split.attention().both.seconds == pytest.approx(alone.attention().both.seconds / 4)
    assert split.pointwise().both.seconds == pytest.approx(alone.pointwise().both.seconds / 4)
    assert split.loss().seconds == pytest.approx(alone.loss().seconds / 4)


@pytest.mark.parametrize(("in_float8", "nbytes"), [(0, 4 + 1), (10**9, 2 + 2.3)])
def test_fsdp_copies_what_it_gathers(in_float8: int, nbytes: float) -> None:
    at = roofline_of(8192, rates=replace(RATES, kernel_seconds=0), degrees=(1, 10, 1))
    # A gathered weight is read and written, of 2 bytes or of 1; beside it 10 bytes of the shard, or
    # 23 with its cast.
    group = Group("some", 10**9, in_float8, gathered=0, saved=0, working=0)
    copies = at.gather_copies(group)
    assert copies.seconds == pytest.approx(nbytes * 1e9 / 2e12)


@pytest.mark.parametrize(
    ("microbatches", "reductions", "nbytes"),
    [(1, 1, 6), (2, 1, 6 + 10 + 8), (4, 1, 6 + 3 * 10 + 8), (4, 4, 4 * 6 + 3 * 12 / 2)],
)
def test_fsdp_casts_gradients_and_adds_them_up(
    microbatches: int, reductions: int, nbytes: int
) -> None:
    # A gradient is read in 2 bytes and written in 4. Each other is read in 2 and added in 4, and
    # their sum is copied to be reduced. If each is reduced, halves of them are added.
    at = roofline_of(
        8192,
        rates=replace(RATES, kernel_seconds=0),
        degrees=(1, 2, 1),
        training={"global_batch_size": 2 * microbatches},
    )
    copies = at.gradient_copies(10**9, reductions)
    assert copies.seconds == pytest.approx(nbytes * 1e9 / 2e12)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_one_rank_copies_weights_once_a_step(microbatches: int) -> None:
    at = roofline_of(
        8192,
        args=SMALL,
        rates=replace(RATES, kernel_seconds=0),
        training={"local_batch_size": 1, "global_batch_size": microbatches},
    )
    # A weight is read in 4 bytes and written in 2. For float8 it is read in 4 bytes to be scaled,
    # multiplied and clamped in 8 each, and read in 4 to be written in 1. A gradient is read in 2
    # bytes and written in 4, which later microbatches read too.
    for in_float8, copied in ((0, 6), (10**9, 25)):
        group = Group("some", 10**9, in_float8, gathered=0, saved=0, working=0)
        copies = at.gather_copies(group)
        assert copies.seconds == pytest.approx(copied * 1e9 / 2e12)
    summed = 6 + 10 * (microbatches - 1)
    sums = at.gradient_copies(10**9, 1)
    assert sums.seconds == pytest.approx(summed * 1e9 / 2e12)


@pytest.mark.parametrize("part", ["loss", "attention", "pointwise"])
def test_twice_the_tokens_take_twice_as_long(part: str) -> None:
    free = replace(RATES, kernel_seconds=0)
    costs = [getattr(roofline_of(4096 * n, args=SMALL, rates=free), part)() for n in (1, 2)]
    once, twice = (
        cost.both.seconds if isinstance(cost, Passes) else cost.seconds for cost in costs
    )
    quadratic = part == "attention"
    assert twice == pytest.approx(once * (4 if quadratic else 2))


def test_the_optimizer_reads_and_writes_each_parameter() -> None:
    once, twice = (KERNELS.optimizer(n * 10**9).seconds for n in (1, 2))
    assert twice - once >= 7 * 4e9 / 2e12  # weight, gradient and moments in, three of them out
    assert math.isclose(KERNELS.optimizer(0).seconds, 2 * once - twice, rel_tol=1e-9)


@pytest.mark.parametrize(
    ("bos_id", "kernel", "rate", "calls"), [(None, "flash", 0.25, 2), (1, "flex", 0.2, 1)]
)
def test_each_rank_has_an_equal_part_of_the_attention(
    bos_id: int | None, kernel: str, rate: float, calls: int
) -> None:
    """Half of 131,072 squared pairs over 8 ranks, 32 heads of 128, 2 matmuls of 2 FLOPs a pair."""
    args = replace(FLAVORS["8B"], document_bos_id=bos_id)
    part = roofline_of(131072, args=args, cp=8)
    assert part.runs_attention_in == kernel
    forward = part.attention().forward
    flops = 32 * 131072**2 / 2 / 8 * 32 * 128 * 2 * 2
    assert forward.seconds == pytest.approx(flops / (1000e12 * rate))
    assert forward.kernels == 32 * calls
