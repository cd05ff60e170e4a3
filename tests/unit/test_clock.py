"""Moments of a CPU and, with fake events, of a CUDA stream."""

from types import SimpleNamespace

import torch

from torchtitan_lite.metrics.clock import CudaClock, HostClock, build_clock


def test_a_cpu_is_never_behind():
    times = iter([3.0, 5.5])
    clock = HostClock(lambda: next(times))
    began, ended = clock.now(), clock.now()
    clock.wait(ended)
    assert clock.passed(ended)
    assert clock.seconds(began, ended) == 2.5


def test_a_cuda_moment_is_a_timing_event_recorded_in_the_stream(monkeypatch):
    calls = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            calls.append("record")

        def query(self):
            calls.append("query")
            return False

        def synchronize(self):
            calls.append("synchronize")

        def elapsed_time(self, other):
            return 1500.0  # ms

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(Event=Event))
    clock = build_clock(torch.device("cuda"))
    assert isinstance(clock, CudaClock)
    moment = clock.now()
    assert not clock.passed(moment)
    assert calls == ["record", "query"]  # asking does not wait
    clock.wait(moment)
    assert calls[2:] == ["synchronize"]
    assert clock.seconds(moment, moment) == 1.5


def test_the_clock_is_the_devices():
    assert isinstance(build_clock(torch.device("cpu")), HostClock)
