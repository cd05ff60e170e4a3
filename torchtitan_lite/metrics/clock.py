"""Measure the time of a device without waiting for it. The two clocks have the same methods."""

import time
from collections.abc import Callable
from typing import Any

import torch


class HostClock:
    """The clock of a CPU, where work is done when the call returns. A moment is in seconds."""

    def __init__(self, read: Callable[[], float] = time.perf_counter) -> None:
        self.now: Callable[[], Any] = read
        """Return the moment at which all work requested so far is done."""

    def passed(self, moment: Any) -> bool:
        """Return whether the device has reached `moment`, without waiting."""
        return True

    def wait(self, moment: Any) -> None:
        """Block the host until the device has reached `moment`."""

    def seconds(self, began: Any, ended: Any) -> float:
        """Return the seconds between two moments that have passed."""
        return ended - began


class CudaClock:
    """The clock of the current CUDA stream, which is behind the host. A moment is an event in it.

    Times are the device's: a wait of the host in which the device still had work takes no time.
    """

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, moment: torch.cuda.Event) -> bool:
        return moment.query()

    def wait(self, moment: torch.cuda.Event) -> None:
        moment.synchronize()

    def seconds(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        return began.elapsed_time(ended) / 1000


Clock = HostClock | CudaClock


def build_clock(device: torch.device) -> Clock:
    """Return the clock of `device`."""
    return CudaClock() if device.type == "cuda" else HostClock()
