"""A row of the benchmark in a process of its own: how it is started, watched and ended, and what it
does. A hub.

Processes are forked from multiprocessing's server, which has imported all they need and never
touches CUDA: a row's memory is its own, and one that crashes costs no other.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from torchtitan_lite.benchmarks.report import DONE
from torchtitan_lite.config import Config, check_config
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.files import replace_file, usable_cores
from torchtitan_lite.float8.convert import has_float8_units
from torchtitan_lite.logger import init_logger, logger
from torchtitan_lite.metrics.cpu_peaks import cpu_name, one_thread_tflops
from torchtitan_lite.metrics.flops import Precision
from torchtitan_lite.metrics.hardware import measure_peak, total_memory_gib
from torchtitan_lite.models.flavors import FLAVORS, ModelArgs
from torchtitan_lite.parallel.distributed import init_distributed
from torchtitan_lite.parallel.signals import StopSignal
from torchtitan_lite.parallel.watchdog import Watchdog
from torchtitan_lite.trainer import Trainer

CPU_PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32")
"""Whose ceilings are measured; emulated float8 multiplies in fp32."""
GPU_PRECISIONS: tuple[Precision, ...] = ("bf16", "fp8")
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED")
"""Words of errors that are CUDA's or cuBLAS's own."""
LOG_LINES = 30
"""Of a row's log, kept where it failed."""
RESULT_FILE = "result.json"
GRACE_S = 5.0
"""Seconds that a child has to end after it has left its result: a thread of a run that failed may
wait for ever."""


class Stop:
    """Whether SIGTERM or SIGINT has asked this process to end, which it does between two looks, not
    at once."""

    def __init__(self) -> None:
        self.received = ""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name


@dataclass(frozen=True)
class Outcome:
    """How a child ended. The status is "done", "failed", "out of memory", "timed out" or
    "stopped"."""

    status: str
    reason: str = ""
    value: Any = None
    log: str = ""


def run_child(
    task: Callable[..., Any],
    *arguments: Any,
    folder: Path,
    timeout_s: float,
    stop: Stop,
    method: str = "forkserver",
) -> Outcome:
    """What became of `task`, called in a process of its own: its value goes through JSON. The
    process and those that it started are gone when this returns."""
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        # By NVML, not CUDA: a process that has asked CUDA for its devices cannot fork others that
        # use them.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        context.set_forkserver_preload(["torchtitan_lite.benchmarks.child"])
    process = context.Process(target=_child, args=(task, arguments, folder))
    log_file, result = folder / "log.txt", folder / RESULT_FILE
    process.start()
    deadline = time.monotonic() + timeout_s
    while (
        process.exitcode is None
        and not result.exists()
        and not stop.received
        and time.monotonic() < deadline
    ):
        process.join(0.2)
    if result.exists():
        process.join(GRACE_S)
    code = process.exitcode
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    log = (
        "\n".join(log_file.read_text(errors="replace").splitlines()[-LOG_LINES:])
        if log_file.exists()
        else ""
    )
    if result.exists():
        return Outcome(**json.loads(result.read_text()), log=log)
    if stop.received:
        return Outcome("stopped", f"stopped by {stop.received}", log=log)
    if code is None:
        return Outcome("timed out", f"it was still running after {timeout_s:.0f} s", log=log)
    ended = (
        f"was killed by {signal.Signals(-code).name}"
        if code < 0
        else f"ended with exit code {code}"
    )
    return Outcome("failed", f"its process {ended}", log=log)


def _child(task: Callable[..., Any], arguments: Sequence[Any], folder: Path) -> None:
    """Call `task`, and leave what became of it in the folder. Multiprocessing then ends this
    process without tearing the interpreter down."""
    os.setsid()  # so that the parent can end what this one starts, and Ctrl-C reaches the parent alone
    log = os.open(folder / "log.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    init_logger()
    try:
        outcome = {"status": DONE, "value": task(*arguments)}
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".strip()
        memory = isinstance(error, torch.OutOfMemoryError) or any(
            words in text for words in OUT_OF_MEMORY
        )
        outcome = {
            "status": "out of memory" if memory else "failed",
            "reason": text.splitlines()[0],
        }
    replace_file(folder / RESULT_FILE, json.dumps(outcome))


def probe() -> dict[str, Any]:
    """The device at hand, as `Device` takes it: with what matmuls reach on it now."""
    if not torch.cuda.is_available():
        threads = min(torch.get_num_threads(), cores := usable_cores())
        ceilings = {
            precision: threads * one_thread_tflops(precision) for precision in CPU_PRECISIONS
        }
        return {
            "name": f"CPU: {cpu_name()}, {cores} cores",
            "memory_gib": None,
            "float8": False,
            "ceilings": ceilings,
        }
    device = torch.device("cuda", 0)
    float8 = has_float8_units(device)
    return {
        "name": torch.cuda.get_device_name(device),
        "memory_gib": total_memory_gib(device),
        "float8": float8,
        "ceilings": {
            precision: measure_peak(precision, device) for precision in GPU_PRECISIONS[: 1 + float8]
        },
    }


def train(config: Config, args: ModelArgs, names_kernels: bool) -> None:
    """Train `config`, whose flavor is `args`, in this process as the only one of its job. With
    `names_kernels` the compiler's CPU kernels have names under a profiler."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in job.items()} | {"MASTER_ADDR": "127.0.0.1"}
    if names_kernels:
        torch._inductor.config.cpp.enable_kernel_profile = True
    FLAVORS[config.model.flavor] = args
    if problems := check_config(config, world_size=1):
        raise ConfigError("\n".join(problems))
    watchdog = Watchdog(rank=0, world_size=1, stop_signal=StopSignal(), report=logger.warning)
    device = init_distributed(config.comm)
    Trainer(config, device=device, run_folder=None, resume=None, watchdog=watchdog).train()
