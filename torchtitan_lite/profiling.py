"""torch.profiler traces and snapshots of CUDA memory, one folder per profiled step."""

import contextlib
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import torch

from torchtitan_lite.config import ProfilingConfig
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.logger import logger

SNAPSHOT_EVENTS = 100_000
"""Allocations and frees that a memory snapshot records."""


class Profiler:
    """Write a trace and a memory snapshot of the last step of each period, and a snapshot when the
    device runs out of memory. A context manager around the steps after `done_steps`."""

    def __init__(
        self,
        profiling: ProfilingConfig,
        *,
        run_folder: Path,
        rank: int,
        device: torch.device,
        done_steps: int,
        outside_step: Callable[..., AbstractContextManager[None]],
    ) -> None:
        """Writing takes place within `outside_step("profiling", step=...)`. Raises ConfigError for
        memory snapshots without CUDA."""
        on_cuda = device.type == "cuda"
        self._freq, self._rank, self._done_steps = profiling.profile_freq, rank, done_steps
        self._outside_step = outside_step

        self._snapshots: Path | None = None
        if profiling.enable_memory_snapshot:
            if not on_cuda:
                raise ConfigError(
                    "[profiling] enable_memory_snapshot = true records CUDA memory, and this run "
                    "is on CPU; set it to false."
                )
            self._snapshots = run_folder / profiling.save_memory_snapshot_folder

        # Of each period all steps wait, the next to last warms up, and the last one is traced.
        self._traces = run_folder / profiling.save_traces_folder
        self._trace: torch.profiler.profile | None = None
        if profiling.enable_profiling:
            activity = torch.profiler.ProfilerActivity
            warmup = min(1, self._freq - 1)
            wait = self._freq - 1 - warmup
            self._trace = torch.profiler.profile(
                activities=[activity.CPU, activity.CUDA] if on_cuda else [activity.CPU],
                schedule=torch.profiler.schedule(wait=wait, warmup=warmup, active=1),
                on_trace_ready=self._write_trace,
                record_shapes=True,
            )

    def __enter__(self) -> "Profiler":
        if self._snapshots is not None:
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
        if self._trace is not None:
            self._trace.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            self._write_snapshot("out-of-memory")
        if self._trace is not None:
            self._trace.__exit__(kind, error, at)

    def end_step(self, step: int) -> None:
        """Write what is due after `step`."""
        due = (step - self._done_steps) % self._freq == 0
        writes = due and (self._trace is not None or self._snapshots is not None)
        with self._outside_step("profiling", step=step) if writes else contextlib.nullcontext():
            if self._trace is not None:
                self._trace.step()
            if due:
                self._write_snapshot(f"step-{step:08d}")

    def _write_trace(self, finished: torch.profiler.profile) -> None:
        """Write the trace of a step, unless the run ended within its period."""
        step = self._done_steps + finished.step_num
        path = self._traces / f"step-{step:08d}" / f"rank{self._rank}_trace.json"
        if finished.step_num % self._freq or path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(path))
        logger.info(f"profiler trace: {path}")

    def _write_snapshot(self, name: str) -> None:
        """Write the memory snapshot to the folder `name`, if snapshots are enabled."""
        if self._snapshots is not None:
            path = self._snapshots / name / f"rank{self._rank}.pickle"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))
            logger.info(f"memory snapshot: {path}")
