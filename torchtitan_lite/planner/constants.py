"""The rates and latencies that the planner assumes, each with its source.

None is fitted to a training run. `guessed` means that no measurement of it was found: a plan moves
each guess from its slow to its fast end, and prints the band that results.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from torchtitan_lite.metrics.devices import DeviceSpec

Origin = Literal["data sheet", "counted", "measured", "guessed"]


@dataclass(frozen=True)
class Constant:
    """A value of `Rates`, for every device or for some."""

    name: str
    value: float
    origin: Origin
    source: str
    of: tuple[str, ...] = ()  # names of architectures or devices; (): every other one
    between: tuple[float, float] | None = None  # of a guess: where it makes a step slow, and fast


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
    host_seconds_per_block: float  # hooks, autograd, clipping and AdamW in a step
    link: float  # fraction of the link bandwidth that large collectives reach within a node
    network: float  # fraction of the network bandwidth, between nodes
    collective_seconds: float  # latency of a collective: start,
    link_hop_seconds: float  # each step of its ring within a node,
    network_hop_seconds: float  # and each step to another node
    small_reduction_seconds: float  # an all-reduce of a few KB within a node
    overlap_slowdown: float  # compute time lost during a second of communication beside it
    async_tensor_parallel: float  # part of tensor parallelism's communication that async TP hides


# The row of a device replaces that of its architecture, which replaces the one for all.
CONSTANTS = (
    # Matmuls, thermally settled and on random data: power limits what they reach.
    Constant("bf16_matmul", 0.7, "guessed", "between the architectures below", between=(0.5, 0.9)),
    Constant(
        "bf16_matmul", 0.82, "measured", "Azure/AI-benchmarking-guide, ND_A100_v4", ("Ampere",)
    ),
    Constant(
        "bf16_matmul",
        0.77,
        "measured",
        "0.73 to 0.80 with its last wave: pytorch/FBGEMM#2766, zzc0721/torch-performance-test-data#79",
        ("Hopper",),
    ),
    Constant("bf16_matmul", 0.57, "measured", "pytorch/ao#3342", ("H100 PCIe",)),
    Constant("bf16_matmul", 0.9, "guessed", "few units, much power", ("H20",), between=(0.8, 0.95)),
    Constant(
        "bf16_matmul", 0.66, "measured", "0.63 to 0.67: pytorch/ao#2427, vllm#19566", ("Blackwell",)
    ),
    Constant(
        "bf16_matmul", 0.47, "measured", "0.38 to 0.51: ROCm/TransformerEngine#73", ("CDNA3",)
    ),
    Constant(
        "bf16_matmul",
        0.58,
        "guessed",
        "0.63 at the best shape: stas00/ml-engineering",
        ("CDNA4",),
        (0.5, 0.65),
    ),
    Constant("fp8_matmul", 0.6, "guessed", "between the architectures below", between=(0.4, 0.8)),
    Constant(
        "fp8_matmul",
        0.68,
        "measured",
        "0.62 to 0.70 with its last wave: Azure/AI-benchmarking-guide, ND_H100_v5; pytorch/pytorch#143465",
        ("Hopper",),
    ),
    Constant(
        "fp8_matmul", 0.5, "guessed", "as in bf16, limited by power", ("H100 PCIe",), (0.42, 0.58)
    ),
    Constant("fp8_matmul", 0.85, "guessed", "as in bf16", ("H20",), between=(0.7, 0.95)),
    Constant(
        "fp8_matmul",
        0.59,
        "measured",
        "0.57 with its last wave: Azure/AI-benchmarking-guide, ND_GB200_v6; vllm#19566; MXFP8: triton#9044",
        ("Blackwell",),
    ),
    Constant(
        "fp8_matmul", 0.4, "guessed", "hipBLASLt, 0.33 to 0.49", ("CDNA3",), between=(0.33, 0.49)
    ),
    Constant(
        "fp8_matmul",
        0.45,
        "guessed",
        "AMD-AGI/Primus-Turbo#274 has 0.23 to 0.40 in MXFP8",
        ("CDNA4",),
        (0.35, 0.55),
    ),
    Constant("slow_accumulation", 1.0, "measured", "no such switch: pytorch/pytorch#123987"),
    Constant("slow_accumulation", 1.15, "measured", "1.1 to 1.2: pytorch/ao#2377", ("Hopper",)),
    Constant(
        "row_scales", 1.04, "measured", "1.00 to 1.10: pytorch/FBGEMM#2764; vllm#19566 on B200"
    ),
    Constant(
        "matmul_seconds",
        4e-6,
        "measured",
        "squares of 1,024 and 2,048: Azure/AI-benchmarking-guide, pytorch/ao#2427",
    ),
    # Attention.
    Constant(
        "attention_cudnn", 0.5, "measured", "0.54 and 0.52 on H100: arXiv 2407.08608, fig. 5, 6"
    ),
    Constant(
        "attention_cudnn",
        0.48,
        "guessed",
        "FlashAttention 4 has 0.54: Dao-AILab/flash-attention#2280",
        ("Blackwell",),
        (0.42, 0.55),
    ),
    Constant(
        "attention_flash", 0.55, "guessed", "FlashAttention 2: arXiv 2307.08691", (), (0.45, 0.65)
    ),
    Constant(
        "attention_flash", 0.58, "measured", "A100: arXiv 2307.08691, fig. 4 to 6", ("Ampere",)
    ),
    Constant("attention_flash", 0.32, "measured", "H100: arXiv 2407.08608, fig. 5, 6", ("Hopper",)),
    Constant(
        "attention_flash", 0.15, "measured", "Azure/AI-benchmarking-guide, GB200", ("Blackwell",)
    ),
    Constant(
        "attention_flash",
        0.27,
        "guessed",
        "AOTriton; AITER has 0.35: ROCm/aiter, op_tests/cpp/mha",
        ("CDNA3", "CDNA4"),
        (0.18, 0.35),
    ),
    Constant(
        "attention_flex", 0.48, "guessed", "0.87 of FlashAttention 2: PyTorch", (), (0.38, 0.55)
    ),
    Constant(
        "attention_flex", 0.28, "guessed", "0.87 of FlashAttention 2", ("Hopper",), (0.24, 0.32)
    ),
    Constant(
        "attention_flex", 0.23, "guessed", "0.87 of AOTriton's", ("CDNA3", "CDNA4"), (0.15, 0.3)
    ),
    # Memory.
    Constant(
        "contiguous", 0.88, "measured", "BabelStream copy and triad on H100: Azure, ND_H100_v5"
    ),
    Constant("contiguous", 0.82, "measured", "the same on A100: Azure, ND_A100_v4", ("Ampere",)),
    Constant("contiguous", 0.85, "guessed", "as on Hopper", ("Blackwell",), between=(0.75, 0.92)),
    Constant("contiguous", 0.8, "guessed", "as on A100", ("CDNA3", "CDNA4"), between=(0.7, 0.88)),
    Constant("transposing", 0.75, "measured", "tiled, GH200: pytorch/pytorch#194310"),
    Constant(
        "strided", 0.35, "guessed", "untiled 0.16 to 0.28: pytorch/pytorch#194310", (), (0.2, 0.45)
    ),
    Constant("kernel_seconds", 2e-6, "measured", "torchao, testing/training/roofline_utils.py"),
    # Host.
    Constant("host_seconds_per_kernel", 8e-6, "measured", "meta-pytorch/tritonbench#1016, #1017"),
    Constant(
        "host_seconds_per_block",
        2.5e-3,
        "guessed",
        "2 ms on CPU, 3.5 ms with CUDA on a slow core",
        between=(3.5e-3, 1.5e-3),
    ),
    # Collectives: NCCL's latencies are its own model, src/graph/tuning.cc.
    Constant(
        "link",
        0.73,
        "measured",
        "8 H100, 2 MiB to 1 GiB: NVIDIA/Megatron-LM#5596, NVIDIA/nccl#1047",
    ),
    Constant("link", 0.68, "measured", "GB200: Azure/AI-benchmarking-guide", ("Blackwell",)),
    Constant(
        "network", 0.85, "guessed", "0.65 to 0.94: nccl#1229, nccl-tests#290", (), (0.65, 0.94)
    ),
    Constant("collective_seconds", 6.6e-6, "measured", "NCCL; 15 to 30 us in all for 8 H100"),
    Constant("link_hop_seconds", 1.9e-6, "measured", "NCCL, protocol LL128"),
    Constant("network_hop_seconds", 4e-6, "measured", "NCCL, protocol LL128"),
    Constant(
        "small_reduction_seconds", 22e-6, "measured", "8 KB, 8 H100: yifuwang/symm-mem-recipes#3"
    ),
    Constant(
        "overlap_slowdown", 0.19, "guessed", "average of arXiv 2507.03114", between=(0.3, 0.08)
    ),
    Constant(
        "async_tensor_parallel",
        0.4,
        "guessed",
        "from kernels: meta-pytorch/kraken#2, pytorch/pytorch#143160",
        between=(0.25, 0.65),
    ),
)


@cache
def constants_of(device: DeviceSpec) -> Mapping[str, Constant]:
    """Return the constants that hold for `device` by their names."""
    chosen: dict[str, Constant] = {}
    for holder in ("", device.architecture, device.name):
        chosen |= {each.name: each for each in CONSTANTS if holder in (each.of or ("",))}
    return chosen


def rates_of(device: DeviceSpec) -> Rates:
    """Return the rates of `device`."""
    return Rates(**{name: each.value for name, each in constants_of(device).items()})


def guesses_of(device: DeviceSpec) -> Iterator[tuple[Rates, Rates]]:
    """Return, for each guessed constant, the rates with its slow end and those with its fast."""
    rates = rates_of(device)
    for name, constant in constants_of(device).items():
        if constant.between:
            slow, fast = constant.between
            yield replace(rates, **{name: slow}), replace(rates, **{name: fast})
