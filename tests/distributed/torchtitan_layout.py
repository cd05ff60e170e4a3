"""Checkpoints laid out as torchtitan's, saved by plain DCP."""

import io
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

Layout = Literal["v0.1.0", "v0.2.2", "weights"]


def torchtitan_state(weights: dict[str, Tensor], layout: Layout) -> dict[str, Any]:
    """What torchtitan gives to DCP: v0.1.0 a state "model", v0.2.2 the weights by themselves, and
    both those alone in a last save. A full one has tensors and other values of all states."""
    if layout == "weights":
        return dict(weights)
    losses = io.BytesIO()
    torch.save([0.5], losses)
    first = next(iter(weights))
    states: dict[str, Any] = {
        "optimizer": {
            f"state.{first}.exp_avg": torch.ones_like(weights[first]),
            f"param_groups.{first}.lr": 1e-3,
            f"param_groups.{first}.betas": (0.9, 0.95),
        },
        "dataloader": {"dp_rank_0": b"pickled", "world_size": 2},
        "lr_scheduler": {"last_epoch": 3},
        "train_state": {"step": torch.tensor(3, dtype=torch.int32), "losses": losses},
    }
    if layout == "v0.2.2":
        return states | weights
    return states | {"model": weights | {"freqs_cis": torch.ones(4, 2, dtype=torch.complex64)}}


def save_torchtitan(path: Path, weights: dict[str, Tensor], layout: Layout = "v0.2.2") -> Path:
    """Save in one process, and return the folder."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(torchtitan_state(weights, layout), checkpoint_id=path, no_dist=True)
    return path
