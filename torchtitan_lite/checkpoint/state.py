"""A run's state as tensors by flat names, and the state of a rank's random generators.

`model.<fqn>` is a parameter; `optimizer.<fqn>.exp_avg`, `.exp_avg_sq` and `.step` are what AdamW
keeps of it.
"""

import base64
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.changes import tensor_changes
from torchtitan_lite.checkpoint.manifest import (
    MOST_JSON_BYTES,
    BrokenCheckpoint,
    TensorEntry,
    read_regular,
)
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.torchao_types import is_gathered_in_float8

MOST_LISTED = 8
"""Tensors that a message names one by one."""


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of `model`, the storage shared, by name."""
    return {
        f"model.{fqn}": _plain(parameter)
        for fqn, parameter in model.state_dict(keep_vars=True).items()
    }


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The parameters and the optimizer's state, the storage shared: loading into the result loads
    into both. The optimizer's state is made where there is none yet."""
    if not optimizer.state:
        _init_optimizer_state(optimizer)
    state = model_state(model)
    for fqn, parameter in model.state_dict(keep_vars=True).items():
        for name, tensor in optimizer.state[parameter].items():
            state[f"optimizer.{fqn}.{name}"] = _plain(tensor)
    return state


def _plain(tensor: Tensor) -> Tensor:
    """`tensor` without gradient, and without torchao's wrapper of float8-gathered weights: what is
    saved is read without torchao."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor) and is_gathered_in_float8(tensor._local_tensor):
        return DTensor(tensor._local_tensor._tensor, tensor._spec, requires_grad=False)
    return tensor


class Snapshot:
    """A copy of a state in CPU memory, which is kept from one copy to the next. torch's own
    stager does the same, but first allocates every tensor anew: it takes 1.4 times as long as
    the copying."""

    def __init__(self, *, pinned: bool) -> None:
        """`pinned` memory is copied into faster, from a GPU."""
        self._pinned = pinned
        self._memory: dict[str, Tensor] = {}

    def take(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state as it is now, under the same names and of the same layout, valid until the next
        call."""
        copies = {}
        for name, tensor in state.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if name not in self._memory:
                self._memory[name] = torch.empty_like(local, device="cpu", pin_memory=self._pinned)
            copy = self._memory[name].copy_(local, non_blocking=True)
            copies[name] = (
                DTensor(copy, tensor._spec, requires_grad=False)
                if isinstance(tensor, DTensor)
                else copy
            )
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copies


def _init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Have `optimizer` make its state, as it is before the first step, by a step that changes no
    parameter."""
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
    """Data type and global shape of each tensor."""
    return {
        name: TensorEntry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in state.items()
    }


def check_tensors(
    saved: Mapping[str, TensorEntry], wanted: Mapping[str, TensorEntry], *, path: Path
) -> None:
    """Raise CheckpointError, with the tensors that differ, unless the checkpoint at `path` holds
    what is wanted."""
    if differing := tensor_changes(saved, wanted):
        listed = "; ".join(differing[:MOST_LISTED])
        more = f"; and {len(differing) - MOST_LISTED} more" if len(differing) > MOST_LISTED else ""
        of, fix = "model", "Train the model that was saved"
        if all(each.startswith("optimizer.") for each in differing):
            of = "optimizer"
            fix = (
                "Set [optimizer] state_dtype as it was, and with moments in 8 bits [parallelism] "
                "tensor_parallel_degree, which decides what of a row a rank has"
            )
        raise CheckpointError(
            f"[checkpoint] {path} is of another {of}: {len(differing)} tensors differ from this run's: {listed}{more}. "
            f"{fix}, or name another checkpoint or another [job] dump_folder."
        )


def first_non_finite(state: Mapping[str, Tensor]) -> str | None:
    """Name of the first tensor of which this rank's part holds a value that is not finite; None if
    there is none."""
    for name, tensor in state.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # The sum of finite values is finite but for an overflow, and needs no second tensor of the
        # same size.
        if not local.sum(dtype=torch.float64).isfinite():
            return name
    return None


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of this rank's random generators, Python's, numpy's and torch's, in a form that
    JSON takes."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict), "legacy=False asks for a dict"
    key = numpy_state["state"]["key"].tolist()
    state = {
        "python": [version, list(words), gauss],
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": key}},
        "torch": _encode(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["cuda"] = _encode(torch.cuda.get_rng_state(device))
    return state


def load_random_state(path: Path, *, device: torch.device) -> None:
    """Have this rank's random generators go on from what a checkpoint's file holds. One that it
    lacks, CUDA's of a run on CPU, stays. Raises BrokenCheckpoint for a file of another kind."""
    try:
        state = json.loads(read_regular(path, most=MOST_JSON_BYTES))
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        inner = state["numpy"]["state"]
        np.random.set_state(
            {**state["numpy"], "state": {**inner, "key": np.array(inner["key"], dtype=np.uint32)}}
        )
        torch.set_rng_state(_decode(state["torch"]))
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(_decode(state["cuda"]), device)
    except BrokenCheckpoint:
        raise
    except (OSError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise BrokenCheckpoint(f"{path.name}: {type(error).__name__}: {error}") from error


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
