"""The optimizers: what else than their update depends on them."""

from typing import NamedTuple


class OptimizerRow(NamedTuple):
    """An optimizer that `training.optim` builds. If it reads on the device that a step is skipped,
    `fused` is true in its defaults, as in torch's; else the host waits in every step."""

    moments: int
    """Tensors of state of each parameter's size, in [optimizer] state_dtype."""


OPTIMIZERS = {"AdamW": OptimizerRow(moments=2)}
"""By [optimizer] name."""
