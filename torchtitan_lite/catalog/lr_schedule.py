"""The learning rate as a pure function of the step: warm-up, constant phase, decay, as in MiniCPM
(arXiv 2404.06395)."""

import math
from collections.abc import Callable

DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
}
"""Share of the decay that is left after `progress`, from 1 at 0 to 0 at 1, by decay_type."""


def lr_factor(
    step: int,
    *,
    training_steps: int,
    warmup_steps: int,
    total_steps: int | None,
    decay_ratio: float | None,
    decay: Callable[[float], float],
    min_lr_factor: float,
) -> float:
    """Return the learning rate of `step` (1-based) as a share of its peak.

    The arguments after `training_steps` are the keys of [lr_scheduler], with the function that
    decay_type names as `decay`. The warm-up rises linearly; the step after it has the peak. The
    decay would reach `min_lr_factor` in the step after the last one, so that no step has a learning
    rate of 0."""
    total = total_steps or training_steps
    warmup = min(warmup_steps, total)
    if step <= warmup:
        return step / (warmup + 1)

    steps = total - warmup
    if decay_ratio is not None:
        steps = min(round(total * decay_ratio), steps)
    progress = min(1.0, max(0.0, (step - (total - steps)) / (steps + 1)))
    return min_lr_factor + (1 - min_lr_factor) * decay(progress)
