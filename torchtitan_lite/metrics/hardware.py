"""What the device could do at best, and how much of its memory the run has taken."""

import re
import resource
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from .flops import Precision

# Dense peaks of the vendors' data sheets in TFLOPS: a pattern of the device's name, as torch reports it or the vendor
# writes it, bf16, and fp8 where the device has it. A name must match in full: "MIG", "NVL", "Laptop GPU", "D" or an
# unlisted memory behind a known name is another device, with a peak of its own.
_PUBLISHED: tuple[tuple[str, float, float | None], ...] = (
    (r"NVIDIA A100(-SXM4-\d+GB|-PCIE-40GB| 80GB PCIe)", 312, None),
    (r"NVIDIA H100( SXM5?| 80GB HBM3)", 989, 1979),
    (r"NVIDIA H200( SXM)?", 989, 1979),
    (r"NVIDIA H100 PCIe", 756, 1513),
    (r"NVIDIA H100 NVL", 835, 1670),
    (r"NVIDIA H20", 148, 296),
    (r"NVIDIA B(200|300)( SXM6 AC)?", 2250, 4500),
    (r"NVIDIA GB(200|300)", 2500, 5000),
    (r"AMD Instinct MI(300|325)X", 1307, 2615),
    (r"AMD Instinct MI350X", 2300, 4600),
    (r"AMD Instinct MI355X", 2500, 5000),
    (r"NVIDIA L40S", 362, 733),
    (r"NVIDIA L40", 181, 362),
    (r"NVIDIA L4", 121, 242),
    (r"NVIDIA GeForce RTX 4090", 165, 330),
    (r"NVIDIA GeForce RTX 5090", 209.5, 419),
)

# Three bf16 matrices of this size take 6 MiB: enough work to hide the call, and a slow core still times several.
_MATMUL_SIZE = 1024
_MEASURE_SECONDS = 0.3
_GIB = 2**30


@dataclass(frozen=True)
class Peaks:
    """Dense matmul peaks of one device, and where they come from."""

    device_name: str
    origin: Literal["published", "measured", "unknown"]
    tflops: Mapping[Precision, float] = field(default_factory=dict)
    """TFLOPS by precision; a precision without a known peak is not in it."""

    def __str__(self) -> str:
        """The line for the log: device, origin and every peak."""
        if not self.tflops:
            return f"{self.device_name}: peaks unknown, so mfu is n/a"
        peaks = ", ".join(f"{precision} {tflops:.4g}" for precision, tflops in self.tflops.items())
        return f"{self.device_name}: {self.origin} peaks {peaks} TFLOPS"


def lookup_peaks(device_name: str) -> Peaks:
    """The published peaks of the device that torch calls `device_name`; without figures if that is not in the table."""
    for pattern, bf16, fp8 in _PUBLISHED:
        if re.fullmatch(pattern, device_name, re.IGNORECASE):
            tflops: dict[Precision, float] = {"bf16": bf16} if fp8 is None else {"bf16": bf16, "fp8": fp8}
            return Peaks(device_name, "published", tflops)
    return Peaks(device_name, "unknown")


def measure_cpu_peaks() -> Peaks:
    """What matmuls reach on this process's CPU threads now. All ranks of a machine should measure at the same time, as
    they will train at the same time."""
    return Peaks("CPU", "measured", {"bf16": _matmul_tflops(torch.bfloat16), "fp32": _matmul_tflops(torch.float32)})


def resolve_peaks(device: torch.device) -> Peaks:
    """The peaks of `device`: measured on CPU, looked up by name on a GPU."""
    return measure_cpu_peaks() if device.type == "cpu" else lookup_peaks(torch.cuda.get_device_name(device))


def peak_memory_gib(device: torch.device) -> float:
    """The most memory held so far, GiB: reserved by torch on a GPU, resident in this process on CPU."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB  # Linux reports KiB
    return torch.cuda.max_memory_reserved(device) / _GIB


def total_memory_gib(device: torch.device) -> float | None:
    """A GPU's memory, GiB; None on CPU, whose memory is not the run's alone."""
    if device.type == "cpu":
        return None
    return torch.cuda.get_device_properties(device).total_memory / _GIB


def _matmul_tflops(dtype: torch.dtype) -> float:
    """TFLOPS of the median square matmul: the best one would tell of a moment when other processes paused."""
    a, b = torch.ones(2, _MATMUL_SIZE, _MATMUL_SIZE, dtype=dtype)
    a @ b  # the first call builds the kernel
    seconds: list[float] = []
    while sum(seconds) < _MEASURE_SECONDS:
        began = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - began)
    return 2 * _MATMUL_SIZE**3 / statistics.median(seconds) / 1e12
