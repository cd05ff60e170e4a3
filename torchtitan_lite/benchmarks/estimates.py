"""What measurements come to: ratios of those taken in pairs, so that a machine that drifts slows
both of a pair, and lines."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

ERROR_OF_MEDIAN = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, of values that are normally distributed."""
QUARTILES_APART = 2 * statistics.NormalDist().inv_cdf(0.75)
"""The distance between the quartiles of such values, in standard deviations."""


@dataclass(frozen=True)
class Ratios:
    """Of each pair, one measurement over the other; two at least."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, ones: Sequence[float], others: Sequence[float]) -> "Ratios":
        """Those of `ones` over `others`, pair by pair."""
        return cls(tuple(one / other for one, other in zip(ones, others, strict=True)))

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """What a quarter, a half (the median) and three quarters of them are below."""
        low, middle, high = statistics.quantiles(
            self.values, n=4, method="inclusive"
        )  # of two, none lies outside
        return low, middle, high

    @property
    def median(self) -> float:
        """The middle one."""
        return self.quartiles[1]

    @property
    def standard_error(self) -> float:
        """Of the median, were all distributed as those between the quartiles suggest: a few far out
        do not count, as they hardly move the median."""
        low, _, high = self.quartiles
        return ERROR_OF_MEDIAN * (high - low) / QUARTILES_APART / math.sqrt(len(self.values))

    def __str__(self) -> str:
        """The figures, in a line."""
        low, middle, high = self.quartiles
        return (
            f"{middle:.3f}, standard error {self.standard_error:.3f}, quartiles {low:.3f} to {high:.3f}, from "
            f"{len(self.values)} pairs"
        )


Measurement = TypeVar("Measurement")


def measure_pairs(
    one: Callable[[], Measurement], other: Callable[[], Measurement], *, pairs: int
) -> tuple[list[Measurement], list[Measurement]]:
    """What `one` and `other` have measured in `pairs` pairs, whose order is turned about from pair
    to pair, so that neither always comes after the other."""
    ones: list[Measurement] = []
    others: list[Measurement] = []
    for pair in range(pairs):
        turns = [(one, ones), (other, others)]
        for measure, into in turns[:: -1 if pair % 2 else 1]:
            into.append(measure())
    return ones, others


@dataclass(frozen=True)
class Line:
    """The line of least squares through points: intercept + slope * x."""

    intercept: float
    slope: float
    slope_error: float
    """Standard error of the slope, if the points are independent; not a number for two of them."""

    @classmethod
    def through(cls, xs: Sequence[float], ys: Sequence[float]) -> "Line":
        """That of two points at least, not all at the same x."""
        slope, intercept = statistics.linear_regression(xs, ys)
        middle = statistics.fmean(xs)
        residuals = sum((y - intercept - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
        spread = sum((x - middle) ** 2 for x in xs)
        error = math.sqrt(residuals / (len(xs) - 2) / spread) if len(xs) > 2 else math.nan
        return cls(intercept, slope, error)

    def at(self, x: float) -> float:
        """Its value."""
        return self.intercept + self.slope * x


def block_quantiles(values: Sequence[float], *, blocks: int, quantile: float = 0.5) -> list[float]:
    """The medians, or another quantile, of `blocks` equally long blocks of consecutive values; what
    is left over at the end is left out. Unlike the values they hardly depend on each other, and a
    rare long one does not count."""
    size = len(values) // blocks
    starts = range(0, size * blocks, size)
    return [sorted(values[start : start + size])[int(quantile * size)] for start in starts]
