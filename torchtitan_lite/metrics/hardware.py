"""What the device could do at best, and how much of its memory the run has taken."""

import os
import resource
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite.config import MetricsConfig

from .cpu_peaks import resolve_cpu_peaks
from .devices import DeviceSpec, lookup_device
from .flops import Precision

# One matmul of this size keeps all of a GPU busy for around a millisecond.
_MATMUL_SIZE = 8192
_MATMULS_TIMED_TOGETHER = 10
_MEASURE_SECONDS = 0.15
_GIB = 2**30


@dataclass(frozen=True)
class Peaks:
    """Dense matmul peaks of one device in TFLOPS by precision, by where they come from. What is not
    known is left out, never guessed."""

    device_name: str
    published: Mapping[Precision, float] = field(default_factory=dict)
    measured: Mapping[Precision, float] = field(default_factory=dict)
    """What matmuls reach on this very device."""
    given: Mapping[Precision, float] = field(default_factory=dict)
    """By the config."""
    approximate: bool = False
    """Whether a utilisation rests on a CPU's measured peaks, which hold to some percent only."""

    @property
    def tflops(self) -> dict[Precision, float]:
        """The peaks to hold the run against: given, else published, else measured."""
        return {**self.measured, **self.published, **self.given}

    def __str__(self) -> str:
        """The line for the log: device, every peak and its origin."""
        if not self.tflops:
            return f"{self.device_name}: peaks unknown, so mfu is n/a"
        origins = {"measured": self.measured, "published": self.published, "given": self.given}
        peaks = [
            f"{name} {tflops:.4g} ({o})"
            for o, known in origins.items()
            for name, tflops in known.items()
        ]
        approximate = "approximate " if self.approximate else ""
        return f"{self.device_name}: {approximate}peaks in TFLOPS: {', '.join(peaks)}"


def published_peaks(device: DeviceSpec | None) -> dict[Precision, float]:
    """The peaks of a data sheet, TFLOPS; none for an unknown device."""
    if device is None:
        return {}
    return _known({"bf16": device.bf16_tflops, "fp8": device.fp8_tflops})


def given_peaks(metrics: MetricsConfig) -> dict[Precision, float]:
    """The peaks that the config gives, TFLOPS."""
    return _known({"bf16": metrics.peak_tflops_bf16, "fp8": metrics.peak_tflops_fp8})


def _known(peaks: Mapping[Precision, float | None]) -> dict[Precision, float]:
    return {precision: tflops for precision, tflops in peaks.items() if tflops is not None}


def resolve_peaks(
    device: torch.device, metrics: MetricsConfig, *, precisions: Collection[Precision], file: Path
) -> Peaks:
    """The peaks of `device`. Those of `precisions` are measured where [metrics] measure_peak asks
    for it, and on CPU where they are not given: there they are kept in `file`. A collective call,
    which all ranks should begin at the same time, as they will train at the same time."""
    given = given_peaks(metrics)
    if device.type == "cpu":
        unknown = set(precisions) - given.keys()
        wanted = set(precisions) if metrics.measure_peak else unknown
        measured = resolve_cpu_peaks(wanted, file=file) if wanted else {}
        return Peaks("CPU", measured=measured, given=given, approximate=bool(unknown))
    name = torch.cuda.get_device_name(device)
    wanted = set(precisions) if metrics.measure_peak else set()
    measured = {precision: measure_peak(precision, device) for precision in sorted(wanted)}
    return Peaks(name, published_peaks(lookup_device(name)), measured, given)


def measure_peak(precision: Precision, device: torch.device) -> float:
    """TFLOPS that large square matmuls reach on the GPU `device` now, in half a second or so: of
    random matrices, because a GPU runs faster on constant ones."""
    shape = (2, _MATMUL_SIZE, _MATMUL_SIZE)
    generator = torch.Generator(device).manual_seed(0)
    a, b = torch.randn(shape, generator=generator, device=device)
    if precision == "fp8":
        from torchao.float8.config import e4m3_dtype

        a, b, one = a.to(e4m3_dtype), b.to(e4m3_dtype).t(), torch.ones((), device=device)
        return _matmul_tflops(
            lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
            device,
        )
    if precision == "bf16":
        a, b = a.bfloat16(), b.bfloat16()
    return _matmul_tflops(lambda: a @ b, device)


def _matmul_tflops(matmul: Callable[[], Tensor], device: torch.device) -> float:
    """TFLOPS of the median matmul: the best one would tell of a moment when other processes
    paused."""
    seconds: list[float] = []
    matmul()  # the first call builds the kernel
    synchronize(device)
    while sum(seconds) < _MEASURE_SECONDS:
        began = time.perf_counter()
        for _ in range(_MATMULS_TIMED_TOGETHER):
            matmul()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return _MATMULS_TIMED_TOGETHER * 2 * _MATMUL_SIZE**3 / statistics.median(seconds) / 1e12


def synchronize(device: torch.device) -> None:
    """Return once `device` has done all that it was asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_gib(device: torch.device) -> float:
    """The most memory held so far, GiB: reserved by torch on a GPU, resident in this process on
    CPU."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB  # Linux reports KiB
    return torch.cuda.max_memory_reserved(device) / _GIB


def host_memory_gib() -> float:
    """The memory of this host, GiB."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _GIB


def total_memory_gib(device: torch.device) -> float | None:
    """A GPU's memory, GiB; None on CPU, whose memory is not the run's alone."""
    if device.type == "cpu":
        return None
    return torch.cuda.get_device_properties(device).total_memory / _GIB
