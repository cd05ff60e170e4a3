"""Events of a CPU and, with a fake, of a CUDA stream."""

import time

import torch

from torchtitan_lite.metrics.hardware import HostEvent, record_cuda_event

# ----- HostEvent, record_cuda_event -----


def test_host_event_is_never_behind(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", iter([3.0, 5.5]).__next__)
    began, ended = HostEvent(), HostEvent()
    ended.synchronize()
    assert ended.query()
    assert began.elapsed_time(ended) == 2500.0  # ms, as CUDA's


def test_cuda_event_is_recorded_in_the_stream_with_its_time(monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            self.enable_timing, self.calls = enable_timing, []

        def record(self):
            self.calls.append("record")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    event = record_cuda_event()
    assert (event.enable_timing, event.calls) == (True, ["record"])
