"""The state of a run as tensors by flat names.

`model.<fqn>` is a parameter; `optimizer.<fqn>.exp_avg`, `.exp_avg_sq` and `.step` are of AdamW.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.base.collectives import on_all_ranks
from torchtitan_lite.base.errors import NumericError
from torchtitan_lite.base.torchao_types import is_gathered_in_float8
from torchtitan_lite.models.init import all_finite

from .manifest import TensorEntry

PREFIX = "model."


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of `model` by name, sharing their storage."""
    return {f"{PREFIX}{fqn}": _plain(parameter) for parameter, fqn in _names(model).items()}


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return parameters and optimizer state by name, sharing their storage. Creates the optimizer's
    state if there is none yet."""
    if not optimizer.state:
        _init_optimizer_state(optimizer)
    state = model_state(model)
    for parameter, fqn in _names(model).items():
        for name, tensor in optimizer.state[parameter].items():
            state[f"optimizer.{fqn}.{name}"] = _plain(tensor)
    return state


def copy_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of a state on the CPU. DCP's way copies DTensors twice."""
    return {name: tensor.clone() for name, tensor in state.items()}


def _names(model: nn.Module) -> dict[Tensor, str]:
    """Return the name of each parameter. One that modules share has its first name."""
    names: dict[Tensor, str] = {}
    for fqn, parameter in model.state_dict(keep_vars=True).items():
        names.setdefault(parameter, fqn)
    return names


def _plain(tensor: Tensor) -> Tensor:
    """Return `tensor` detached, and without torchao's wrapper of float8-gathered weights."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor) and is_gathered_in_float8(tensor._local_tensor):
        return DTensor(tensor._local_tensor._tensor, tensor._spec, requires_grad=False)
    return tensor


def _init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make `optimizer` create its initial state, by a step that changes no parameter."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()

    for kept in optimizer.state.values():
        for tensor in kept.values():
            tensor.zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def entries(state: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """Return the data type and the global shape of each tensor."""
    return {
        name: TensorEntry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in state.items()
    }


def stage_entries(
    state: Mapping[str, Tensor], *, stages: dist.ProcessGroup | None
) -> dict[str, TensorEntry]:
    """Return the entries of all ranks of `stages`, which share the model. Collective."""
    merged: dict[str, TensorEntry] = {}
    for of_rank in on_all_ranks(lambda: entries(state), group=stages):
        merged |= of_rank
    return merged


def check_finite(state: Mapping[str, Tensor], *, step: int) -> None:
    """Raise NumericError if this rank's part of a tensor has a value that is not finite."""
    if bad := not_finite(state):
        raise NumericError(
            f"{bad[0]} is no longer finite after step {step}, so that step is not saved. Resume "
            "from an earlier checkpoint with a lower [optimizer] lr or a longer [lr_scheduler] "
            'warmup_steps, or if [checkpoint] export_dtype is "float16" with "float32".'
        )


def not_finite(state: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors with NaN or infinity in this rank's part."""
    return [name for name, tensor in state.items() if not all_finite(tensor)]
