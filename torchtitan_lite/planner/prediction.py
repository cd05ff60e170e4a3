"""Predict what float8 gains over bf16, with the uncertainty of the constants."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torchtitan_lite.float8.selection import LinearChoice

from .constants import Rates, move_constants
from .pipeline_time import time_step
from .roofline import Roofline
from .step import StepTime

RESOLUTION = 0.05  # a smaller relative difference is reported as none


@dataclass(frozen=True)
class Prediction:
    """What float8 gains over bf16. A band is as wide as the constants are uncertain: each moves the
    prediction by itself, and the moves, as ratios, add up as squares."""

    recipe: str
    step_speedup: float  # time in bf16 over time in float8: above 1 float8 pays
    speedup_band: tuple[float, float]
    float8_s_band: tuple[float, float]  # seconds of the step in float8, fast and slow
    converted: list[str]  # kinds of linears in float8
    better_kept: list[str]  # those of them that bf16 would make faster
    bf16: StepTime
    float8: StepTime
    float8_s_ends: Mapping[str, Sequence[float]]
    """Seconds of the step in float8 at the slow and the fast end of each uncertain constant."""


def predict(roofline: Roofline, linears: Sequence[LinearChoice]) -> Prediction:
    """Predict a step in bf16, and in float8 with those `linears` that are converted."""
    in_float8 = [linear for linear in linears if linear.converted]
    chosen = roofline.choose(in_float8)
    converted = [linear.kind for linear in in_float8]
    better_kept = [linear.kind for linear in in_float8 if linear not in chosen]

    def times(rates: Rates) -> tuple[StepTime, StepTime]:
        at = replace(roofline, rates=rates)
        return time_step(at, linears, []), time_step(at, linears, in_float8)

    # Once by the constants as they are, and with each uncertain one at either end.
    bf16, float8 = times(roofline.rates)
    speedup = bf16.step_s / float8.step_s
    ends = move_constants(roofline.device, roofline.rates)
    moved = {name: [times(rates) for rates in each] for name, each in ends.items()}
    speedups = [[one.step_s / other.step_s for one, other in each] for each in moved.values()]
    float8_s_ends = {name: [other.step_s for _, other in each] for name, each in moved.items()}
    return Prediction(
        recipe=roofline.job.config.float8.recipe_name,
        step_speedup=speedup,
        speedup_band=_band(speedup, speedups),
        float8_s_band=_band(float8.step_s, float8_s_ends.values()),
        converted=converted,
        better_kept=better_kept,
        bf16=bf16,
        float8=float8,
        float8_s_ends=float8_s_ends,
    )


def _band(value: float, moved: Iterable[Sequence[float]]) -> tuple[float, float]:
    """Return the ends around `value`, which each uncertain constant moves to two others."""
    moves = [[math.log(each / value) for each in ends] for ends in moved]
    down, up = (math.hypot(*(pick((0.0, *ends)) for ends in moves)) for pick in (min, max))
    return value * math.exp(-down), value * math.exp(up)


def format_verdict(gain: Prediction, *, on: bool = True) -> str:
    """Return the prediction in one sentence, of float8 that is `on` or could be."""
    if not gain.converted and on:
        return f"{gain.recipe} float8 is on, but filter_fqns keeps every linear in bf16."
    if not gain.converted:
        return (
            f"{gain.recipe} float8 would gain nothing: no linear would be faster in it, but "
            "--search compares the other recipes."
        )

    # A sign is claimed where the whole band has it.
    low, high = gain.speedup_band
    near = abs(gain.step_speedup - 1) <= RESOLUTION
    if near and max(1 - low, high - 1) <= 2 * RESOLUTION:
        effect = "is neutral" if on else "would be neutral"
    elif low > 1:
        effect = "helps" if on else "would help"
    elif high < 1:
        effect = "hurts" if on else "would hurt"
    else:
        effect = "may help or hurt"
    keep = f"keep {', '.join(gain.better_kept)}" if gain.better_kept else "no linear is better kept"
    return (
        f"{gain.recipe} float8 {effect}: a step {'runs' if on else 'would run'} at "
        f"{gain.step_speedup:.2f}x the speed of bf16 ({low:.2f} to {high:.2f}); {keep} in bf16."
    )
