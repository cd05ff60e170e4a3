"""What the metrics hand to writers besides step records, and the writers' interface."""

from collections.abc import Mapping
from dataclasses import dataclass

from .figures import CastErrors, StepRecord, cast_scalars, format_mfu


@dataclass(frozen=True)
class Summary:
    """A run's outcome. Medians are over this process's records but the first."""

    last: StepRecord
    """The last step's record."""
    tps: float | None
    """Median tokens per second per device; None if there is only one record."""
    mfu: float | None
    """Median percent; None also if a peak is unknown."""
    times_s: Mapping[str, float]
    """Seconds that this process spent on training, data, compile, checkpoint, validation."""


def summary_lines(summary: Summary, *, unigram_entropy: float | None) -> list[str]:
    """Describe how a run went. `unigram_entropy`, nat, is the loss of a model that knows only how
    often each training token occurs."""
    last, times_s = summary.last, summary.times_s
    loss = f"final loss {last.loss:.2f} nat"
    if unigram_entropy is not None:
        gain = unigram_entropy - last.loss
        side = "below" if gain >= 0 else "above"
        loss += f", {abs(gain):.2f} {side} the unigram entropy {unigram_entropy:.2f}"
        loss += " of the training tokens"

    tps = "n/a" if summary.tps is None else f"{summary.tps:,.0f}"
    mfu = format_mfu(summary.mfu, approximate=last.approximate_mfu)
    total_s = sum(times_s.values())
    shares = [f"{name} {time_s / total_s:.1%}" for name, time_s in times_s.items() if time_s]
    return [
        f"{last.step:,} steps, {last.tokens:,} tokens",
        loss,
        f"median tps {tps} per device, median mfu {mfu}, without the first step",
        f"of {total_s:,.1f}s: {', '.join(shares)}",
        f"peak memory {last.memory_gib:.1f}GiB per device",
    ]


class Writer:
    """Base of the writers. Each overrides the methods for what it writes."""

    def write(self, record: StepRecord) -> None:
        """Write the record of a step."""

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write named figures that belong to no step's record, such as a validation loss."""

    def write_numerics(self, step: int, casts: CastErrors) -> None:
        """Write the errors of a step's casts to float8."""
        self.write_scalars(step, cast_scalars(casts))

    def flush(self) -> None:
        """Put everything written so far on disk."""

    def close(self, summary: Summary | None) -> None:
        """Write the run's outcome, None if no step was trained, and put everything on disk."""
