"""Peaks of a CPU: measured by all ranks at once, kept in the run folder, and measured again at the
end of the run.

A CPU has no data sheet of matmul peaks, and other processes may use its cores at any time. So a
rank's peak is the best of many short matmuls on one thread, times the threads that the rank can
run. A matmul of a millisecond ends between two interruptions, even on a busy machine; on several
threads it would wait for the slowest of them.
"""

import json
import math
import platform
import socket
import time
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from torchtitan_lite.collectives import on_all_ranks, on_rank0
from torchtitan_lite.files import replace_file, usable_cores
from torchtitan_lite.logger import logger

from .flops import Precision

MOVED = 0.2
"""Relative change of a peak during a run from which on it is reported."""
_MEASURE_SECONDS = 0.25
_MATMULS: dict[Precision, tuple[torch.dtype, int]] = {
    "bf16": (torch.bfloat16, 384),
    "fp32": (torch.float32, 256),
}
"""Data type and size of the matmuls: large enough to reach the peak, and within half a millisecond
on a fast core."""


def resolve_cpu_peaks(precisions: Collection[Precision], *, file: Path) -> dict[Precision, float]:
    """Return the peaks of the fastest rank in TFLOPS. A collective call.

    Peaks kept in `file` are used if they are of the same CPU and number of threads. The others are
    measured, and kept there.
    """
    cpu, threads = cpu_name(), _rank_threads()
    kept = on_rank0(lambda: _read(file, cpu=cpu, threads=threads))
    missing = sorted(set(precisions) - kept.keys())
    if not missing:
        return kept
    tflops = kept | _measure(missing, threads=threads)
    content = json.dumps({"cpu": cpu, "threads": threads, "tflops": tflops}, indent=1)
    on_rank0(lambda: replace_file(file, content + "\n"))
    return tflops


def report_moved_peaks(before: Mapping[Precision, float]) -> None:
    """Measure the peaks `before` again, and log those that changed by MOVED or more. A collective
    call."""
    now = _measure(before, threads=_rank_threads())
    changes = {name: tflops / before[name] - 1 for name, tflops in now.items()}
    moved = [
        f"{name} from {before[name]:.4g} to {now[name]:.4g} TFLOPS ({change:+.0%})"
        for name, change in changes.items()
        if abs(change) >= MOVED
    ]
    if moved:
        logger.info(
            f"the CPU's peak has changed since the start: {', '.join(moved)}; "
            "mfu is computed with the first"
        )


def one_thread_tflops(precision: Precision) -> float:
    """Return the TFLOPS of the best of many matmuls on one thread of this process."""
    dtype, size = _MATMULS[precision]
    # Its own generator leaves the run's random state unchanged.
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, size, size, generator=generator).to(dtype)

    best_s, threads = math.inf, torch.get_num_threads()
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


def cpu_name() -> str:
    """Return the processor's model, or its architecture if the system does not name a model."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _rank_threads() -> float:
    """Return the number of threads that this rank can run at once: at most its share of the cores,
    each divided among the ranks of the host that may use it. A collective call."""
    host, cores = socket.gethostname(), usable_cores()
    ranks = on_all_ranks(lambda: (host, cores))
    users = Counter(core for other, theirs in ranks if other == host for core in theirs)
    return min(torch.get_num_threads(), sum(1 / users[core] for core in cores))


def _measure(precisions: Collection[Precision], *, threads: float) -> dict[Precision, float]:
    """Return the peaks of the fastest rank. All ranks measure at the same time, as they train."""
    ranks = on_all_ranks(lambda: {name: threads * one_thread_tflops(name) for name in precisions})
    return {name: max(peaks[name] for peaks in ranks) for name in precisions}


def _read(file: Path, *, cpu: str, threads: float) -> dict[Precision, float]:
    """Return the peaks kept in `file`, or none if it does not exist, is damaged, or was written on
    another CPU or with another number of threads."""
    if not file.is_file():  # opening a pipe would block
        return {}
    try:
        kept = json.loads(file.read_text())
        peaks = {name: float(peak) for name, peak in kept["tflops"].items()}
        origin = f"{kept['cpu']}, {kept['threads']} threads a rank"
        valid = peaks.keys() <= _MATMULS.keys() and all(0 < p < math.inf for p in peaks.values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        valid = False

    here = f"{cpu}, {threads} threads a rank"
    if valid and origin == here:
        logger.info(f"the CPU's peaks were read from {file}")
        return peaks
    problem = f"is of {origin}, and this is {here}" if valid else "is damaged"
    logger.info(f"{file} {problem}: the CPU's peaks are measured again")
    return {}
