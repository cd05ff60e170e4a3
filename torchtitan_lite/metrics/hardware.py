"""The device's peak FLOPS, and the memory that the run has taken of it."""

import os
import resource
import statistics
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtitan_lite.config import MetricsConfig

from .cpu_peaks import resolve_cpu_peaks
from .devices import DeviceSpec, lookup_device
from .flops import Precision

# One matmul of this size keeps all of a GPU busy for about a millisecond.
_MATMUL_SIZE = 8192
_MATMULS_TIMED_TOGETHER = 10
_MEASURE_SECONDS = 0.15
_GIB = 2**30


@dataclass(frozen=True)
class Peaks:
    """Dense matmul peaks of one device in TFLOPS by precision, grouped by their origin. An unknown
    peak is left out, never guessed."""

    device_name: str
    published: Mapping[Precision, float] = field(default_factory=dict)
    """From the data sheet."""
    measured: Mapping[Precision, float] = field(default_factory=dict)
    """What matmuls reach on this very device."""
    given: Mapping[Precision, float] = field(default_factory=dict)
    """From the config."""
    approximate: bool = False
    """Whether utilisations rest on a CPU's measured peaks, which vary by a few percent."""

    @property
    def tflops(self) -> dict[Precision, float]:
        """The peaks that utilisations refer to: given, else published, else measured."""
        return {**self.measured, **self.published, **self.given}

    def __str__(self) -> str:
        """Describe the device and every peak with its origin, for the log."""
        if not self.tflops:
            return f"{self.device_name}: peaks unknown, so mfu is n/a"
        origins = {"measured": self.measured, "published": self.published, "given": self.given}
        peaks = [
            f"{precision} {tflops:.4g} ({origin})"
            for origin, known in origins.items()
            for precision, tflops in known.items()
        ]
        approximate = "approximate " if self.approximate else ""
        return f"{self.device_name}: {approximate}peaks in TFLOPS: {', '.join(peaks)}"


def published_peaks(device: DeviceSpec | None) -> dict[Precision, float]:
    """Return the peaks of a data sheet in TFLOPS; none for an unknown device."""
    return _known(device.bf16_tflops, device.fp8_tflops) if device else {}


def given_peaks(metrics: MetricsConfig) -> dict[Precision, float]:
    """Return the peaks that the config gives, in TFLOPS."""
    return _known(metrics.peak_tflops_bf16, metrics.peak_tflops_fp8)


def _known(bf16: float | None, fp8: float | None) -> dict[Precision, float]:
    peaks: dict[Precision, float | None] = {"bf16": bf16, "fp8": fp8}
    return {precision: tflops for precision, tflops in peaks.items() if tflops is not None}


def resolve_peaks(
    device: torch.device, metrics: MetricsConfig, *, precisions: Collection[Precision], file: Path
) -> Peaks:
    """Return the peaks of `device`, measuring those of `precisions` where necessary.

    A GPU's are measured if [metrics] measure_peak is set, a CPU's also if they are not given; a
    CPU's are kept in `file`. A collective call: ranks measure at the same time, as they train.
    """
    given, wanted = given_peaks(metrics), set(precisions) if metrics.measure_peak else set()
    if device.type == "cpu":
        unknown = set(precisions) - given.keys()
        wanted |= unknown
        measured = resolve_cpu_peaks(wanted, file=file) if wanted else {}
        return Peaks("CPU", measured=measured, given=given, approximate=bool(unknown))
    name = torch.cuda.get_device_name(device)
    measured = {precision: measure_peak(precision, device) for precision in sorted(wanted)}
    return Peaks(name, published_peaks(lookup_device(name)), measured, given)


def measure_peak(precision: Precision, device: torch.device) -> float:
    """Return the TFLOPS that large square matmuls reach on the GPU `device`, within half a second.

    The matrices are random, because a GPU is faster on constant ones. The result is a median: the
    best time could be from a moment at which other processes paused.
    """
    shape = (2, _MATMUL_SIZE, _MATMUL_SIZE)
    generator = torch.Generator(device).manual_seed(0)
    a, b = torch.randn(shape, generator=generator, device=device)
    if precision == "fp8":
        from torchao.float8.config import e4m3_dtype  # slow to import

        a, b, one = a.to(e4m3_dtype), b.to(e4m3_dtype).t(), torch.ones((), device=device)
        options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        matmul = partial(torch._scaled_mm, a, b, one, one, **options)
    else:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        matmul = partial(torch.matmul, a.to(dtype), b.to(dtype))

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
    """Wait until `device` has done all requested work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory so far, GiB: reserved by torch on a GPU, resident on CPU."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB  # Linux reports KiB
    return torch.cuda.max_memory_reserved(device) / _GIB


def host_memory_gib() -> float:
    """Return the memory of this host, GiB."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _GIB


def total_memory_gib(device: torch.device) -> float | None:
    """Return a GPU's memory, GiB; None on CPU, where other processes share the memory."""
    if device.type == "cpu":
        return None
    return torch.cuda.get_device_properties(device).total_memory / _GIB
