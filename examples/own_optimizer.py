"""Train with an optimizer of your own: Lion (arXiv 2302.06675).

torchtitan-lite train --job.config_file debug_model --optimizer.name own_optimizer:lion \
    --optimizer.lr 1e-4 --optimizer.weight_decay 1.0
"""

from typing import Any

import torch

from torchtitan_lite import OptimizerConfig


class Lion(torch.optim.Optimizer):
    """The sign of a momentum. Parameters and gradients may be DTensors, of which this rank has a
    shard. It is not called in a step whose loss or gradient is not finite."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:  # a tensor like the parameter: checkpoints load in any layout
                    state["momentum"] = torch.zeros_like(parameter)
                momentum, gradient = state["momentum"], parameter.grad
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(momentum.lerp(gradient, 1 - beta1).sign() * group["lr"])
                momentum.lerp_(gradient, 1 - beta2)


def lion(groups: list[dict[str, Any]], optimizer: OptimizerConfig) -> Lion:
    """Return the optimizer of parameter `groups`, as [optimizer] says. The trainer sets the
    learning rate of each before each step."""
    betas = {"betas": (optimizer.beta1, optimizer.beta2), "weight_decay": optimizer.weight_decay}
    return Lion(groups, {"lr": optimizer.lr, **betas})
