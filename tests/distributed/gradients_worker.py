"""Compares the gradients of a layout with one process's, in float32 without float8, through what
the trainer calls for a step's microbatches: `gradients_worker.py RUNS`, where RUNS is JSON as
matrix_worker.py takes it. Prints as a line of JSON, by run and parameter, the norm of the
difference relative to the norm of the gradient."""

from contextlib import nullcontext
from functools import partial
from itertools import cycle

import torch
import torch.distributed as dist
from matrix_worker import build_job, tell_each
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite.config.job import Job
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.models.loss import CrossEntropy
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.training.model import build_microbatches, build_model, join_stages

SETTINGS = ("--training.mixed_precision_param=float32", "--training.mixed_precision_reduce=float32")
DOCUMENTS = ((5, 21, 40, 43), (12, 33))
"""Where documents start in the sequences of 64 tokens; none ends at the end of a chunk."""


def sequences(job: Job) -> tuple[Tensor, Tensor]:
    """Return the tokens and labels [global batch, S] of a step."""
    generator = torch.Generator().manual_seed(0)
    shape = job.batch.global_batch_size, job.config.training.seq_len
    tokens, labels = torch.randint(3, job.model_args.vocab_size, (2, *shape), generator=generator)
    if (bos_id := job.model_args.document_bos_id) is not None:
        for row, starts in zip(tokens, cycle(DOCUMENTS)):
            row[list(starts)] = bos_id
    return tokens, labels


def alone(job: Job, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the gradients of one process by parameter."""
    model = Transformer(job.model_args)
    init_weights(model, seed=job.config.debug.seed, buffer_device=tokens.device)
    loss = CrossEntropy(compiled=False)
    model(tokens, partial(loss, labels=labels, scale=1 / tokens.numel())).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def compare(overrides: list[str], *, device: torch.device) -> dict[str, float]:
    """Return the relative differences of a run by parameter. A collective call."""
    job = build_job([*SETTINGS, *overrides], device=device)
    tokens, labels = sequences(job)
    expected = alone(job, tokens, labels)

    mesh = build_mesh(job.degrees, device_type=device.type)
    built = build_model(job, mesh, device=device)
    microbatches = build_microbatches(
        job, built, mesh, device=device, timed=lambda _: nullcontext()
    )
    own = slice(mesh["dp_shard"].get_local_rank(), None, job.degrees.dp)
    size = job.batch.local_batch_size
    batches = list(zip(tokens[own].split(size), labels[own].split(size), strict=True))
    microbatches.train(batches, scale=1 / (len(batches) * job.microbatch_tokens))

    found = {}
    for name, weight in join_stages(built.stages).named_parameters():
        grad, right = weight.grad, expected[name]
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        found[name] = float((whole - right).norm() / right.norm())
    of_ranks: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_ranks, found)
    names = sorted(set().union(*of_ranks))
    return {name: max(rank[name] for rank in of_ranks if name in rank) for name in names}


if __name__ == "__main__":
    tell_each(compare)
