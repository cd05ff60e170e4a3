"""Utilisation of a device from its throughput, the FLOPs ledger and its peaks."""

from collections.abc import Mapping
from dataclasses import dataclass

from .flops import FlopsLedger, Precision
from .hardware import Peaks


@dataclass(frozen=True)
class Rates:
    """How fast each device trained, in the figures that `figures.StepRecord` describes.

    A utilisation is None if it needs an unknown peak, and above 100 % of an approximate peak, which
    then was measured too low. `mfu_fp8_peak` is None if fp8 is emulated, and `hfu` if the compiler
    decides what is recomputed.
    """

    tps: float
    tflops: float
    mfu: float | None
    mfu_bf16_peak: float | None
    mfu_fp8_peak: float | None
    mfu_achievable: float | None
    hfu: float | None


def ideal_seconds(
    flops: Mapping[Precision, int], tflops: Mapping[Precision, float]
) -> float | None:
    """Return the seconds for `flops`, with each precision at its own peak of `tflops`.

    None if a precision that is used has no known peak.
    """
    used = {precision: count for precision, count in flops.items() if count}
    if not used.keys() <= tflops.keys():
        return None
    return sum(count / tflops[name] for name, count in used.items()) / 1e12


def effective_peak(
    flops: Mapping[Precision, int], tflops: Mapping[Precision, float]
) -> float | None:
    """Return the peak of a mix of precisions in TFLOPS: the harmonic mean of `tflops`, weighted by
    `flops`. None if a precision that is used has no known peak."""
    ideal = ideal_seconds(flops, tflops)
    return None if ideal is None else sum(flops.values()) / ideal / 1e12


def compute_rates(tps: float, *, ledger: FlopsLedger, peaks: Peaks) -> Rates:
    """Return the rates of a device that trained on `tps` tokens per second."""
    known, flops = peaks.tflops, ledger.by_precision
    with_recompute = {name: count + ledger.recompute[name] for name, count in flops.items()}

    def utilisation(
        flops: Mapping[Precision, int], tflops: Mapping[Precision, float]
    ) -> float | None:
        if (ideal := ideal_seconds(flops, tflops)) is None:
            return None
        percent = 100 * tps * ideal
        return None if percent > 100 and peaks.approximate else percent

    return Rates(
        tps=tps,
        tflops=ledger.total * tps / 1e12,
        mfu=utilisation(flops, known),
        mfu_bf16_peak=utilisation({"bf16": ledger.total}, known),
        mfu_fp8_peak=None if ledger.emulated else utilisation({"fp8": ledger.total}, known),
        mfu_achievable=utilisation(flops, peaks.measured),
        hfu=utilisation(with_recompute, known) if ledger.recompute_is_known else None,
    )
