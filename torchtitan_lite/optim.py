"""The optimizer, and the learning rate as a pure function of the step."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from torchtitan_lite.config import LRSchedulerConfig, OptimizerConfig
from torchtitan_lite.logger import logger


def build_optimizer(parameters: Iterable[Parameter], optimizer: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over `parameters`, with the update implemented as asked for."""
    if optimizer.implementation != "fused":
        logger.info(
            f'[optimizer] implementation = "{optimizer.implementation}" waits for the device in every step, to learn '
            'whether the gradient is finite; "fused" does not'
        )
    return torch.optim.AdamW(
        parameters,
        lr=optimizer.lr,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        fused=optimizer.implementation == "fused",
        foreach=optimizer.implementation == "foreach",
    )


def step_unless(optimizer: torch.optim.AdamW, found_inf: Tensor) -> None:
    """Update the parameters unless `found_inf`, [] float32 on their device, is 1. The fused update decides that on the
    device; for the others it is read here, which waits for the device."""
    if optimizer.defaults["fused"]:
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]  # where torch's gradient scaler puts it too
        optimizer.step()
    elif not found_inf.item():
        optimizer.step()


def lr_factor(step: int, *, schedule: LRSchedulerConfig, training_steps: int) -> float:
    """Learning rate of `step` (1-based) as a share of the peak: warm-up, stable phase, decay
    (arXiv 2404.06395).

    The warm-up rises linearly, and the step after it has the peak. The decay falls to min_lr_factor, which the step
    after total_steps would have, so that no step is wasted on a learning rate of 0."""
    total = schedule.total_steps or training_steps
    warmup = min(schedule.warmup_steps, total)
    if step <= warmup:
        return step / (warmup + 1)
    decay = total - warmup if schedule.decay_ratio is None else min(round(total * schedule.decay_ratio), total - warmup)
    progress = min(1.0, max(0.0, (step - (total - decay)) / (decay + 1)))
    remaining = {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }[schedule.decay_type]
    return schedule.min_lr_factor + (1 - schedule.min_lr_factor) * remaining
