"""Compares the gradients of context parallelism with one process's, in float32 without float8:
`gradients_worker.py RUNS`, where RUNS is JSON as matrix_worker.py takes it. Prints as a line of
JSON, by run and parameter, the norm of the difference relative to the norm of the gradient."""

import json
import sys
from functools import partial

import torch
import torch.distributed as dist
from matrix_worker import CONFIG, forget_compiled
from torch import Tensor

from torchtitan_lite.build import prepare_job
from torchtitan_lite.build_model import build_model
from torchtitan_lite.config import CommConfig, load_config
from torchtitan_lite.job import Job
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.models.loss import CrossEntropy
from torchtitan_lite.parallel.distributed import build_mesh, end_process, init_distributed

SETTINGS = ("--training.mixed_precision_param=float32", "--training.mixed_precision_reduce=float32")
DOCUMENTS = ((5, 21, 40, 43), (12, 33))
"""Where documents start in the sequences of 64 tokens; none ends at the end of a chunk."""


def sequences(job: Job) -> tuple[Tensor, Tensor]:
    """Return the tokens and labels [dp, S] of a sequence for each data-parallel rank."""
    generator = torch.Generator().manual_seed(0)
    shape = job.degrees.dp, job.config.training.seq_len
    tokens, labels = torch.randint(3, job.model_args.vocab_size, (2, *shape), generator=generator)
    if (bos_id := job.model_args.document_bos_id) is not None:
        for row, starts in zip(tokens, DOCUMENTS, strict=False):
            row[list(starts)] = bos_id
    return tokens, labels


def gradients(
    model: Transformer, tokens: Tensor, labels: Tensor, *, scale: float
) -> dict[str, Tensor]:
    """Return the gradients by parameter, sharded as the parameters are."""
    labels = model.part(labels, 1)
    head = partial(CrossEntropy(compiled=False).of_linear, labels=labels, scale=scale)
    model(tokens, head).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def compare(overrides: list[str], *, device: torch.device) -> dict[str, float]:
    """Return the relative differences of a run by parameter."""
    arguments = ["--job.config_file", str(CONFIG), *SETTINGS, *overrides]
    config = load_config(arguments, world_size=dist.get_world_size())
    job, _ = prepare_job(config, device=device)
    tokens, labels = sequences(job)

    alone = Transformer(job.model_args)
    init_weights(alone, seed=config.debug.seed, buffer_device=device)
    expected = gradients(alone, tokens, labels, scale=1 / tokens.numel())

    mesh = build_mesh(job.degrees, device_type=device.type)
    (model,) = build_model(job, mesh, device=device).stages
    own = mesh["dp_shard"].get_local_rank()
    found = gradients(
        model, tokens[own : own + 1], labels[own : own + 1], scale=1 / job.microbatch_tokens
    )
    wholes = {name: grad.full_tensor() for name, grad in found.items()}
    return {
        name: float((wholes[name] - grad).norm() / grad.norm()) for name, grad in expected.items()
    }


def main() -> None:
    device = init_distributed(CommConfig())
    found = {}
    for name, overrides in json.loads(sys.argv[1]).items():
        found[name] = compare(overrides, device=device)
        forget_compiled()
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    end_process(0)


if __name__ == "__main__":
    main()
