"""The optimizer, which steps it takes, and the learning rate as a pure function of the step."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from torchtitan_lite.config import LRSchedulerConfig, OptimizerConfig, TrainingConfig
from torchtitan_lite.logger import logger

LOSS_MEAN_DECAY = 0.98
"""Of the running mean of the losses: a loss counts half after 34 steps."""


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


class UpdateGuard:
    """Decides on the device which steps have no update, and counts them there: those whose loss or gradient is not
    finite, and, with a loss_spike_factor, those whose loss is above that times the running mean of the losses before.

    Its tensors are [] float32 on `device`."""

    def __init__(
        self,
        training: TrainingConfig,
        *,
        device: torch.device,
        skipped_steps: int,
        consecutive_skips: int,
        loss_mean: float | None,
    ) -> None:
        """Goes on from the counts and the mean of the steps before."""
        self._spike_factor = training.loss_spike_factor
        self.skipped_steps = torch.tensor(float(skipped_steps), device=device)
        self.consecutive_skips = torch.tensor(float(consecutive_skips), device=device)
        """Steps without an update since the last one that had one."""
        self.loss_mean = torch.tensor(math.nan if loss_mean is None else loss_mean, device=device)
        """Nats, of the steps that had an update; NaN before the first."""

    def found_inf(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """1 if this step must not update the parameters, else 0. The same on all ranks if `loss` and `grad_norm`, []
        float32, are; nothing is read on the host, which would stall the device."""
        good = loss.isfinite() & grad_norm.isfinite()
        if self._spike_factor:
            good &= ~(loss > self._spike_factor * self.loss_mean)  # of NaN, nothing is above
        mean = torch.where(self.loss_mean.isnan(), loss, torch.lerp(loss, self.loss_mean, LOSS_MEAN_DECAY))
        self.loss_mean = torch.where(good, mean, self.loss_mean)
        skipped = 1 - good.float()
        self.skipped_steps = self.skipped_steps + skipped
        self.consecutive_skips = (self.consecutive_skips + 1) * skipped
        return skipped


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
