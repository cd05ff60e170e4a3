"""The device: its peak FLOPS, given, published or measured, its memory, and its clock.

A CPU's peak is measured at each start, by all ranks at once: the best of many short matmuls on one
thread, times the threads that the rank can run. A matmul of a millisecond ends between two
interruptions, even on a busy machine; on several threads it would wait for the slowest.
"""

import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtitan_lite.base.collectives import on_all_ranks
from torchtitan_lite.catalog.devices import DeviceSpec, Precision, lookup_device
from torchtitan_lite.config import MetricsConfig

_SECONDS, _MATMULS = 0.05, {"bf16": 384, "fp32": 256}
"""How long a CPU's matmuls are measured, and their size, each of about a millisecond."""
_GIB = 2**30


@dataclass(frozen=True)
class Peaks:
    """Dense matmul peaks of a device in TFLOPS, by origin. An unknown one is left out."""

    device_name: str
    published: Mapping[Precision, float] = field(default_factory=dict)
    measured: Mapping[Precision, float] = field(default_factory=dict)
    given: Mapping[Precision, float] = field(default_factory=dict)
    """By the config."""
    approximate: bool = False
    """Whether utilisations rest on a CPU's measured peaks, which vary by a few percent."""

    @property
    def tflops(self) -> dict[Precision, float]:
        """The peaks that utilisations refer to: given, else published, else measured."""
        return {**self.measured, **self.published, **self.given}

    def utilisation(self, tps: float, flops: Mapping[Precision, float]) -> float | None:
        """Return the utilisation in percent at `tps` tokens per second of `flops` each, with each
        precision at its own peak; None if one that is used has no known peak, or above 100 % of an
        approximate peak, which then was measured too low."""
        used = {precision: count for precision, count in flops.items() if count}
        if not used.keys() <= self.tflops.keys():
            return None
        ideal_s = sum(count / self.tflops[name] for name, count in used.items()) / 1e12
        percent = 100 * tps * ideal_s
        return None if percent > 100 and self.approximate else percent

    def __str__(self) -> str:
        """Describe the device and every peak with its origin, for the log."""
        if not self.tflops:
            return f"{self.device_name}: peaks unknown, so mfu is n/a"
        peaks = [
            f"{precision} {tflops:.4g} ({origin})"
            for origin in ("measured", "published", "given")
            for precision, tflops in getattr(self, origin).items()
        ]
        approximate = "approximate " if self.approximate else ""
        return f"{self.device_name}: {approximate}peaks in TFLOPS: {', '.join(peaks)}"


def published_peaks(device: DeviceSpec | None) -> dict[Precision, float]:
    """Return the peaks of a data sheet in TFLOPS; none for an unknown device."""
    return _known(bf16=device.bf16_tflops, fp8=device.fp8_tflops) if device else {}


def given_peaks(metrics: MetricsConfig) -> dict[Precision, float]:
    """Return the peaks that the config gives, in TFLOPS."""
    return _known(bf16=metrics.peak_tflops_bf16, fp8=metrics.peak_tflops_fp8)


def _known(**peaks: float | None) -> dict[Any, float]:
    return {precision: tflops for precision, tflops in peaks.items() if tflops is not None}


def find_peaks(
    device: torch.device, metrics: MetricsConfig | None = None, *, precisions: Collection[Precision]
) -> Peaks:
    """Return the peaks of `device`. On a CPU those of `precisions` that are not given are measured.
    A collective call: all ranks measure at the same time."""
    given = given_peaks(metrics or MetricsConfig())
    if device.type == "cpu":
        unknown = set(precisions) - given.keys()
        measured = measure_cpu_peaks(sorted(unknown))
        return Peaks("CPU", measured=measured, given=given, approximate=bool(unknown))
    name = torch.cuda.get_device_name(device)
    return Peaks(name, published=published_peaks(lookup_device(name)), given=given)


def measure_peak(precision: Precision) -> float:
    """Return the TFLOPS that square matmuls of `precision` reach on a CPU with the threads that
    torch uses: the best of many."""
    size, dtype = _MATMULS[precision], torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = torch.ones(2, size, size, dtype=dtype)
    torch.matmul(a, b)  # the first call builds the kernel
    seconds: list[float] = []
    while sum(seconds) < _SECONDS:
        began = time.perf_counter()
        torch.matmul(a, b)
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds) / 1e12


def measure_cpu_peaks(precisions: Sequence[Precision]) -> dict[Precision, float]:
    """Return the peaks of the fastest rank in TFLOPS. A collective call."""
    threads, used = _rank_threads(), torch.get_num_threads()
    torch.set_num_threads(1)
    ranks = on_all_ranks(lambda: [threads * measure_peak(name) for name in precisions])
    torch.set_num_threads(used)
    return {name: max(peaks) for name, *peaks in zip(precisions, *ranks, strict=True)}


def _rank_threads() -> float:
    """Return how many threads this rank can run at once: at most its share of the cores, each
    divided among the ranks of the host that may use it. A collective call."""
    host, cores = socket.gethostname(), os.sched_getaffinity(0)
    ranks = on_all_ranks(lambda: (host, cores))
    users = Counter(core for other, theirs in ranks if other == host for core in theirs)
    return min(torch.get_num_threads(), sum(1 / users[core] for core in cores))


class HostEvent(torch.cpu.Event):
    """The `torch.cuda.Event` of a CPU, which is never behind: a call returns when it is done."""

    def __init__(self) -> None:
        self.time_s = time.perf_counter()

    def elapsed_time(self, end: "HostEvent") -> float:
        return 1000 * (end.time_s - self.time_s)


def record_cuda_event() -> torch.cuda.Event:
    """Record an event in the current stream; times between such events are the device's."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory so far, GiB: reserved by torch on a GPU, resident on CPU."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB  # Linux reports KiB
    return torch.cuda.max_memory_reserved(device) / _GIB


def total_memory_gib(device: torch.device, *, sharing: int = 1) -> float:
    """Return a GPU's memory, GiB, or on CPU the part of the host's of each of `sharing` ranks."""
    if device.type == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _GIB / sharing
    return torch.cuda.get_device_properties(device).total_memory / _GIB
