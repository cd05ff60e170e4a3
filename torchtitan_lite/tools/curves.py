"""Draw curves as paths of an SVG: lines of means, and bands from the least to the greatest."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Paths = list[tuple[str, str]]
Ticks = list[tuple[float, str]]
SIZE = 300  # width and height of a chart; a line has at most one point per unit of width


def draw_chart(groups: Sequence[Sequence[Array]]) -> tuple[Paths, Ticks, Ticks] | None:
    """Draw groups of curves, each [2, N] of x and y. Return the line and the band of each group,
    and the ticks of both axes; None if no y is known."""
    joined = [np.concatenate(curves, axis=1).clip(-1e99, 1e99) for curves in groups]
    all_x, all_y = np.concatenate(joined, axis=1)
    if np.isnan(all_y).all():
        return None
    x_limits, y_limits = _limits(all_x), _limits(all_y)
    across = [np.rint(np.interp(x, x_limits, (0, SIZE))) for x, _ in joined]
    down = [np.interp(y, y_limits, (SIZE, 0)) for _, y in joined]
    paths = list(map(_draw_group, across, down))
    return paths, find_ticks(*x_limits), find_ticks(*y_limits)


def _draw_group(x: Array, y: Array) -> tuple[str, str]:
    """Return a line of the mean y at each x, broken where no y is known, and a band from the least
    to the greatest, if they differ."""
    line, top, bottom, pen = "", [], [], "M"
    for at in np.unique(x):
        known = y[(x == at) & ~np.isnan(y)]
        if known.size:
            line += f"{pen}{at:.0f} {known.mean():.1f}h0"  # without h0 a lone point is invisible
            top.append(f"{at:.0f} {known.min():.1f}")
            bottom.append(f"{at:.0f} {known.max():.1f}")
        pen = "L" if known.size else "M"
    return line, f"M{'L'.join(top + bottom[::-1])}Z" if top != bottom else ""


def find_ticks(low: float, high: float) -> Ticks:
    """Return two to seven round numbers, each with its distance from `low` in a chart."""
    power = 10.0 ** math.floor(math.log10((high - low) / 6))
    step = next(power * each for each in (1, 2, 5, 10) if 6 * power * each >= high - low)
    ticks = step * np.arange(math.ceil(low / step), math.floor(high / step) + 1)
    return [(SIZE * (tick - low) / (high - low), f"{tick:,.10g}") for tick in ticks]


def _limits(values: Array) -> tuple[float, float]:
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    around = abs(low) / 10 or 1.0  # the only value
    return (low, high) if high - low > 1e-99 else (low - around, high + around)
