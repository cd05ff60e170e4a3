"""Builds the tiny model of matrix.toml with the overrides of each of RUNS, JSON as matrix_worker.py
takes it, on every process, and tells as a line of JSON, by name, what it is and what it sends:
`weights` (sha256 of each full weight), `traffic` (of one forward and backward: collective, type,
elements sent), and `loaded`, the weights after loading the Hugging Face model in the folder "tied"
or "untied" of the second argument."""

import hashlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matrix_worker import build_job, tell_each
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from torchtitan_lite.checkpoint.hf_folder import load_hf
from torchtitan_lite.checkpoint.state import model_state
from torchtitan_lite.models.loss import CrossEntropy
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.training.model import build_model


class Traffic(TorchDispatchMode):
    """Notes every collective with its smallest plain tensor, which for a gather is what this rank
    sends."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Float8TrainingTensor in types:
            return NotImplemented  # let it take the operator apart, and see what it sends
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            if tensors:
                least = min(tensors, key=torch.Tensor.numel)
                self.sent.append((func.overloadpacket.__name__, str(least.dtype), least.numel()))
        return func(*args, **(kwargs or {}))


def digest(weight: torch.Tensor) -> str:
    full = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return hashlib.sha256(full.detach().numpy().tobytes()).hexdigest()


def inspect(overrides: list[str], *, device: torch.device) -> dict[str, Any]:
    """The model's `weights` and its `traffic`."""
    job = build_job(overrides, device=device)
    mesh = build_mesh(job.degrees, device_type=device.type)
    (model,) = build_model(job, mesh, device=device).stages
    state = model_state(model)
    weights = {name.removeprefix("model."): digest(weight) for name, weight in state.items()}
    tokens = torch.arange(2 * job.config.training.seq_len).view(2, -1) % job.model_args.vocab_size
    with Traffic() as traffic:
        model(tokens, partial(CrossEntropy(compiled=False), labels=tokens)).backward()
    kind = "tied" if job.model_args.tie_embeddings else "untied"
    load_hf(Path(sys.argv[2]) / kind, state, job.model_args, group=None)
    loaded = {name.removeprefix("model."): digest(weight) for name, weight in state.items()}
    return {"weights": weights, "traffic": traffic.sent, "loaded": loaded}


if __name__ == "__main__":
    tell_each(inspect)
