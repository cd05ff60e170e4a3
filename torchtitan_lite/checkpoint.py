"""Saving and resuming with torch.distributed.checkpoint: a folder a step, named once it is complete."""

import json
import re
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from torchtitan_lite.config import CheckpointConfig
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.logger import logger

PROGRESS = "progress.json"


@dataclass(frozen=True)
class Progress:
    """How far a run is: what one that goes on from there needs besides the model and the optimizer."""

    step: int
    samples: int
    """Trained on by all ranks since step 1."""
    tokens: int
    """Trained on by all ranks since step 1."""
    data: dict[str, int | str]
    """What decides which tokens a sample has, apart from its number."""

    def held_out(self, store: int) -> int:
        """Windows of a store, by its number from 1, that were held out for validation."""
        return int(self.data.get(f"store {store} held out", 0))


NEW_RUN = Progress(step=0, samples=0, tokens=0, data={})


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` stands once it is complete."""
    return folder / f"step-{step:08d}"


def committed_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in `folder`, ascending."""
    if not folder.is_dir():
        return []
    names = (re.fullmatch(r"step-(\d{8})", path.name) for path in folder.iterdir())
    return sorted(int(name[1]) for name in names if name)


def find_resume_step(checkpoint: CheckpointConfig, *, folder: Path) -> int:
    """The step to resume from, 0 for none. Raises CheckpointError if the step asked for has no checkpoint."""
    if not checkpoint.enable or checkpoint.load_step == 0:
        return 0
    steps = committed_steps(folder)
    if checkpoint.load_step == -1:
        return steps[-1] if steps else 0
    if checkpoint.load_step not in steps:
        have = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(
            f"[checkpoint] load_step = {checkpoint.load_step}: {folder} has no checkpoint of that step "
            f"(it has: {have}); use one of these, or -1 for the newest."
        )
    return checkpoint.load_step


def read_progress(folder: Path, step: int) -> Progress:
    """The progress of the checkpoint of `step` in `folder`; that of a new run for step 0. Raises CheckpointError for
    one that is damaged."""
    if step == 0:
        return NEW_RUN
    path = step_folder(folder, step) / PROGRESS
    try:
        fields = json.loads(path.read_text())
        earlier = not {"samples", "data"} <= fields.keys()
        progress = None if earlier else Progress(**fields)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _unloadable(path, error) from error
    if progress is None:
        raise CheckpointError(
            f"[checkpoint] {path} is of an earlier version, which did not record samples and data; go on with that "
            "version, or start anew with load_step = 0."
        )
    return progress


def _unloadable(path: Path, error: BaseException) -> CheckpointError:
    reason = str(error).strip().splitlines()[-1]
    return CheckpointError(
        f"[checkpoint] {path} cannot be loaded: {reason}; it may be damaged, or be of another model. "
        "Name an older one with load_step, or another [job] dump_folder."
    )


def plain_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """`state` with torchao's wrapper of float8-gathered weights taken off; the storage is shared, so loading into the
    result loads into the model, and what is saved is read without torchao."""

    def unwrap(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) and isinstance(tensor._local_tensor, WeightWithDynamicFloat8CastTensor):
            return DTensor.from_local(
                tensor._local_tensor._tensor,
                tensor.device_mesh,
                tensor.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
        return tensor

    return tree_map_only(torch.Tensor, unwrap, state)


class Checkpointer:
    """Saves and loads the model, the optimizer and the progress in `folder`. All methods are collective calls."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: CheckpointConfig, *, folder: Path
    ) -> None:
        self._model, self._optimizer, self.folder = model, optimizer, folder
        self._interval = checkpoint.interval
        self._keep = checkpoint.keep_latest_k
        self.enabled = checkpoint.enable

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return plain_tensors({"model": model, "optimizer": optimizer})

    def load(self, step: int) -> None:
        """Read the checkpoint of `step` into the model and the optimizer.

        Raises CheckpointError for one that is damaged or of another model."""
        path = step_folder(self.folder, step)
        state = self._state()
        try:
            dcp.load(state, checkpoint_id=path)
        except (CheckpointException, OSError, ValueError) as error:
            raise _unloadable(path, error) from error
        configured = [{key: value for key, value in group.items() if key != "params"} for group in self._groups]
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        for group, settings in zip(self._groups, configured, strict=True):
            group.update(settings)  # the config's, which may have changed since the save
        if dist.get_rank() == 0:
            self._set_aside_after(step)
        logger.info(f"resumed from {path}")

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def _set_aside_after(self, step: int) -> None:
        """Rename the checkpoints of later steps, which the run that goes on from `step` will train anew."""
        for later in committed_steps(self.folder):
            if later > step:
                old = step_folder(self.folder, later)
                aside = old.rename(self.folder / f"superseded-{old.name}-{time.time_ns()}")
                logger.info(f"{old} is of a run past step {step}: kept as {aside}")

    def due(self, step: int, *, last: bool) -> bool:
        """Whether `step` ends with a save."""
        return self.enabled and (last or step % self._interval == 0)

    def save(self, progress: Progress) -> str:
        """Path of the checkpoint of a step, which appears there once it is complete."""
        target = step_folder(self.folder, progress.step)
        draft = self.folder / f".tmp-{target.name}"
        if dist.get_rank() == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        dist.barrier()
        dcp.save(self._state(), checkpoint_id=draft)
        if dist.get_rank() == 0:
            (draft / PROGRESS).write_text(json.dumps(asdict(progress)))
            draft.rename(target)
            if self._keep:
                for old in committed_steps(self.folder)[: -self._keep]:
                    shutil.rmtree(step_folder(self.folder, old))
        dist.barrier()
        logger.info(f"saved {target}")
        return str(target)
