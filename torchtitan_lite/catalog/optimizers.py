"""The optimizers: what else than their update depends on them."""

from typing import NamedTuple


class OptimizerRow(NamedTuple):
    """An optimizer that `training.optim` builds."""

    moments: int
    """Tensors of state of each parameter's size, in [optimizer] state_dtype."""


OPTIMIZERS = {"AdamW": OptimizerRow(moments=2)}
"""By [optimizer] name."""
