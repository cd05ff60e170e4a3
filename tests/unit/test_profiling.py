"""Profiler: traces appear for the steps they are due for, and hold what ran in them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_lite.config import ProfilingConfig
from torchtitan_lite.training.profiling import Profiler

# ----- Profiler -----


def run_steps(
    folder: Path, *, first: int, last: int, out_of_memory: bool = False, **settings: Any
) -> list[int]:
    """Profile steps that each multiply a matrix of as many rows as their number. Return those whose
    writing was in no step's time."""
    outside: list[int] = []

    @contextmanager
    def outside_step(name: str, *, step: int) -> Iterator[None]:
        assert name == "profiling"
        outside.append(step)
        yield

    with Profiler(
        ProfilingConfig(**settings),
        run_folder=folder,
        rank=3,
        done_steps=first - 1,
        outside_step=outside_step,
    ) as profiler:
        for step in range(first, last + 1):
            torch.ones(step, 2) @ torch.ones(2, 2)
            profiler.end_step(step)
        if out_of_memory:
            raise torch.OutOfMemoryError
    return outside


@pytest.mark.parametrize(
    ("settings", "first", "last", "traced"),
    [
        ({"profile_freq": 3}, 1, 7, {3: [3], 6: [6]}),
        ({"profile_freq": 1}, 1, 2, {1: [1], 2: [2]}),
        ({"profile_freq": 4}, 11, 15, {14: [14]}),
        ({"profile_freq": 10}, 1, 9, {}),
        ({"profile_freq": 4, "profiler_active": 2, "profiler_warmup": 0}, 1, 5, {4: [3, 4]}),
        ({"profile_freq": 4, "profiler_active": 2, "profiler_warmup": 9}, 1, 5, {4: [3, 4]}),
    ],
)
def test_the_last_steps_of_each_period_are_traced(settings, first, last, traced, tmp_path):
    outside = run_steps(tmp_path, first=first, last=last, enable_profiling=True, **settings)
    assert outside == list(traced)
    folders = [f"step-{step:08d}" for step in traced]
    assert sorted(path.name for path in tmp_path.glob("profile_traces/*")) == folders
    for folder, steps in zip(folders, traced.values(), strict=True):
        text = (tmp_path / "profile_traces" / folder / "rank3_trace.json").read_text()
        matmuls = [e for e in json.loads(text)["traceEvents"] if e.get("name") == "aten::mm"]
        assert [event["args"]["Input Dims"][0] for event in matmuls] == [[s, 2] for s in steps]


def test_memory_snapshots_are_written_when_due_and_when_memory_runs_out(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda max_entries: None)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": []})
    settings: dict[str, Any] = {"enable_memory_snapshot": True, "profile_freq": 2}
    with pytest.raises(torch.OutOfMemoryError):
        run_steps(tmp_path, first=1, last=3, out_of_memory=True, **settings)
    folders = sorted(path.name for path in (tmp_path / "memory_snapshot").iterdir())
    assert folders == ["out-of-memory", "step-00000002"]
