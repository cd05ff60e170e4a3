"""Measurements of the framework itself, as ratios within one run."""

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torchtitan_lite.train import Trainer

UNLOGGED = 1000
"""A log_freq at which next to no step is logged."""


@dataclass(frozen=True)
class LoggingCost:
    """What it costs to log every step."""

    step_s: float
    """Median seconds of a step at log_freq UNLOGGED."""
    ratios: tuple[float, ...]
    """Of each pair of equally long blocks of steps: seconds at log_freq 1 over seconds at log_freq UNLOGGED."""

    def __str__(self) -> str:
        """The figures, in a line."""
        low, middle, high = statistics.quantiles(self.ratios, n=4)
        error = 1.25 * statistics.stdev(self.ratios) / math.sqrt(len(self.ratios))  # of a median, if normal
        return (
            f"log_freq 1 over {UNLOGGED}: {100 * (middle - 1):+.2f} % of the step time, standard error "
            f"{100 * error:.2f}, quartiles {100 * (low - 1):+.2f} to {100 * (high - 1):+.2f}, from {len(self.ratios)} "
            f"pairs; an unlogged step takes {self.step_s:.4f} s"
        )


def measure_logging_cost(trainer: Trainer, *, pairs: int, block_steps: int) -> LoggingCost:
    """The cost of `trainer`'s logging from `pairs` pairs of blocks, in alternating order, after a block of warm-up."""
    steps = iter(range(trainer.first_step, trainer.last_step + 1))

    def time_block(log_freq: int) -> float:
        trainer.metrics.log_freq = log_freq
        return _time_steps(trainer, steps, count=block_steps)

    time_block(1)
    logged: list[float] = []
    unlogged: list[float] = []
    for pair in range(pairs):
        for log_freq, seconds in ((1, logged), (UNLOGGED, unlogged))[:: 1 if pair % 2 else -1]:
            seconds.append(time_block(log_freq))
    ratios = tuple(one / other for one, other in zip(logged, unlogged, strict=True))
    return LoggingCost(statistics.median(unlogged) / block_steps, ratios)


def _time_steps(trainer: Trainer, steps: Iterator[int], *, count: int) -> float:
    """Seconds of the next `count` steps, from an idle device to an idle device."""
    _wait(trainer.device)
    began = time.perf_counter()
    for _ in range(count):
        trainer.advance(next(steps))
    _wait(trainer.device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
