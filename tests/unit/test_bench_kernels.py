"""Kernels by their names, as profilers of H100s and of CPUs show them, and a step's time by their
groups."""

import json
from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.benchmarks.kernels import (
    GROUPS,
    Breakdown,
    break_down,
    covered,
    group_of,
    mean_of,
)
from torchtitan_lite.errors import RunError

CUTLASS = "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal"
TILE = "tilesize128x128x128_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas"
ADAM = "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4"
NAMES = {
    "GEMM fp8": [
        "nvjet_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT",
        "nvjet_sm90_qqtst_128x128_128x6_1x2_h_bz_ovscale_TNT",
        "nvjet_sm100_qqtst_128x16_128x12_2x1_2cta_v_bz_TNT",
        f"sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_{TILE}",
        f"{CUTLASS}<cute::tuple<int, int, int>, cutlass::float_e4m3_t, Sm90ColBroadcast<float>, cutlass::bfloat16_t>>>",
        "triton_tem_fused__scaled_mm_3",
        "aten::_scaled_mm",
        "aten::mm(float)",
    ],
    "GEMM bf16": [
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
        "nvjet_sm90_tst_256x160_64x4_1x2_h_bz_coopA_TNT",
        f"sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_{TILE}",
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16>",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>",
        "triton_tem_fused_mm_7",
        "aten::mm(c10::BFloat16)",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128, 64, 4, false, false>>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128>>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<CollectiveMainloopFwdSm90>>>",
        "triton_tem_fused_flex_attention_backward_2",
        "void cudnn::fusion::compute_dot_do_o<cudnn_bfloat16, 128>",
        "void cudnn::fusion::convert_dq_to_16bits<true, 128, cudnn_bfloat16>",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ],
    "casts and amax": [
        "triton_red_fused_abs_max_0",
        "triton_poi_fused__to_copy_clamp_div_max_mul_reciprocal_t_2",
        "triton_poi_fused__to_copy_t_4",
        "graph_0_cpp_fused__to_copy_abs_clamp_div_max_mul_reciprocal_t_transpose_view_9",
        "void at::native::unrolled_elementwise_kernel<at::native::float8_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::AbsFunctor<float>, std::array<char*, 2ul>>",
        "void at::native::reduce_kernel<512, 1, ReduceOp<float, func_wrapper_t<float, MaxNanFunctor<float>>>>",
        "aten::_to_copy",
        "aten::amax",
    ],
    "norms and activations": [
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3",
        "triton_red_fused__to_copy_abs_add_clamp_div_max_mean_mul_pow_reciprocal_rsqrt_t_view_5",
        "triton_poi_fused_mul_silu_silu_backward_6",
        "graph_0_cpp_fused__to_copy_abs_clamp_div_max_mul_reciprocal_silu_t_view_7",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, true>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::silu_kernel>",
        "aten::silu_backward",
    ],
    "loss": [
        "triton_red_fused__log_softmax__to_copy_nll_loss_forward_view_0",
        "triton_red_fused__to_copy_exp_gather_logsumexp_1",
        "triton_poi_fused__to_copy_arange_copy_eq_exp_mul_sub_unsqueeze_where_2",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, c10::BFloat16, float, float>",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>",
    ],
    "optimizer": [
        f"void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::{ADAM}>>",
        "void multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float, NormType::L2, float, 1, 1, 0>>",
        "aten::_fused_adamw_",
        "triton_poi_fused__to_copy_add_copy__div_eq_lerp_mul_pow_sqrt_sub_where_0",
        "aten::linalg_vector_norm",
    ],
    "communication": [
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel(char**, char**, long*, long*)",
        "void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>(c10::BFloat16**, float*, long*)",
        "void multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<c10::BFloat16, float, 2, 1, 1>>",
        "c10d::allgather_",
    ],
    "other": [
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "CompiledFunctionBackward",
        "aten::view",
    ],
}


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group, names in NAMES.items() for name in names]
)
def test_kernels_are_grouped_by_their_names(group: str, name: str) -> None:
    assert group_of(name) == group


def test_every_group_has_an_example() -> None:
    assert NAMES.keys() == set(GROUPS) - {"idle"}


def event(name: str, cat: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": 1, **more}


def write_trace(folder: Path, *events: dict[str, Any]) -> Path:
    path = folder / "rank0_trace.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}))
    return path


def test_a_gpus_step_is_its_kernels_and_the_gaps_between_them(tmp_path: Path) -> None:
    trace = write_trace(
        tmp_path,
        event("ProfilerStep#2", "user_annotation", 0, 5),  # of the host, which runs ahead
        event("ProfilerStep#2", "gpu_user_annotation", 10, 100),
        event(
            "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "kernel", 5, 15
        ),  # begun in the step before
        event("nvjet_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT", "kernel", 20, 30),
        event("ncclDevKernel_AllGather_RING_LL", "kernel", 40, 30),  # 10 of them beside the matmul
        event("aten::mm", "cpu_op", 20, 30),
        event("Memset (Device)", "gpu_memset", 100, 10),
    )
    step = break_down(trace, on_cpu=False)
    assert step.wall_s == pytest.approx(100e-6)
    share = {group: pct for group, pct in step.share_pct.items() if pct}
    assert share == pytest.approx(
        {"GEMM bf16": 10, "GEMM fp8": 30, "communication": 30, "other": 10, "idle": 30}, abs=1e-6
    )


def test_a_cpus_step_is_the_own_time_of_its_operators(tmp_path: Path) -> None:
    float32, bf16 = (
        {"Input type": ["float", "float"]},
        {"Input type": ["c10::BFloat16", "c10::BFloat16"]},
    )
    trace = write_trace(
        tmp_path,
        event("ProfilerStep#2", "user_annotation", 0, 100),
        event("aten::matmul", "cpu_op", 0, 30, args=bf16),
        event("aten::mm", "cpu_op", 5, 20, args=bf16),
        event("aten::mm", "cpu_op", 40, 40, args=float32),
        event("aten::empty", "cpu_op", 50, 10),
        event("aten::mm", "cpu_op", 120, 40, args=float32),  # of the next step
    )
    share = {group: pct for group, pct in break_down(trace, on_cpu=True).share_pct.items() if pct}
    assert share == pytest.approx({"GEMM bf16": 30, "GEMM fp8": 30, "other": 10, "idle": 30})


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_trace_of_nothing_that_is_asked_for_is_an_error(on_cpu: bool, tmp_path: Path) -> None:
    wanted, other = ("cpu_op", "kernel") if on_cpu else ("kernel", "cpu_op")
    trace = write_trace(tmp_path, event("mm", other, 0, 1))
    with pytest.raises(RunError, match=f"the profiler saw no events of the kind {wanted}"):
        break_down(trace, on_cpu=on_cpu)


def test_the_union_of_intervals() -> None:
    assert covered([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5
    assert covered([]) == 0


def test_the_mean_of_no_steps_is_an_error() -> None:
    with pytest.raises(RunError, match="wrote no trace"):
        mean_of([])


def test_the_mean_of_steps() -> None:
    one, other = (Breakdown(wall, dict.fromkeys(GROUPS, wall / 2)) for wall in (1.0, 3.0))
    assert mean_of([one, other]) == Breakdown(2.0, dict.fromkeys(GROUPS, 1.0))
