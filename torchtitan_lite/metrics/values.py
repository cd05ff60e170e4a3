"""What a step computes."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

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
