"""The device's peak FLOPS, given, published or measured, and the memory that the run takes of it.

A CPU has no data sheet of matmul peaks, and other processes may use its cores at any time. So its
peak is measured by all ranks at once, and kept in the run folder. A rank's peak is the best of many
short matmuls on one thread, times the threads that the rank can run: a matmul of a millisecond ends
between two interruptions, even on a busy machine, while on several threads it would wait for the
slowest of them.
"""

import os
import platform
import resource
import socket
import statistics
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field

from torchtitan_lite.base.collectives import on_all_ranks, on_rank0
from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.files import replace_file, usable_cores
from torchtitan_lite.base.jsonfile import read_regular
from torchtitan_lite.base.logger import logger
from torchtitan_lite.catalog.devices import DeviceSpec, Precision, lookup_device
from torchtitan_lite.config import MetricsConfig

_MEASURE_SECONDS = 0.25
_GPU_MATMULS = (8192, 10)
_CPU_MATMULS = {"bf16": (384, 1), "fp32": (256, 1)}
"""Size of the matmuls to measure, and how many are timed together. One keeps all of a GPU busy for
about a millisecond, and takes half a millisecond on a fast core."""
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
        measured = find_cpu_peaks(wanted, file=file) if wanted else {}
        return Peaks("CPU", measured=measured, given=given, approximate=bool(unknown))
    name = torch.cuda.get_device_name(device)
    measured = {precision: measure_peak(precision, device) for precision in sorted(wanted)}
    return Peaks(name, published_peaks(lookup_device(name)), measured, given)


def measure_peak(precision: Precision, device: torch.device) -> float:
    """Return the TFLOPS that square matmuls of `precision` reach on `device`.

    On a GPU the result is a median: the best time could be from a moment at which other processes
    paused. On CPU it is the best, of the threads that torch uses.
    """
    on_gpu = device.type == "cuda"
    size, together = _GPU_MATMULS if on_gpu else _CPU_MATMULS[precision]

    # Random, because a GPU is faster on constants; with a generator of its own, which leaves the
    # run's random state unchanged.
    generator = torch.Generator(device).manual_seed(0)
    a, b = torch.randn(2, size, size, generator=generator, device=device)
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
        for _ in range(together):
            matmul()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    typical = statistics.median(seconds) if on_gpu else min(seconds)
    return together * 2 * size**3 / typical / 1e12


class _KeptPeaks(BaseModel, allow_inf_nan=False):
    """Content of peaks.json: the CPU, the threads of a rank, and its peaks."""

    cpu: str
    threads: float
    tflops: dict[Precision, Annotated[float, Field(gt=0)]]


def find_cpu_peaks(precisions: Collection[Precision], *, file: Path) -> dict[Precision, float]:
    """Return the peaks of the fastest rank in TFLOPS. A collective call.

    Peaks kept in `file` are used if they are of the same CPU and number of threads. The others are
    measured, and kept there.
    """
    cpu, threads = cpu_name(), _rank_threads()
    kept = on_rank0(lambda: _read_kept(file, cpu=cpu, threads=threads))
    missing = sorted(set(precisions) - kept.keys())
    if not missing:
        return kept

    # All ranks measure at the same time, as they train, each on one thread.
    used, device = torch.get_num_threads(), torch.device("cpu")
    torch.set_num_threads(1)
    ranks = on_all_ranks(lambda: {name: threads * measure_peak(name, device) for name in missing})
    torch.set_num_threads(used)
    kept |= {name: max(peaks[name] for peaks in ranks) for name in missing}
    content = _KeptPeaks(cpu=cpu, threads=threads, tflops=kept).model_dump_json(indent=1)
    on_rank0(lambda: replace_file(file, content + "\n"))
    return kept


def _read_kept(file: Path, *, cpu: str, threads: float) -> dict[Precision, float]:
    """Return the peaks kept in `file`, or none if it does not exist, is damaged, or was written on
    another CPU or with another number of threads."""
    if file.is_dir():
        raise ConfigError(f"{file} is not a file, and a run keeps one there; move it elsewhere.")
    if not file.exists():
        return {}
    try:
        kept = _KeptPeaks.model_validate_json(read_regular(file, max_bytes=4096))
    except (OSError, ValueError):
        logger.info(f"{file} is damaged: the CPU's peaks are measured again")
        return {}
    if (kept.cpu, kept.threads) != (cpu, threads):
        logger.info(
            f"{file} is of {kept.cpu}, {kept.threads:g} threads a rank, and this is {cpu}, "
            f"{threads:g} threads: the CPU's peaks are measured again"
        )
        return {}
    logger.info(f"the CPU's peaks were read from {file}")
    return kept.tflops


def _rank_threads() -> float:
    """Return the number of threads that this rank can run at once: at most its share of the cores,
    each divided among the ranks of the host that may use it. A collective call."""
    host, cores = socket.gethostname(), usable_cores()
    ranks = on_all_ranks(lambda: (host, cores))
    users = Counter(core for other, theirs in ranks if other == host for core in theirs)
    return min(torch.get_num_threads(), sum(1 / users[core] for core in cores))


def cpu_name() -> str:
    """Return the processor's model, or its architecture if the system does not name a model."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def device_name() -> str:
    """Return the name of the GPU at hand, or of the CPU with its number of cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU: {cpu_name()}, {len(usable_cores())} cores"


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
