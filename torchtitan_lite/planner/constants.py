"""The rates and latencies that the planner assumes, each with its source, and its errors.

The rates come from measurements of single kernels and collectives; only AMD's `in_training` is
fitted to training runs. Where none was found, the source begins with "guess". A name with # is a
GitHub issue or pull request. "Azure" is Azure/AI-benchmarking-guide, "nccl", "nccl-tests" NVIDIA's.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_lite.catalog.devices import DeviceSpec

RATE_RANGE = (0.85, 1.09)
"""The middle 80 % of published rates, over predicted ones, of runs without context or pipeline
parallelism. tests/unit/test_published.py computes the three ranges."""
SPLIT_RATE_RANGE = (0.78, 1.22)  # with context or pipeline parallelism
SPEEDUP_RANGE = (0.92, 1.15)  # of speedups of float8 over bf16
USABLE_MEMORY = 0.975
"""Part of the memory on a data sheet that torch's allocator can reserve. Of an H100's 80 GiB, torch
finds 79.1 (huggingface/trl#2688), less CONTEXT_GIB."""
CONTEXT_GIB = 1.0
"""What the CUDA context and NCCL take of what torch finds, on 8 H100s (NVIDIA/nccl#1685)."""


@dataclass(frozen=True)
class Constant:
    """A value of `Rates`, with its source."""

    name: str
    value: float
    source: str
    of: tuple[str, ...] = ()  # names of architectures or devices; (): every other one


@dataclass(frozen=True)
class Rates:
    """What kernels, collectives and the host reach on an architecture."""

    bf16_matmul: float  # fraction of the bf16 peak that large matmuls reach
    fp8_matmul: float  # fraction of the fp8 peak, with fast accumulation and a scale per tensor
    slow_accumulation: float  # time of a float8 matmul that accumulates in float32, over fast
    row_scales: float  # time of a float8 matmul with a scale per row, over one per tensor
    matmul_seconds: float  # of a matmul beside its arithmetic
    attention_cudnn: float  # fractions of the bf16 peak, forward and backward together, causal
    attention_flash: float
    attention_flex: float
    contiguous: float  # fractions of the memory bandwidth: kernels that read and write rows
    transposing: float  # kernels that write the transpose of what they read
    strided: float  # kernels whose stores are not coalesced
    kernel_seconds: float  # device time of a kernel on one element
    host_seconds_per_block: float  # of the host in a microbatch, and in the optimizer's update
    link: float  # fraction of the link bandwidth that large collectives reach within a node
    network: float  # fraction of the network bandwidth, between nodes
    collective_seconds: float  # latency of a collective: start,
    hop_seconds: float  # and each step of its ring
    in_training: float  # time of kernels in a step, over the time by the rates above
    slowest_device: float  # time of the slowest of several devices, over a typical one's
    overlap_slowdown: float  # compute time lost during a second of communication beside it
    async_tensor_parallel: float  # part of tensor parallelism's communication that async TP hides


# The row of a device replaces that of its architecture, which replaces the one for all. What large
# matmuls reach is without the loss of their last wave of tiles.
CONSTANTS = (
    # Matmuls, thermally settled and on random data: power limits what they reach.
    Constant("bf16_matmul", 0.7, "guess: between the architectures below"),
    Constant("bf16_matmul", 0.82, "Azure, ND_A100_v4", ("Ampere",)),
    Constant("bf16_matmul", 0.77, "pytorch/FBGEMM#2766", ("Hopper",)),
    Constant("bf16_matmul", 0.61, "pytorch/FBGEMM#2546", ("H100 500W",)),
    Constant("bf16_matmul", 0.57, "pytorch/ao#3342", ("H100 PCIe",)),
    Constant("bf16_matmul", 0.66, "pytorch/ao#2427, vllm#19566", ("Blackwell",)),
    Constant("bf16_matmul", 0.46, "AMD-AGI/Primus-Turbo", ("CDNA3", "CDNA4")),
    Constant("bf16_matmul", 0.95, "xzwgit/gpu-flops-bench", ("RTX 4090", "RTX 5090")),
    Constant("fp8_matmul", 0.6, "guess: between the architectures below"),
    Constant("fp8_matmul", 0.68, "Azure, ND_H100_v5; pytorch/pytorch#143465", ("Hopper",)),
    Constant("fp8_matmul", 0.59, "pytorch/FBGEMM#2546", ("H100 500W",)),
    Constant("fp8_matmul", 0.5, "guess: as in bf16, limited by power", ("H100 PCIe",)),
    Constant("fp8_matmul", 0.59, "Azure, ND_GB200_v6; vllm#19566", ("Blackwell",)),
    Constant("fp8_matmul", 0.4, "AMD-AGI/Primus-Turbo, Azure", ("CDNA3", "CDNA4")),
    Constant("fp8_matmul", 0.95, "pytorch/pytorch#155991", ("RTX 4090", "RTX 5090")),
    Constant("slow_accumulation", 1.0, "no such switch: pytorch/pytorch#123987"),
    Constant("slow_accumulation", 1.15, "1.1 to 1.2: pytorch/ao#2377", ("Hopper",)),
    Constant("row_scales", 1.04, "pytorch/FBGEMM#2764; vllm#19566"),
    Constant("row_scales", 1.0, "fp8_matmul is of row scales there", ("H100 500W",)),
    Constant("matmul_seconds", 4e-06, "small squares: Azure, pytorch/ao#2427"),
    # Causal attention, forward and backward together.
    Constant("attention_cudnn", 0.5, "H100: arXiv 2407.08608, fig. 5, 6"),
    Constant("attention_cudnn", 0.45, "0.9 of 700 W: tritonbench#141", ("H100 500W",)),
    Constant("attention_flash", 0.55, "guess: FlashAttention 2, arXiv 2307.08691"),
    Constant("attention_flash", 0.58, "A100: arXiv 2307.08691, fig. 4 to 6", ("Ampere",)),
    Constant("attention_flash", 0.32, "H100: arXiv 2407.08608, fig. 5, 6", ("Hopper",)),
    Constant("attention_flash", 0.15, "Azure, GB200", ("Blackwell",)),
    Constant("attention_flash", 0.3, "guess: AITER, AMD-AGI/Primus-Turbo", ("CDNA3", "CDNA4")),
    Constant("attention_flex", 0.48, "guess: 0.87 of FlashAttention 2, PyTorch"),
    Constant("attention_flex", 0.28, "guess: as slow", ("Hopper", "CDNA3", "CDNA4")),
    # Memory.
    Constant("contiguous", 0.88, "BabelStream on H100: Azure, ND_H100_v5"),
    Constant("contiguous", 0.82, "BabelStream on A100: Azure, ND_A100_v4", ("Ampere",)),
    Constant("contiguous", 0.81, "BabelStream on MI300X: arXiv 2510.27583", ("CDNA3", "CDNA4")),
    Constant("transposing", 0.6, "pytorch/pytorch#133242, #194310"),
    Constant("transposing", 0.34, "MI300X: ROCm/TransformerEngine#89", ("CDNA3", "CDNA4")),
    Constant("strided", 0.3, "guess: pytorch/pytorch#149982, #194310"),
    Constant("kernel_seconds", 2e-06, "torchao, testing/training/roofline_utils.py"),
    Constant("host_seconds_per_block", 0.002, "guess: tritonbench#1016, FSDP's hooks, AdamW"),
    # Collectives. The latencies are NCCL's own model, src/graph/tuning.cc.
    Constant("link", 0.73, "8 H100: NVIDIA/Megatron-LM#5596, nccl#1047"),
    Constant("link", 0.68, "GB200: Azure", ("Blackwell",)),
    Constant("network", 0.85, "guess: 0.65 to 0.94, nccl#1229, nccl-tests#290"),
    Constant("collective_seconds", 6.6e-06, "NCCL; 15 to 30 us in all for 8 H100"),
    Constant("hop_seconds", 1.9e-06, "NCCL, protocol LL128; 4 us between nodes"),
    Constant("in_training", 1.0, "guess: as in measurements of single kernels"),
    Constant("in_training", 1.36, "4 runs: pytorch/ao, float8/README.md", ("CDNA3", "CDNA4")),
    Constant("slowest_device", 1.04, "guess: they vary by 8 %, arXiv 2208.11035"),
    Constant("overlap_slowdown", 0.19, "guess: average of arXiv 2507.03114"),
    Constant("overlap_slowdown", 0.79, "MI300X: arXiv 2412.14335", ("CDNA3", "CDNA4")),
    Constant("async_tensor_parallel", 0.4, "guess: meta-pytorch/kraken#2, pytorch#143160"),
)


def constants_of(device: DeviceSpec) -> Mapping[str, Constant]:
    """Return the constants that hold for `device` by their names: measured on it, or published."""
    chosen: dict[str, Constant] = {}
    for holder in ("", device.architecture, device.name):
        chosen |= {each.name: each for each in CONSTANTS if holder in (each.of or ("",))}
    return chosen | {row[0]: Constant(*row) for row in device.measured}


def rates_of(device: DeviceSpec) -> Rates:
    """Return the rates of `device`."""
    return Rates(**{name: each.value for name, each in constants_of(device).items()})
