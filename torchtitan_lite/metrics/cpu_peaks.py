"""Peaks of a CPU: measured by all ranks together, kept in the run folder, and measured again at the
end of the run.

A CPU has no data sheet of matmul peaks, and other processes may hold its cores at any time. So the
peak of a rank is the best of many short matmuls on one thread, times the threads that the rank can
run. A matmul of a millisecond ends between two interruptions, also on a busy machine; on several
threads it would wait for the slowest of them."""

import dataclasses
import json
import math
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from torchtitan_lite.collectives import on_all_ranks, on_rank0
from torchtitan_lite.files import replace_file
from torchtitan_lite.logger import logger

from .flops import Precision

MOVED = 0.2
"""Relative change of a peak during the run that is reported."""
# Large enough to reach the peak, within half a millisecond on a fast core: fp32 takes longer than
# bf16.
_MATMUL_SIZES: dict[Precision, int] = {"bf16": 384, "fp32": 256}
_MEASURE_SECONDS = 0.25
_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclasses.dataclass(frozen=True)
class CpuPeaks:
    """Content of the file of kept peaks."""

    cpu: str
    threads: float
    """Threads of a rank that run at the same time."""
    tflops: dict[Precision, float]
    """Peak of a rank by precision."""


def resolve_cpu_peaks(precisions: Collection[Precision], *, file: Path) -> dict[Precision, float]:
    """Peaks of the fastest rank in TFLOPS: those kept in `file` if they are of the same CPU and
    number of threads; the others are measured, and kept there. A collective call."""
    threads = _rank_threads()
    kept = on_rank0(lambda: _read(file, cpu=cpu_name(), threads=threads))
    missing = sorted(set(precisions) - kept.keys())
    if not missing:
        return kept
    tflops = kept | _measure(missing, threads=threads)
    peaks = CpuPeaks(cpu_name(), threads, tflops)
    on_rank0(lambda: replace_file(file, json.dumps(dataclasses.asdict(peaks), indent=1) + "\n"))
    return tflops


def report_moved_peaks(before: Mapping[Precision, float]) -> None:
    """Measure the peaks `before` again, and log those that have moved by MOVED or more. A
    collective call."""
    now = _measure(before, threads=_rank_threads())
    moved = [
        f"{precision} from {before[precision]:.4g} to {tflops:.4g} TFLOPS ({tflops / before[precision] - 1:+.0%})"
        for precision, tflops in now.items()
        if abs(tflops / before[precision] - 1) >= MOVED
    ]
    if moved:
        logger.info(
            f"the CPU's peak has moved since it was measured: {', '.join(moved)}; mfu is of the first"
        )


def one_thread_tflops(precision: Precision) -> float:
    """TFLOPS of the best of many matmuls on one thread of this process."""
    threads = torch.get_num_threads()
    size = _MATMUL_SIZES[precision]
    generator = torch.Generator().manual_seed(
        0
    )  # of its own: the run's random state stays as it is
    a, b = torch.randn(2, size, size, generator=generator).to(_DTYPES[precision])
    best_s = math.inf
    torch.set_num_threads(1)
    try:
        a @ b  # the first call builds the kernel
        ended = time.perf_counter()
        until = ended + _MEASURE_SECONDS
        while ended < until:
            began = time.perf_counter()
            a @ b
            ended = time.perf_counter()
            best_s = min(best_s, ended - began)
    finally:
        torch.set_num_threads(threads)
    return 2 * size**3 / best_s / 1e12


def usable_cores() -> set[int]:
    """Cores that this process may use."""
    if not hasattr(os, "sched_getaffinity"):  # not on Linux
        return set(range(os.cpu_count() or 1))
    return os.sched_getaffinity(0)


def cpu_name() -> str:
    """The processor's model, or its architecture where the system does not name it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _rank_threads() -> float:
    """Threads that this rank can run at the same time: no more than its share of the cores, which
    other ranks of its host may use too. A collective call."""
    host, cores = socket.gethostname(), usable_cores()
    ranks = on_all_ranks(lambda: (host, cores))
    users = Counter(core for other, theirs in ranks if other == host for core in theirs)
    share = sum(1 / users[core] for core in cores)
    return min(torch.get_num_threads(), share)


def _measure(precisions: Collection[Precision], *, threads: float) -> dict[Precision, float]:
    """Peaks of the fastest rank. All ranks measure in the same order, and at the same time, as they
    train at the same time."""
    ranks = on_all_ranks(lambda: {name: threads * one_thread_tflops(name) for name in precisions})
    return {name: max(peaks[name] for peaks in ranks) for name in precisions}


def _read(file: Path, *, cpu: str, threads: float) -> dict[Precision, float]:
    """The peaks kept in `file`; none if there is no such file, or if it is damaged or of another
    CPU or number of threads."""
    if not file.is_file():  # also a pipe, which would be waited for
        return {}
    try:
        kept = CpuPeaks(**json.loads(file.read_text()))
        whole = all(
            name in _DTYPES and 0 < float(peak) < math.inf for name, peak in kept.tflops.items()
        )
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
        whole = False
    if not whole:
        logger.info(f"{file} is damaged: the CPU's peaks are measured again")
        return {}
    if (kept.cpu, kept.threads) != (cpu, threads):
        logger.info(
            f"{file} is of {kept.cpu}, {kept.threads} threads a rank, and this is {cpu}, {threads} "
            "threads a rank: the CPU's peaks are measured again"
        )
        return {}
    logger.info(f"the CPU's peaks are those of {file}")
    return kept.tflops
