"""Compares Muon's updates in a layout with one process's, by torch's own Muon and AdamW, from the
same gradients: `muon_worker.py RUNS`, where RUNS is JSON as matrix_worker.py takes it. Prints as a
line of JSON, by run, the largest difference of a weight relative to the largest update of its
parameter, of "matrices" and of "others", and how many matrices each rank orthogonalized in a step.
"""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from matrix_worker import build_job, tell_each
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from torchtitan_lite.models.init import find_shard, init_weights
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.training import muon
from torchtitan_lite.training.bfloat16_adamw import own_part
from torchtitan_lite.training.model import build_model
from torchtitan_lite.training.optim import build_optimizer, parameter_groups, step_unless

STEPS = 3
SKIPPED = 1  # the step without an update


def shard_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that is laid out like `parameter`."""
    if not isinstance(parameter, DTensor):
        return whole
    return whole[find_shard(parameter, parameter.device_mesh.get_coordinate())]


def gradient_like(parameter: Parameter, whole: Tensor) -> Tensor:
    """Return the gradient of `parameter` whose values are `whole`."""
    gradient = torch.zeros_like(parameter.detach())
    own_part(gradient).copy_(shard_of(whole, parameter))
    return gradient


def compare(overrides: list[str], *, device: torch.device) -> dict[str, Any]:
    """Return the figures of a run. A collective call."""
    job = build_job(["--optimizer.name=Muon", "--optimizer.lr=1e-2", *overrides], device=device)
    alone = Transformer(job.model_args)
    init_weights(alone, seed=job.config.debug.seed, buffer_device=device)
    expected = dict(alone.named_parameters())
    before = {name: weight.detach().clone() for name, weight in expected.items()}
    is_matrix = {name: "layers" in name and each.ndim == 2 for name, each in expected.items()}
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    references = [
        torch.optim.Muon(
            [each for name, each in expected.items() if is_matrix[name]],
            adjust_lr_fn="match_rms_adamw",
            **settings,
        ),
        torch.optim.AdamW(
            [each for name, each in expected.items() if not is_matrix[name]],
            betas=(0.9, 0.95),
            **settings,
        ),
    ]

    mesh = build_mesh(job.degrees, device_type=device.type)
    built = build_model(job, mesh, device=device)
    found = dict(built.model.named_parameters())
    config = job.config.optimizer
    optimizer = build_optimizer(parameter_groups(found.items(), config), config, mesh=mesh)
    generator = torch.Generator().manual_seed(0)
    with patch.object(muon, "_newton_schulz", wraps=muon._newton_schulz) as newton_schulz:
        for step in range(STEPS):
            for name, weight in expected.items():
                weight.grad = torch.randn(weight.shape, generator=generator)
                if name in found:
                    whole = weight.grad * torch.nan if step == SKIPPED else weight.grad
                    found[name].grad = gradient_like(found[name], whole)
            step_unless(optimizer, torch.tensor(float(step == SKIPPED)))
            if step != SKIPPED:
                for reference in references:
                    reference.step()

    worst = {"matrices": 0.0, "others": 0.0}
    for name, weight in found.items():
        change = (expected[name] - before[name]).abs().max()
        difference = own_part(weight.detach()) - shard_of(expected[name].detach(), weight)
        if difference.numel():
            kind = "matrices" if is_matrix[name] else "others"
            worst[kind] = max(worst[kind], float(difference.abs().max() / change))
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, worst | {"count": newton_schulz.call_count / STEPS})
    largest = {kind: max(each[kind] for each in of_ranks) for kind in worst}
    return largest | {"counts": [each["count"] for each in of_ranks]}


if __name__ == "__main__":
    tell_each(compare)
