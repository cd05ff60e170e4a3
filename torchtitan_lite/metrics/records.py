"""What the metrics hand to the writers: a record a logged step, the summary at the end, and the
writers' interface."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Protocol


@dataclass(frozen=True)
class Record:
    """The figures of one logged step. Rates and times are averages over the steps since the record
    before."""

    step: int
    """1-based."""
    tokens: int
    """Trained on by all ranks since step 1."""
    epochs: Mapping[str, float]
    """How often each store of the training data was passed, by its name."""
    loss: float
    """Mean over all ranks' tokens, nat."""
    loss_max: float
    """The largest of the ranks' own losses, nat."""
    grad_norm: float
    """Before clipping."""
    lr: float
    skipped_steps: int
    """Steps of the run that had no update, because their loss or gradient was not finite or a
    spike."""
    tps: float
    """Tokens per second per device, waits for data and compilation left out."""
    tflops: float
    """TFLOPS per device."""
    mfu: float | None
    """Percent of every matmul at its own precision's peak; None, here and below, where a peak is
    unknown."""
    mfu_bf16_peak: float | None
    """Percent of the bf16 peak."""
    mfu_fp8_peak: float | None
    """Percent of the fp8 peak."""
    mfu_achievable: float | None
    """As mfu, of what matmuls reached on this device at start; None unless that was measured."""
    hfu: float | None
    """As mfu, with what activation checkpointing computes again."""
    step_time_s: float
    """From the end of the step before to its own, less validation, checkpoints and compilation."""
    data_time_s: float
    """The wait for data, which is part of step_time_s."""
    memory_gib: float
    """The peak so far."""
    time: float
    """Unix seconds."""

    def figures(self) -> dict[str, float]:
        """The figures that are known, by name; the epochs of a store as `epochs/` and its name."""
        figures = asdict(self)
        epochs = figures.pop("epochs")
        known = {name: value for name, value in figures.items() if value is not None}
        return known | {f"epochs/{store}": passed for store, passed in epochs.items()}

    @property
    def data_time_pct(self) -> float:
        """Percent of the step's time that was a wait for data."""
        return 100 * self.data_time_s / self.step_time_s


@dataclass(frozen=True)
class Summary:
    """A run's outcome: its last step, and the medians of this process's records without the
    first."""

    step: int
    tokens: int
    loss: float
    """Of the last step, nat."""
    tps: float | None
    """Median tokens per second per device; None if there is but one record."""
    mfu: float | None
    """Median percent; None also where the peak is unknown."""
    memory_gib: float
    """The peak."""
    times_s: Mapping[str, float]
    """Seconds of this process by what they went to: training, data, compile, checkpoint,
    validation."""
    approximate_mfu: bool = False
    """Whether mfu rests on a CPU's measured peaks."""


def format_mfu(mfu: float | None, *, approximate: bool) -> str:
    """`mfu` for people: 41.2%, ~41.2% where it is approximate, n/a where it is None."""
    return "n/a" if mfu is None else f"{'~' if approximate else ''}{mfu:.1f}%"


Numerics = Mapping[str, Mapping[str, Mapping[str, float]]]
"""What casts to float8 lost: figures by kind of linear, by role (input, weight, grad_output), and
by name; that of the layer which NAME_layer tells, if it is in one."""


def numerics_scalars(numerics: Numerics) -> dict[str, float]:
    """The figures to draw, as NAME/ROLE/KIND."""
    return {
        f"{name}/{role}/{kind}": value
        for kind, roles in numerics.items()
        for role, figures in roles.items()
        for name, value in figures.items()
        if not name.endswith("_layer")
    }


class Writer(Protocol):
    """What takes a run's records."""

    def write(self, record: Record) -> None:
        """Take the record of a step."""

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take figures that belong to no step's record, such as a validation's, by name. Seconds
        end in `_s`."""

    def write_numerics(self, step: int, numerics: Numerics) -> None:
        """Take what the casts of a step lost."""

    def flush(self) -> None:
        """Have all that was taken on disk."""

    def close(self, summary: Summary | None) -> None:
        """Take how the run went, None if no step was trained, and have all that was taken on
        disk."""
