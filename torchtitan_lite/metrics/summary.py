"""The outcome of a run: for the log, and to compare runs by."""

import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .figures import StepRecord

FINAL_STEPS = 20
"""A final loss is the mean of so many logged steps, the last ones."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run's outcome. Medians are over this process's records but the first."""

    last: StepRecord
    losses: Sequence[float]
    """Of the last FINAL_STEPS logged steps of this process, nat."""
    validation: tuple[int, float] | None
    """Step and loss, nat, of the last validation of this process."""
    tps: float | None
    """Median tokens per second per device; None if there is only one record."""
    mfu: float | None
    """Median percent; None also if a peak is unknown."""
    times_s: Mapping[str, float]
    """Seconds that this process spent on training, data, compile, checkpoint, validation."""

    @property
    def final_loss(self) -> float:
        """Mean of `losses`."""
        return statistics.fmean(self.losses)


def summary_lines(summary: Summary) -> list[str]:
    """Describe how a run went."""
    last, times_s = summary.last, summary.times_s
    lines = [
        f"{last.step:,} steps, {last.tokens:,} tokens",
        f"final loss {summary.final_loss:.2f} nat, mean of the last {len(summary.losses)} logged "
        "steps",
    ]
    if summary.validation is not None:
        step, loss = summary.validation
        lines.append(f"validation loss {loss:.2f} nat, at step {step:,}")

    tps = "n/a" if summary.tps is None else f"{summary.tps:,.0f}"
    mfu = last.format_mfu(summary.mfu)
    total_s = sum(times_s.values())
    shares = [f"{name} {time_s / total_s:.1%}" for name, time_s in times_s.items() if time_s]
    lines += [
        f"median tps {tps} per device, median mfu {mfu}, without the first step",
        f"of {total_s:,.1f}s: {', '.join(shares)}",
    ]

    if last.memory_max_gib is None:
        return [*lines, f"peak memory {last.memory_gib:.1f}GiB per device"]
    memory = f"peak memory {last.memory_max_gib:.1f}GiB, on rank {last.memory_max_rank}"
    return [*lines, memory]


def curves_line(folder: str) -> str:
    """Say how to see the curves of the runs in `folder`, in any shell."""
    return f"curves: {shlex.join([sys.executable, '-m', 'tensorboard.main', '--logdir', folder])}"
