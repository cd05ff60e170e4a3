"""The rates and latencies that the planner assumes, each with its source.

They come from measurements of single kernels and collectives; none is fitted to a training run. A
guess is a value for which no measurement was found. Guesses, and values that sources measured
differently, have two ends: a plan moves each to both, and prints the band that results. Data sheets
are in catalog/devices.py, and the bytes that kernels move are counted in casts.py and roofline.py.

A name with # is a GitHub issue or pull request. "Azure" is Azure/AI-benchmarking-guide, "nccl" and
"nccl-tests" are NVIDIA's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from torchtitan_lite.catalog.devices import DeviceSpec


@dataclass(frozen=True)
class Constant:
    """A value of `Rates`, for every device or for some."""

    name: str
    value: float
    source: str
    of: tuple[str, ...] = ()  # names of architectures or devices; (): every other one
    between: tuple[float, float] | None = None  # the ends that make a step slow, and fast
    guessed: bool = False


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
    host_seconds_per_kernel: float
    host_seconds_per_block: float  # hooks and autograd in a microbatch
    host_seconds_per_parameter: float  # AdamW's, for a sharded tensor
    link: float  # fraction of the link bandwidth that large collectives reach within a node
    network: float  # fraction of the network bandwidth, between nodes
    collective_seconds: float  # latency of a collective: start,
    link_hop_seconds: float  # each step of its ring within a node,
    network_hop_seconds: float  # and each step to another node
    small_reduction_seconds: float  # an all-reduce of a few KB within a node
    slowest_device: float  # time of the slowest of several devices, over a typical one's
    overlap_slowdown: float  # compute time lost during a second of communication beside it
    async_tensor_parallel: float  # part of tensor parallelism's communication that async TP hides


def _measured(
    name: str, of: str, value: float, source: str, between: tuple[float, float] | None = None
) -> Constant:
    return Constant(name, value, source, tuple(filter(None, of.split(", "))), between)


def _guessed(
    name: str, of: str, value: float, source: str, between: tuple[float, float]
) -> Constant:
    return replace(_measured(name, of, value, source, between), guessed=True)


# The row of a device replaces that of its architecture, which replaces the one for all. Ends come
# after the source. What large matmuls reach is without the loss of their last wave of tiles.
CONSTANTS = (
    # Matmuls, thermally settled and on random data: power limits what they reach.
    _guessed("bf16_matmul", "", 0.7, "between the architectures below", (0.5, 0.9)),
    _measured("bf16_matmul", "Ampere", 0.82, "Azure, ND_A100_v4", (0.78, 0.87)),
    _measured("bf16_matmul", "Hopper", 0.77, "pytorch/FBGEMM#2766", (0.73, 0.81)),
    _measured("bf16_matmul", "H100 500W", 0.61, "pytorch/FBGEMM#2546", (0.57, 0.63)),
    _measured("bf16_matmul", "H100 PCIe", 0.57, "pytorch/ao#3342"),
    _guessed("bf16_matmul", "H20", 0.9, "few units, much power", (0.8, 0.95)),
    _measured("bf16_matmul", "Blackwell", 0.66, "pytorch/ao#2427, vllm#19566", (0.62, 0.7)),
    _measured("bf16_matmul", "CDNA3", 0.46, "AMD-AGI/Primus-Turbo", (0.42, 0.5)),
    _guessed("bf16_matmul", "CDNA4", 0.58, "best shape: stas00/ml-engineering", (0.5, 0.65)),
    _measured("bf16_matmul", "RTX 4090, RTX 5090", 0.95, "xzwgit/gpu-flops-bench", (0.85, 1.0)),
    _guessed("fp8_matmul", "", 0.6, "between the architectures below", (0.4, 0.8)),
    _measured(
        "fp8_matmul", "Hopper", 0.68, "Azure, ND_H100_v5; pytorch/pytorch#143465", (0.63, 0.72)
    ),
    _measured("fp8_matmul", "H100 500W", 0.59, "pytorch/FBGEMM#2546", (0.56, 0.62)),
    _guessed("fp8_matmul", "H100 PCIe", 0.5, "as in bf16, limited by power", (0.42, 0.58)),
    _guessed("fp8_matmul", "H20", 0.85, "as in bf16", (0.7, 0.95)),
    _measured("fp8_matmul", "Blackwell", 0.59, "Azure, ND_GB200_v6; vllm#19566", (0.56, 0.65)),
    _measured("fp8_matmul", "CDNA3", 0.4, "AMD-AGI/Primus-Turbo, Azure", (0.36, 0.44)),
    _guessed("fp8_matmul", "CDNA4", 0.45, "AMD-AGI/Primus-Turbo#274", (0.35, 0.55)),
    _measured("fp8_matmul", "RTX 4090, RTX 5090", 0.95, "pytorch/pytorch#155991", (0.85, 1.0)),
    _measured("slow_accumulation", "", 1.0, "no such switch: pytorch/pytorch#123987"),
    _measured("slow_accumulation", "Hopper", 1.15, "1.1 to 1.2: pytorch/ao#2377", (1.2, 1.1)),
    _measured("row_scales", "", 1.04, "pytorch/FBGEMM#2764; vllm#19566", (1.1, 1.0)),
    _measured("row_scales", "H100 500W", 1.0, "fp8_matmul is of row scales there"),
    _measured("matmul_seconds", "", 4e-06, "small squares: Azure, pytorch/ao#2427"),
    # Causal attention, forward and backward together.
    _measured("attention_cudnn", "", 0.5, "H100: arXiv 2407.08608, fig. 5, 6", (0.46, 0.53)),
    _measured("attention_cudnn", "H100 500W", 0.45, "0.9 of 700 W: tritonbench#141"),
    _guessed("attention_cudnn", "Blackwell", 0.48, "Dao-AILab/flash-attention#2280", (0.42, 0.55)),
    _guessed("attention_flash", "", 0.55, "FlashAttention 2: arXiv 2307.08691", (0.45, 0.65)),
    _measured("attention_flash", "Ampere", 0.58, "A100: arXiv 2307.08691, fig. 4 to 6"),
    _measured(
        "attention_flash", "Hopper", 0.32, "H100: arXiv 2407.08608, fig. 5, 6", (0.29, 0.335)
    ),
    _measured("attention_flash", "Blackwell", 0.15, "Azure, GB200"),
    _guessed("attention_flash", "CDNA3, CDNA4", 0.3, "AITER: AMD-AGI/Primus-Turbo", (0.18, 0.35)),
    _guessed("attention_flex", "", 0.48, "0.87 of FlashAttention 2: PyTorch", (0.38, 0.55)),
    _guessed("attention_flex", "Hopper", 0.28, "0.87 of FlashAttention 2", (0.24, 0.32)),
    _guessed("attention_flex", "CDNA3, CDNA4", 0.23, "0.87 of 0.3, or less", (0.15, 0.3)),
    # Memory.
    _measured("contiguous", "", 0.88, "BabelStream on H100: Azure, ND_H100_v5", (0.83, 0.92)),
    _measured("contiguous", "Ampere", 0.82, "the same on A100: Azure, ND_A100_v4"),
    _guessed("contiguous", "Blackwell", 0.85, "as on Hopper", (0.75, 0.92)),
    _measured(
        "contiguous", "CDNA3, CDNA4", 0.81, "BabelStream on MI300X: arXiv 2510.27583", (0.73, 0.84)
    ),
    _measured("transposing", "", 0.6, "pytorch/pytorch#133242, #194310", (0.5, 0.75)),
    _measured(
        "transposing", "CDNA3, CDNA4", 0.34, "MI300X: ROCm/TransformerEngine#89", (0.32, 0.45)
    ),
    _guessed("strided", "", 0.3, "pytorch/pytorch#149982, #194310", (0.2, 0.45)),
    _measured("kernel_seconds", "", 2e-06, "torchao, testing/training/roofline_utils.py"),
    # Host.
    _measured("host_seconds_per_kernel", "", 8e-06, "meta-pytorch/tritonbench#1016, #1017"),
    _guessed(
        "host_seconds_per_block", "", 0.001, "FSDP's hooks: pytorch/pytorch#173680", (0.002, 0.0005)
    ),
    _measured("host_seconds_per_parameter", "", 0.00029, "43 ms for 150: microsoft/dion#63"),
    # Collectives. The latencies are NCCL's own model, src/graph/tuning.cc.
    _measured("link", "", 0.73, "8 H100: NVIDIA/Megatron-LM#5596, nccl#1047", (0.66, 0.8)),
    _measured("link", "Blackwell", 0.68, "GB200: Azure", (0.6, 0.72)),
    _guessed("network", "", 0.85, "0.65 to 0.94: nccl#1229, nccl-tests#290", (0.65, 0.94)),
    _measured("collective_seconds", "", 6.6e-06, "NCCL; 15 to 30 us in all for 8 H100"),
    _measured("link_hop_seconds", "", 1.9e-06, "NCCL, protocol LL128"),
    _measured("network_hop_seconds", "", 4e-06, "NCCL, protocol LL128"),
    _measured("small_reduction_seconds", "", 2.2e-05, "8 KB, 8 H100: yifuwang/symm-mem-recipes#3"),
    _guessed("slowest_device", "", 1.04, "they vary by 8 %: arXiv 2208.11035", (1.08, 1.0)),
    _measured("overlap_slowdown", "CDNA3, CDNA4", 0.79, "of MI300X: arXiv 2412.14335", (0.9, 0.5)),
    _guessed("overlap_slowdown", "", 0.19, "average of arXiv 2507.03114", (0.3, 0.08)),
    _guessed(
        "async_tensor_parallel",
        "",
        0.4,
        "meta-pytorch/kraken#2, pytorch/pytorch#143160",
        (0.25, 0.65),
    ),
)


@cache
def constants_of(device: DeviceSpec) -> Mapping[str, Constant]:
    """Return the constants that hold for `device` by their names: measured on it, or published."""
    chosen: dict[str, Constant] = {}
    for holder in ("", device.architecture, device.name):
        chosen |= {each.name: each for each in CONSTANTS if holder in (each.of or ("",))}
    return chosen | {row[0]: Constant(*row) for row in device.measured}


def rates_of(device: DeviceSpec) -> Rates:
    """Return the rates of `device`."""
    return Rates(**{name: each.value for name, each in constants_of(device).items()})


def move_constants(device: DeviceSpec, rates: Rates) -> dict[str, tuple[Rates, ...]]:
    """Return `rates` with the slow end and with the fast end of each constant that has them."""
    return {
        name: tuple(replace(rates, **{name: end}) for end in constant.between)
        for name, constant in constants_of(device).items()
        if constant.between
    }
