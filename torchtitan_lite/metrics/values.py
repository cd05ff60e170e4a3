"""What a step computes, and what writers say of its run."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from torchtitan_lite.catalog.run_files import Record

Scalar = Tensor | float
"""A number, or a floating-point scalar on the device."""


@dataclass(frozen=True, kw_only=True)
class StepValues:
    """What a step computed, reduced over the ranks, by the names of figures in StepRecord."""

    tokens: int
    epochs: Mapping[str, float]
    loss: Scalar
    loss_max: Scalar
    grad_norm: Scalar
    lr: float
    skipped_steps: Scalar
    consecutive_skips: Scalar
    """Steps without an update since the last one that had one."""
    attention_share: Scalar | None = None
    """With document masks, as the next one: see `flops.document_values`."""
    attention_imbalance: Scalar | None = None

    def on_device(self) -> dict[str, Tensor]:
        """Return the values that are on the device, by name."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}


@dataclass(frozen=True, kw_only=True)
class WrittenRun:
    """What the writers of a rank say of its run, beside the figures."""

    folder: Path
    """The run folder."""
    rank: int
    total_steps: int
    resume_step: int
    """The step after which the run goes on; 0: a new run."""
    config_toml: str
    changes_toml: str
    """The keys that differ from the defaults."""
    hparams: Mapping[str, bool | float | str]
    """Values by which runs are compared; each run has the same names."""
    records: Collection[Record]
    """Those that the run writes."""
