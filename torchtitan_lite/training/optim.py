"""The optimizer, and the guard that decides which steps update the parameters."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import Parameter

from torchtitan_lite import patches
from torchtitan_lite.base.outside import check_outside, load_object
from torchtitan_lite.checkpoint.manifest import TrainingProgress
from torchtitan_lite.config import Config, OptimizerConfig, TrainingConfig, matches_parameter
from torchtitan_lite.models.init import local_part


def parameter_groups(
    named: Iterable[tuple[str, Parameter]], optimizer: OptimizerConfig
) -> list[dict[str, Any]]:
    """Return the groups of parameters with one weight decay, and one factor of the learning rate,
    lr_factor, as torch's optimizers take them: with the defaults one group of all."""
    groups: dict[tuple[float, float], dict[str, Parameter]] = defaultdict(dict)
    for name, parameter in named:
        name = name.replace("_checkpoint_wrapped_module.", "")
        decays = not any(matches_parameter(part, name) for part in optimizer.no_decay)
        factors = [
            each for part, each in optimizer.lr_factors.items() if matches_parameter(part, name)
        ]
        key = optimizer.weight_decay if decays else 0.0, math.prod(factors, start=1.0)
        groups[key][name] = parameter
    return [
        {
            "params": [*members.values()],
            "param_names": [*members],
            "weight_decay": decay,
            "lr_factor": factor,
        }
        for (decay, factor), members in groups.items()
    ]


def build_optimizer(
    groups: Sequence[dict[str, Any] | Parameter],
    optimizer: OptimizerConfig,
    *,
    mesh: DeviceMesh | None = None,
    backend: str = "inductor",
) -> torch.optim.Optimizer:
    """Build the optimizer that [optimizer] names, of parameter `groups`, or of one group of
    parameters. `mesh`: that of all ranks; None: weights are whole. `backend`: torch.compile's."""
    if ":" in optimizer.name:
        built = load_object("[optimizer] name", optimizer.name)(groups, optimizer)
        fits = isinstance(built, torch.optim.Optimizer)
        rule = "must return a torch.optim.Optimizer"
        check_outside("[optimizer] name", optimizer.name, fits, rule)
        return built
    settings: dict[str, Any] = optimizer.model_dump(include={"lr", "eps", "weight_decay"})
    settings["betas"] = optimizer.beta1, optimizer.beta2

    if optimizer.state_dtype == "bfloat16":
        from .bfloat16_adamw import BFloat16AdamW

        return BFloat16AdamW(groups, backend=backend, **settings)
    patches.update_shards()
    fused, foreach = (optimizer.implementation == name for name in ("fused", "foreach"))
    settings |= {"fused": fused, "foreach": foreach}
    if optimizer.name == "Muon":
        from .muon import Muon

        return Muon(groups, mesh=mesh, momentum=optimizer.momentum, **settings)
    kind = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}[optimizer.name]
    return kind(groups, **settings)


def set_learning_rate(
    optimizer: torch.optim.Optimizer, config: Config, *, step: int, last_step: int
) -> float:
    """Set the learning rate of `step` (1-based) in all groups, and return it without their factors.
    Raises ConfigError for a decay from outside that is no finite number."""
    scheduler = config.lr_scheduler
    lr = config.optimizer.lr * scheduler.factor(step, training_steps=last_step)
    rule = f"must return a number from 1 to 0: at step {step} the learning rate would be {lr}"
    check_outside("[lr_scheduler] decay_type", scheduler.decay_type, math.isfinite(lr), rule)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)  # outside groups may have none
    return lr


# ----- Clipping -----


def clip_gradients(
    parameters: Iterable[Parameter], max_norm: float, *, stages: dist.ProcessGroup
) -> Tensor:
    """Scale the gradients down to `max_norm`, in place. Return the norm before, [] float32, over
    the parameters of all ranks of `stages`, the group of the pipeline."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients[0].device.type == "cpu":
        norm = _norm_on_cpu(gradients)
    else:
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if stages.size() > 1:
        squares = norm.float().square()
        dist.all_reduce(squares, group=stages)
        norm = squares.sqrt()

    # As torch.nn.utils.clip_grads_with_norm_, but on the shards, without the cost of DTensors.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(list(map(local_part, gradients)), factor)
    return norm.float()


def _norm_on_cpu(gradients: Iterable[Tensor]) -> Tensor:
    """Return the norm of `gradients` and of their shards on other ranks, [] float32.

    torch adds squares on CPU in float32: the norm of 60 million elements is 0.46 % too small. Here
    pieces of 2^14 elements are added in float64."""
    # Gradients with the same layout share the sums over ranks.
    by_layout: dict[Any, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
    for gradient in gradients:
        layout: tuple[Any, Any] = None, ()  # mesh and placements
        if isinstance(gradient, DTensor):
            whole = [Replicate() if each.is_partial() else each for each in gradient.placements]
            gradient = gradient.redistribute(placements=whole)
            layout = gradient.device_mesh, gradient.placements
        pieces = local_part(gradient).flatten().split(1 << 14)
        norms = torch._foreach_norm(pieces, dtype=torch.float32)
        by_layout[layout] += torch.stack(norms).double().square().sum()

    for (mesh, placements), squares in by_layout.items():
        for dim, placement in enumerate(placements):
            if not placement.is_replicate():
                dist.all_reduce(squares, group=mesh.get_group(dim))
    return torch.stack([*by_layout.values()]).sum().sqrt().float()


# ----- Steps without an update -----


class UpdateGuard:
    """Decides on the device which steps do not update the parameters, and counts them there.

    These are steps whose loss or gradient is not finite and, with a `loss_spike_factor`, those
    whose loss exceeds that factor times the running mean of losses. If one rank of `group` skips a
    step, all do.

    Its tensors are [] float32. `consecutive_skips` counts the steps since the last update;
    `loss_mean` is over the steps that had one, in nat, NaN before the first."""

    def __init__(
        self,
        training: TrainingConfig,
        progress: TrainingProgress,
        *,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        """`progress`: the counts and the mean to continue from."""
        self._spike_factor, self._group = training.loss_spike_factor, group
        mean = math.nan if progress.loss_mean is None else progress.loss_mean
        self.skipped_steps = torch.tensor(float(progress.skipped_steps), device=device)
        self.consecutive_skips = torch.tensor(float(progress.consecutive_skips), device=device)
        self.loss_mean = torch.tensor(mean, device=device)

    def found_inf(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return 1 if this step must not update the parameters, else 0, on all ranks of the group
        alike. `loss` and `grad_norm` are [] float32. Does not wait for the device."""
        good = loss.isfinite() & grad_norm.isfinite()
        if self._spike_factor:
            good &= ~(loss > self._spike_factor * self.loss_mean)  # false if the mean is NaN
        skipped = 1 - good.float()
        if self._group.size() > 1:
            dist.all_reduce(skipped, dist.ReduceOp.MAX, group=self._group)

        mean = torch.lerp(loss, self.loss_mean, 0.98)  # a loss has half its weight after 34 steps
        mean = torch.where(self.loss_mean.isnan(), loss, mean)
        self.loss_mean = torch.where(skipped == 0, mean, self.loss_mean)
        self.skipped_steps = self.skipped_steps + skipped
        self.consecutive_skips = (self.consecutive_skips + 1) * skipped
        return skipped


def step_unless(optimizer: torch.optim.Optimizer, found_inf: Tensor) -> None:
    """Update the parameters unless `found_inf`, [] float32 on their device, is 1. `optimizer` reads
    it on the device if it can, else it is read here."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]  # set as GradScaler does
    elif found_inf.item():
        return
    optimizer.step()
