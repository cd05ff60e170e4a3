"""AdamW with moments in bfloat16."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchtitan_lite.base.torchao_types import is_gathered_in_float8
from torchtitan_lite.models.init import local_part


class BFloat16AdamW(torch.optim.Optimizer):
    """AdamW that computes in float32 and stores the two moments in bfloat16, the second rounded
    stochastically. On a GPU the update is compiled, to 2 kernels a parameter."""

    _step_supports_amp_scaling = True  # as GradScaler knows an optimizer that reads `found_inf`

    def __init__(self, groups: Iterable[Any], *, backend: str, **settings: Any) -> None:
        super().__init__(groups, settings)
        self._device = self.param_groups[0]["params"][0].device
        self.found_inf = torch.zeros((), device=self._device)
        self._update: Any = _update
        if self._device.type == "cuda":
            self._update = torch.compile(_update, dynamic=False, backend=backend)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        assert closure is None, "the loss is computed once a step"
        for group in self.param_groups:
            # A tensor, since the compiler would compile the update again for each new number.
            lr = torch.full((), group["lr"], device=self._device)

            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), device=self._device)
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                self._update(
                    own_part(parameter.detach()),
                    own_part(parameter.grad),
                    {name: own_part(tensor) for name, tensor in state.items()},
                    skip=self.found_inf,
                    lr=lr,
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                )


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of `tensor`, without torchao's wrapper for float8 all-gathers."""
    local = local_part(tensor)
    return local._tensor if is_gathered_in_float8(local) else local


def _update(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    *,
    skip: Tensor,
    lr: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Make AdamW's step (arXiv 1711.05101, algorithm 2) in place, unless `skip` is 1."""
    gradient = gradient.float()
    step = state["step"] + 1
    mean = torch.lerp(gradient, state["exp_avg"].float(), betas[0])
    square = torch.lerp(gradient.square(), state["exp_avg_sq"].float(), betas[1])
    root = (square / (1 - betas[1] ** step)).sqrt()
    change = lr * (mean / (1 - betas[0] ** step)) / (root + eps)
    updated = parameter.float() * (1 - lr * weight_decay) - change

    # Store everything, or what was there before.
    for old, new in (
        (parameter, updated),
        (state["step"], step),
        (state["exp_avg"], mean.to(torch.bfloat16)),
        (state["exp_avg_sq"], _round_stochastically(square, step)),
    ):
        old.copy_(torch.where(skip == 0, new, old))


def _round_stochastically(x: Tensor, step: Tensor) -> Tensor:
    """Round `x`, float32 and not negative, to a neighbour in bfloat16, so that the mean is exact.

    Rounded to the nearest, a second moment hardly falls if 1 - beta2 is less than half a rounding
    step, 0.001. The random bits are a hash of the step and of the element's position."""
    mask = 2**31 - 1
    place = torch.arange(x.numel(), device=x.device).view(x.shape)
    # Odd factors modulo 2^32, negative so that they fit in int32: Triton refuses larger constants.
    bits = (place * -0x61C8864F + step.long() * -0x7A143589) & mask
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):  # no product exceeds 2^63
        bits = ((bits >> shift) ^ bits) * factor & mask
    threshold = (bits >> 15).int()  # below 2**16: bfloat16 lacks the last 16 bits of a float32
    rounded = (x.view(torch.int32) + threshold) & -(1 << 16)
    return rounded.view(torch.float32).to(torch.bfloat16)
