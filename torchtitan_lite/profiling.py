"""torch.profiler traces and snapshots of CUDA memory, one folder per traced step."""

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path

import torch

from torchtitan_lite.config import ProfilingConfig
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.logger import logger

SNAPSHOT_EVENTS = 100_000
"""Allocations and frees that a memory snapshot remembers."""


class Profiler:
    """Tells the profilers that a step has ended. Made by `profile`."""

    def __init__(
        self,
        trace: torch.profiler.profile | None,
        snapshots: Path | None,
        *,
        freq: int,
        rank: int,
        done_steps: int,
    ) -> None:
        self._trace, self._snapshots, self._freq, self._rank = trace, snapshots, freq, rank
        self._done_steps = done_steps

    def writes(self, step: int) -> bool:
        """Whether a trace or a snapshot is written after `step`."""
        traced = self._trace is not None and (step - self._done_steps) % self._freq == 0
        return traced or (self._snapshots is not None and step % self._freq == 0)

    def end_step(self, step: int) -> None:
        """Write what is due after `step`."""
        if self._trace is not None:
            self._trace.step()
        if self._snapshots is not None and step % self._freq == 0:
            self.write_snapshot(f"step-{step:08d}")

    def write_snapshot(self, name: str) -> None:
        """Write the memory snapshot, where they are enabled, to the folder `name`."""
        if self._snapshots is not None:
            path = self._snapshots / name / f"rank{self._rank}.pickle"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))
            logger.info(f"memory snapshot: {path}")


@contextlib.contextmanager
def profile(
    profiling: ProfilingConfig,
    *,
    run_folder: Path,
    rank: int,
    device: torch.device,
    done_steps: int,
) -> Iterator[Profiler]:
    """A Profiler while the body runs, which begins after `done_steps` steps. Where memory runs out,
    a snapshot is written first. Raises ConfigError for memory snapshots without CUDA."""
    freq = profiling.profile_freq
    snapshots = None
    if profiling.enable_memory_snapshot:
        if device.type != "cuda":
            raise ConfigError(
                "[profiling] enable_memory_snapshot = true records CUDA memory, and this run is on CPU; "
                "set it to false."
            )
        torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
        snapshots = run_folder / profiling.save_memory_snapshot_folder
    with contextlib.ExitStack() as stack:
        trace = None
        if profiling.enable_profiling:
            traces = run_folder / profiling.save_traces_folder

            def export(finished: torch.profiler.profile) -> None:
                path = (
                    traces / f"step-{done_steps + finished.step_num:08d}" / f"rank{rank}_trace.json"
                )
                if finished.step_num % freq or path.exists():
                    return  # the run ends within a period
                path.parent.mkdir(parents=True, exist_ok=True)
                finished.export_chrome_trace(str(path))
                logger.info(f"profiler trace: {path}")

            warmup = min(1, freq - 1)
            schedule = torch.profiler.schedule(wait=freq - 1 - warmup, warmup=warmup, active=1)
            activities = [torch.profiler.ProfilerActivity.CPU]
            if device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            trace = stack.enter_context(
                torch.profiler.profile(
                    activities=activities,
                    schedule=schedule,
                    on_trace_ready=export,
                    record_shapes=True,
                )
            )
        profiler = Profiler(trace, snapshots, freq=freq, rank=rank, done_steps=done_steps)
        try:
            yield profiler
        except torch.OutOfMemoryError:
            profiler.write_snapshot("out-of-memory")
            raise
