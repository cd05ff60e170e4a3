"""Events at which times are measured: of the device on a GPU, of the host on a CPU."""

import time

import torch


class HostEvent:
    """The `torch.cuda.Event` of a CPU, which is never behind: a call returns when it is done."""

    def __init__(self) -> None:
        self.time_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "HostEvent") -> float:
        return 1000 * (end.time_s - self.time_s)


def record_cuda_event() -> torch.cuda.Event:
    """Record an event in the current stream; times between such events are the device's."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
