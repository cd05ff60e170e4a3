"""The rates and latencies that the planner assumes, each with its source.

None is fitted to a training run. `guessed` means that no measurement of it was found: a plan moves
each guess from its slow to its fast end, and prints the band that results.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from torchtitan_lite.metrics.devices import Architecture

Origin = Literal["data sheet", "counted", "measured", "guessed"]


@dataclass(frozen=True)
class Constant:
    """A value of `Rates`, for all architectures or some."""

    name: str
    value: float
    origin: Origin
    source: str
    architectures: tuple[Architecture, ...] = ()
    between: tuple[float, float] | None = None  # of a guess: where it makes a step slow, and fast


@dataclass(frozen=True)
class Rates:
    """What kernels, collectives and the host reach on an architecture."""

    bf16_matmul: float  # fraction of the bf16 peak that large matmuls reach
    fp8_matmul: float  # fraction of the fp8 peak, with fast accumulation and a scale per tensor
    slow_accumulation: float  # time of a float8 matmul that accumulates in float32, over fast
    row_scales: float  # time of a float8 matmul with a scale per row, over one per tensor
    tile_seconds: float  # to fill and drain the pipeline of a matmul's tile
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
    overlap_slowdown: float  # compute time lost during a second of communication beside it
    async_tensor_parallel: float  # part of tensor parallelism's communication that async TP hides


_GPUS_WITH_CUDNN: tuple[Architecture, ...] = ("Hopper", "Blackwell")

# An architecture's own row replaces the one for all.
CONSTANTS = (
    Constant("bf16_matmul", 0.77, "guessed", "prior", between=(0.65, 0.85)),
    Constant("fp8_matmul", 0.66, "guessed", "prior", between=(0.5, 0.75)),
    Constant("slow_accumulation", 1.15, "measured", "fast is 1.1 to 1.2x: pytorch/ao#2377"),
    Constant("row_scales", 1.05, "guessed", "prior", between=(1.15, 1.0)),
    Constant("tile_seconds", 1.5e-6, "guessed", "prior", between=(3e-6, 0.5e-6)),
    Constant("attention_cudnn", 0.49, "measured", "prior"),
    Constant("attention_flash", 0.34, "measured", "335 of 989 TFLOPS, FlashAttention-2 on H100"),
    Constant("attention_flex", 0.3, "guessed", "prior", between=(0.2, 0.4)),
    Constant("contiguous", 0.88, "measured", "prior"),
    Constant("transposing", 0.72, "measured", "prior"),
    Constant("strided", 0.45, "measured", "prior"),
    Constant("kernel_seconds", 2e-6, "measured", "torchao, testing/training/roofline_utils.py"),
    Constant("host_seconds_per_kernel", 8e-6, "measured", "meta-pytorch/tritonbench#1017"),
    Constant("host_seconds_per_block", 2e-3, "measured", "on CPU"),
    Constant("link", 0.78, "measured", "prior"),
    Constant("network", 0.9, "measured", "prior"),
    Constant("collective_seconds", 8.4e-6, "measured", "NCCL, src/graph/tuning.cc"),
    Constant("link_hop_seconds", 3.4e-6, "measured", "NCCL, src/graph/tuning.cc"),
    Constant("network_hop_seconds", 14e-6, "measured", "NCCL, src/graph/tuning.cc"),
    Constant("overlap_slowdown", 0.15, "guessed", "prior", between=(0.3, 0.05)),
    Constant("async_tensor_parallel", 0.5, "guessed", "prior", between=(0.3, 0.7)),
)


@cache
def constants_of(architecture: Architecture) -> Mapping[str, Constant]:
    """Return the constants that hold for `architecture` by their names."""
    general = {each.name: each for each in CONSTANTS if not each.architectures}
    own = {each.name: each for each in CONSTANTS if architecture in each.architectures}
    return general | own


def rates_of(architecture: Architecture) -> Rates:
    """Return the rates of `architecture`."""
    return Rates(**{name: each.value for name, each in constants_of(architecture).items()})


def guesses_of(architecture: Architecture) -> Iterator[tuple[Rates, Rates]]:
    """Return, for each guessed constant, the rates with its slow end and those with its fast."""
    rates = rates_of(architecture)
    for name, constant in constants_of(architecture).items():
        if constant.between:
            slow, fast = constant.between
            yield replace(rates, **{name: slow}), replace(rates, **{name: fast})
