"""Moments of a device, and what lies between them, without making it wait."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """What a device's time is read from."""

    def now(self) -> Any:
        """The moment at which all work called for so far will be done."""

    def passed(self, moment: Any) -> bool:
        """Whether the device has come to `moment`."""

    def wait(self, moment: Any) -> None:
        """Return once it has."""

    def seconds(self, began: Any, ended: Any) -> float:
        """Seconds between two moments that have passed."""


class HostClock:
    """Of a CPU, which has done its work when the call returns: no moment lies ahead."""

    def __init__(self, read: Callable[[], float] = time.perf_counter) -> None:
        self.now = read

    def passed(self, moment: float) -> bool:
        """Always."""
        return True

    def wait(self, moment: float) -> None:
        """Return at once."""

    def seconds(self, began: float, ended: float) -> float:
        """Seconds between two moments."""
        return ended - began


class CudaClock:
    """Of the current CUDA stream, which is behind the host: a moment is an event in it. Work that
    the device did while the host waited for something else, such as data, is in no interval twice,
    and where it idled it is seen."""

    def now(self) -> torch.cuda.Event:
        """An event behind all work queued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, moment: torch.cuda.Event) -> bool:
        """Whether the device has come to the event; asks, and does not wait."""
        return moment.query()

    def wait(self, moment: torch.cuda.Event) -> None:
        """Block the host until the device has come to the event."""
        moment.synchronize()

    def seconds(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        """Seconds between two events that have passed."""
        return began.elapsed_time(ended) / 1000


def build_clock(device: torch.device) -> Clock:
    """The clock of `device`."""
    return CudaClock() if device.type == "cuda" else HostClock()
