"""The rates and latencies that the planner assumes, each with its source, and its errors.

The rates come from measurements of single kernels and collectives; only AMD's `in_training` is
fitted to training runs. Where none was found, the source is a guess. A name with # is a GitHub
issue or pull request. "Azure" is Azure/AI-benchmarking-guide, "nccl", "nccl-tests" NVIDIA's.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torchtitan_lite.catalog.devices import DeviceSpec

RATE_RANGE = (0.85, 1.07)
"""The middle 80 % of published rates, over predicted ones, of runs without context or pipeline
parallelism. tests/unit/test_published.py computes the three ranges."""
SPLIT_RATE_RANGE = (0.78, 1.22)  # with context or pipeline parallelism
SPEEDUP_RANGE = (0.93, 1.13)  # of speedups of float8 over bf16
USABLE_MEMORY = 0.975
"""Part of the memory on a data sheet that torch's allocator can reserve. Of an H100's 80 GiB, torch
finds 79.1 (huggingface/trl#2688), less CONTEXT_GIB."""
CONTEXT_GIB = 1.0
"""What the CUDA context and NCCL take of what torch finds, on 8 H100s (NVIDIA/nccl#1685)."""


@dataclass(frozen=True)
class Rates:
    """What kernels, collectives and the host reach, where MEASURED has nothing better."""

    # Fractions of the peaks that large matmuls reach, thermally settled and on random data; 3 % of
    # what the sources measured is lost to the last wave of tiles.
    bf16_matmul: float = 0.68  # guess: between the architectures below
    fp8_matmul: float = 0.58  # with fast accumulation and a scale per tensor; guess: likewise
    slow_accumulation: float = 1.0  # time with sums in float32, over fast; pytorch/pytorch#123987
    row_scales: float = 1.04  # time with a scale per row; pytorch/FBGEMM#2764, vllm#19566

    # Fractions of the bf16 peak, of causal attention, forward and backward together.
    attention_cudnn: float = 0.5  # H100: arXiv 2407.08608, fig. 5, 6
    attention_flash: float = 0.55  # guess: FlashAttention 2, arXiv 2307.08691
    attention_flex: float = 0.48  # guess: 0.87 of FlashAttention 2, PyTorch

    # Other kernels, and the host.
    contiguous: float = 0.88  # fraction of the bandwidth; BabelStream on H100: Azure, ND_H100_v5
    kernel_seconds: float = 4e-6  # beside arithmetic or bytes; Azure, pytorch/ao#2427
    host_seconds_per_block: float = 0.002  # of a microbatch, or the update; guess: tritonbench#1016
    in_training: float = 1.04  # time over that of kernels alone; guess: arXiv 2208.11035

    # Fractions of the bandwidth of links that large collectives reach; seconds of a step of a ring.
    link: float = 0.73  # in a node; 8 H100: NVIDIA/Megatron-LM#5596, nccl#1047
    network: float = 0.85  # between nodes; guess: 0.65 to 0.94, nccl#1229, nccl-tests#290
    hop_seconds: float = 2.5e-6  # 15 to 30 us in all for 8 H100, NCCL's src/graph/tuning.cc
    overlap_slowdown: float = 0.19  # of a second beside communication; guess: arXiv 2507.03114
    async_tensor_parallel: float = 0.4  # part that it hides; guess: kraken#2, pytorch#143160


MEASURED: dict[str, dict[str, float]] = {
    "Ampere": {
        "bf16_matmul": 0.8,  # Azure, ND_A100_v4
        "attention_flash": 0.58,  # arXiv 2307.08691, fig. 4 to 6
        "contiguous": 0.82,  # BabelStream: Azure, ND_A100_v4
    },
    "Hopper": {
        "bf16_matmul": 0.75,  # pytorch/FBGEMM#2766
        "fp8_matmul": 0.66,  # Azure, ND_H100_v5; pytorch/pytorch#143465
        "slow_accumulation": 1.15,  # 1.1 to 1.2: pytorch/ao#2377
        "attention_flash": 0.32,  # arXiv 2407.08608, fig. 5, 6
        "attention_flex": 0.28,  # guess: as slow
    },
    "H100 500W": {
        "bf16_matmul": 0.59,  # pytorch/FBGEMM#2546
        "fp8_matmul": 0.57,  # pytorch/FBGEMM#2546, with a scale per row
        "row_scales": 1.0,
        "attention_cudnn": 0.45,  # 0.9 of 700 W: tritonbench#141
    },
    "H100 PCIe": {"bf16_matmul": 0.55, "fp8_matmul": 0.48},  # pytorch/ao#3342; limited by power
    "Blackwell": {
        "bf16_matmul": 0.64,  # pytorch/ao#2427, vllm#19566
        "fp8_matmul": 0.57,  # Azure, ND_GB200_v6; vllm#19566
        "attention_flash": 0.15,  # Azure, GB200
        "link": 0.68,  # GB200: Azure
    },
    "RTX 4090": {"bf16_matmul": 0.92, "fp8_matmul": 0.92},  # pytorch/pytorch#155991
    "RTX 5090": {"bf16_matmul": 0.92, "fp8_matmul": 0.92},  # xzwgit/gpu-flops-bench
    "CDNA3": {
        "bf16_matmul": 0.45,  # AMD-AGI/Primus-Turbo
        "fp8_matmul": 0.39,  # AMD-AGI/Primus-Turbo, Azure
        "attention_flash": 0.3,  # guess: AITER, AMD-AGI/Primus-Turbo
        "attention_flex": 0.28,  # guess: as slow
        "contiguous": 0.81,  # BabelStream on MI300X: arXiv 2510.27583
        "in_training": 1.445,  # 4 runs: pytorch/ao, float8/README.md
        "overlap_slowdown": 0.79,  # MI300X: arXiv 2412.14335
    },
}
"""Rates by architecture, and by device, which goes before its architecture."""
MEASURED["CDNA4"] = MEASURED["CDNA3"]


# ----- Casts to float8, by recipe: COMPILED has a row for each that was counted -----


class Casts(NamedTuple):
    """Bytes that casting a linear's operands adds to a block in bf16, per element of the tensor.

    They are bytes of kernels that read and write rows. A byte counts 1.5 if the kernel writes the
    transpose of what it reads, and 3 if its stores are not coalesced: such kernels reach 0.6 and
    0.3 of an H100's bandwidth (pytorch/pytorch#133242, #149982, #194310)."""

    input: tuple[float, float]  # in the forward and in the backward pass
    grad_output: float  # for both gradients
    weight: float  # for all three matmuls


# A cast reads 2 bytes and writes 1, and backward casts again, into the layout of its matmuls.
# Inductor fuses the casts of inputs and gradients with the norms, SwiGLU and rotary embeddings
# beside them, so that their figures are means over a block: counted in its kernels for a block of
# Llama 3 8B on Hopper (torch 2.13, torchao 0.18). tests/deviceless/test_deviceless_kernels.py
# counts them again.
COMPILED = {
    # One scale per tensor needs its amax first: 2 bytes more.
    "tensorwise": Casts(input=(3, 3.6), grad_output=6, weight=9.5),
    # A column needs an amax of its own. torchao multiplies row-wise gradients unscaled, to avoid a
    # slow kernel, and scales them afterwards.
    "rowwise": Casts(input=(-0.4, 5.9), grad_output=18.4, weight=13.5),
    # grad_weight needs each input in bf16 too, which is stored beside its cast.
    "rowwise_with_gw_hp": Casts(input=(1.3, 0), grad_output=3, weight=9.5),
    "mxfp8": Casts(input=(3, 3), grad_output=6, weight=6),
    # The stores of a cast by columns are not coalesced. A weight is read twice.
    "blockwise": Casts(input=(0.6, 9.8), grad_output=9.6, weight=9.5),
}
# Eager, each operator of a cast reads and writes the whole tensor, mostly in float32: abs, max, to
# float32, multiply, clamp, to float8. The casts of MXFP8 are kernels of torchao, compiled or not.
EAGER = Casts(input=(33, 33), grad_output=66, weight=66)


def rates_of(device: DeviceSpec) -> Rates:
    """Return the rates of `device`: published, or guessed."""
    chosen: dict[str, Any] = {}
    for holder in (device.architecture, device.name):
        chosen |= MEASURED.get(holder, {})
    return Rates(**chosen)
