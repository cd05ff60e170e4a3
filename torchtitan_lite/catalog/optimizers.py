"""The optimizers: what else than their update depends on them."""

from typing import NamedTuple


class OptimizerRow(NamedTuple):
    """An optimizer that `training.optim` builds."""

    moments: int
    """Tensors of state of each parameter's size, in [optimizer] state_dtype."""
    skips_on_device: tuple[str, ...]
    """Values of [optimizer] implementation whose update reads `found_inf` on the device, as torch's
    GradScaler sets it, and skips the step if that is 1. For the others the host waits."""


OPTIMIZERS = {"AdamW": OptimizerRow(moments=2, skips_on_device=("fused",))}
"""By [optimizer] name."""
