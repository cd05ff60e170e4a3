"""Compute the planner's constants from the times of kernels that kernel_times.py measured.

A constant is the value with which the planner predicts the measured time, summed over the kernels
of its kind as often as a step has each. So it means what it means in planner/constants.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kernel_times import FLAVOR, TOKENS

from torchtitan_lite.catalog.devices import DeviceSpec
from torchtitan_lite.config import Config
from torchtitan_lite.config.job import build_job
from torchtitan_lite.planner.constants import rates_of
from torchtitan_lite.planner.plan import tokenizer_values
from torchtitan_lite.planner.time import Roofline

Measurement = Mapping[str, Any]  # a line of kernel_times.py


def _gemm(roofline: Roofline, sizes: Mapping[str, int], **options: Any) -> float:
    return roofline.gemm_s(sizes["rows"], sizes["columns"], sizes["inner"], **options)


def _attention(roofline: Roofline, kernel: str) -> float:
    """Seconds of a layer."""
    return roofline.attention_s(kernel) / roofline.job.model_args.n_layers


PREDICTED: dict[str, Callable[[Roofline, Mapping[str, int]], float]] = {
    "contiguous": lambda at, sizes: at.move_s(sizes["bytes"]),
    "kernel_seconds": _gemm,
    "bf16_matmul": _gemm,
    "fp8_matmul": lambda at, sizes: _gemm(at, sizes, fp8=True),
    "slow_accumulation": lambda at, sizes: _gemm(
        at, sizes, fp8=True, slowdown=at.rates.slow_accumulation
    ),
    "row_scales": lambda at, sizes: _gemm(at, sizes, fp8=True, slowdown=at.rates.row_scales),
    "attention_cudnn": lambda at, sizes: _attention(at, "cudnn"),
    "attention_flash": lambda at, sizes: _attention(at, "flash"),
    "attention_flex": lambda at, sizes: _attention(at, "flex"),
}
"""Seconds that the planner predicts for a kernel, by the constant that decides most of them."""
SLOWDOWNS = ("slow_accumulation", "row_scales")
PLAUSIBLE_FRACTIONS, PLAUSIBLE_SECONDS, PLAUSIBLE_SLOWDOWNS = (0.02, 1.1), (1e-8, 1e-3), (0.8, 5.0)
"""What a constant can be. A fraction may exceed 1 slightly: clocks are boosted."""
SOLUTIONS = (1e-10, 1e4)
"""Between these a constant is searched for."""


def build_reference(device: DeviceSpec) -> Roofline:
    """Return the roofline of what kernel_times.py times, by the published constants of `device`."""
    model, training = {"flavor": FLAVOR}, {"seq_len": TOKENS, "local_batch_size": 1}
    config = Config.model_validate({"model": model, "training": training})
    job = build_job(config, world_size=1, tokenizer=tokenizer_values(config.model))
    return Roofline(device, rates_of(device), job)


def derive_rates(
    measurements: Sequence[Measurement], device: DeviceSpec
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the constants that were measured by their names, and the implausible ones with why.

    Kinds without a measurement are in neither. Slowdowns are relative to `fp8_matmul`, and left out
    without it."""
    roofline, kinds = build_reference(device), _by_kind(measurements)
    found: dict[str, float] = {}
    implausible: dict[str, str] = {}

    # A constant rests on others, most of which it changes little: three rounds are enough.
    for _ in range(3):
        for name, predict in PREDICTED.items():
            mine = kinds.get(name, [])
            if not mine or (name in SLOWDOWNS and "fp8_matmul" not in found):
                continue

            # The next constants are solved for with this one, unless no device can have it.
            value = _solve(roofline, name, predict, mine)
            least, most = _plausible(name)
            if value is not None and least <= value <= most:
                found[name] = value
                implausible.pop(name, None)
                roofline = replace(roofline, rates=replace(roofline.rates, **{name: value}))
            else:
                found.pop(name, None)
                figure = "no value" if value is None else f"{value:.3g}"
                implausible[name] = f"{figure} explains the times; plausible: {least} to {most}"
    return found, implausible


def _by_kind(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """Return the measurements that succeeded."""
    kinds: dict[str, list[Measurement]] = {}
    for each in measurements:
        if "seconds" in each:
            kinds.setdefault(each["kind"], []).append(each)
    return kinds


def _plausible(name: str) -> tuple[float, float]:
    if "seconds" in name:
        return PLAUSIBLE_SECONDS
    return PLAUSIBLE_SLOWDOWNS if name in SLOWDOWNS else PLAUSIBLE_FRACTIONS


def _solve(
    roofline: Roofline,
    name: str,
    predict: Callable[[Roofline, Mapping[str, int]], float],
    measured: Sequence[Measurement],
) -> float | None:
    """Return the constant `name` with which the predictions add up to what was measured; None if
    there is none. Predictions are monotonic in a constant, so it is bisected."""
    total = sum(each["count"] * each["seconds"] for each in measured)

    def excess(value: float) -> float:
        at = replace(roofline, rates=replace(roofline.rates, **{name: value}))
        return sum(each["count"] * predict(at, each["sizes"]) for each in measured) - total

    low, high = SOLUTIONS
    rising = excess(high) > 0
    if rising == (excess(low) > 0):
        return None
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if (excess(middle) > 0) == rising else (middle, high)
    return math.sqrt(low * high)
