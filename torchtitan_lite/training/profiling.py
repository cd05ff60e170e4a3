"""torch.profiler traces and snapshots of CUDA memory, one folder per profiled step."""

import contextlib
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from torchtitan_lite.base.logger import logger
from torchtitan_lite.config import ProfilingConfig


class Profiler:
    """Write a trace of the last steps of each period, and a memory snapshot after each period and
    when memory runs out. A context manager around the steps after `done_steps`."""

    def __init__(
        self,
        profiling: ProfilingConfig,
        *,
        run_folder: Path,
        rank: int,
        done_steps: int,
        outside_step: Callable[..., AbstractContextManager[None]],
    ) -> None:
        """Writing takes place within `outside_step("profiling", step=...)`."""
        self._profiling, self._run_folder, self._rank = profiling, run_folder, rank
        self._freq, self._done_steps = profiling.profile_freq, done_steps
        self._outside_step = outside_step

        # In each period the last steps are traced, some before them warm up, the others wait.
        self._trace: torch.profiler.profile | None = None
        if profiling.enable_profiling:
            active = profiling.profiler_active
            warmup = min(profiling.profiler_warmup, self._freq - active)
            wait = self._freq - active - warmup
            self._trace = torch.profiler.profile(
                schedule=torch.profiler.schedule(wait=wait, warmup=warmup, active=active),
                on_trace_ready=self._write_trace,
                record_shapes=True,
            )

    def __enter__(self) -> "Profiler":
        if self._profiling.enable_memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        if self._trace is not None:
            self._trace.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, at: Any) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            self._write_snapshot("out-of-memory")
        if self._trace is not None:
            self._trace.__exit__(kind, error, at)

    def end_step(self, step: int) -> None:
        """Write what is due after `step`."""
        due = (step - self._done_steps) % self._freq == 0
        with self._outside_step("profiling", step=step) if due else contextlib.nullcontext():
            if self._trace is not None:
                self._trace.step()
            if due:
                self._write_snapshot(f"step-{step:08d}")

    def _write_trace(self, finished: torch.profiler.profile) -> None:
        """Write the trace that ends with a step, unless the run ended within its period."""
        step = self._done_steps + finished.step_num
        folder = self._run_folder / self._profiling.save_traces_folder / f"step-{step:08d}"
        path = folder / f"rank{self._rank}_trace.json"
        if finished.step_num % self._freq == 0 and not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(path))
            logger.info(f"profiler trace: {path}")

    def _write_snapshot(self, name: str) -> None:
        """Write the memory snapshot to the folder `name`, if snapshots are enabled."""
        if self._profiling.enable_memory_snapshot:
            folder = self._run_folder / self._profiling.save_memory_snapshot_folder / name
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"rank{self._rank}.pickle"
            path.write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))
            logger.info(f"memory snapshot: {path}")
