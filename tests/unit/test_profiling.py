"""Traces appear for the steps they are due for, and hold what ran in them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_lite.config import ProfilingConfig
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.profiling import Profiler

CPU = torch.device("cpu")


def run_steps(folder: Path, *, freq: int, first: int, last: int, **settings: Any) -> list[int]:
    profiling = ProfilingConfig(profile_freq=freq, **settings)
    outside: list[int] = []

    @contextmanager
    def outside_step(name: str, *, step: int) -> Iterator[None]:
        assert name == "profiling"
        outside.append(step)
        yield

    with Profiler(
        profiling,
        run_folder=folder,
        rank=3,
        device=CPU,
        done_steps=first - 1,
        outside_step=outside_step,
    ) as profiler:
        for step in range(first, last + 1):
            torch.ones(step + 1, 2) @ torch.ones(2, 2)
            profiler.end_step(step)
    return outside


@pytest.mark.parametrize(
    ("freq", "first", "last", "traced"),
    [(3, 1, 7, [3, 6]), (1, 1, 2, [1, 2]), (2, 1, 4, [2, 4]), (4, 11, 15, [14]), (10, 1, 9, [])],
)
def test_the_last_step_of_each_period_is_traced(
    freq: int, first: int, last: int, traced: list[int], tmp_path: Path
) -> None:
    outside = run_steps(tmp_path, freq=freq, first=first, last=last, enable_profiling=True)
    assert outside == traced  # the steps whose writing is in no step's time
    traces = sorted(tmp_path.glob("profile_traces/*/rank3_trace.json"))
    assert [path.parent.name for path in traces] == [f"step-{step:08d}" for step in traced]
    for path, step in zip(traces, traced, strict=True):
        matmuls = [
            event
            for event in json.loads(path.read_text())["traceEvents"]
            if event.get("name") == "aten::mm"
        ]
        assert [event["args"]["Input Dims"][0] for event in matmuls] == [[step + 1, 2]]


@pytest.mark.parametrize("warmup", [0, 1, 9])
def test_a_trace_has_the_last_steps_of_its_period(warmup: int, tmp_path: Path) -> None:
    settings = {"profiler_active": 2, "profiler_warmup": warmup}
    run_steps(tmp_path, freq=4, first=1, last=9, enable_profiling=True, **settings)
    for step in (4, 8):
        path = tmp_path / f"profile_traces/step-{step:08d}/rank3_trace.json"
        events = json.loads(path.read_text())["traceEvents"]
        rows = [e["args"]["Input Dims"][0][0] for e in events if e.get("name") == "aten::mm"]
        assert rows == [step, step + 1]  # step s multiplies s + 1 rows
    assert len(list(tmp_path.glob("profile_traces/*"))) == 2


def test_nothing_is_written_where_profiling_is_off(tmp_path: Path) -> None:
    assert run_steps(tmp_path, freq=1, first=1, last=3) == []
    assert list(tmp_path.iterdir()) == []


def test_memory_snapshots_without_cuda_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"\[profiling\] enable_memory_snapshot = true records CUDA memory"
    ):
        run_steps(tmp_path, freq=1, first=1, last=1, enable_memory_snapshot=True)


def test_memory_snapshots_are_written_when_due_and_when_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda max_entries: None)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": []})
    profiling = ProfilingConfig(enable_memory_snapshot=True, profile_freq=2)
    with (
        pytest.raises(torch.OutOfMemoryError),
        Profiler(
            profiling,
            run_folder=tmp_path,
            rank=0,
            device=torch.device("cuda"),
            done_steps=0,
            outside_step=lambda name, *, step: nullcontext(),
        ) as profiler,
    ):
        for step in range(1, 4):
            profiler.end_step(step)
        raise torch.OutOfMemoryError
    assert sorted(path.name for path in (tmp_path / "memory_snapshot").iterdir()) == [
        "out-of-memory",
        "step-00000002",
    ]
