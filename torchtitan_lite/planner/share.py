"""A share of a job's model: the stages of one pipeline rank, or one of them.

A share is a job whose model has the blocks of its stages only. Memory and time of a rank are those
of its share, computed like any job's.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cache

from torchtitan_lite.config import Stages
from torchtitan_lite.float8.selection import LinearChoice
from torchtitan_lite.job import Job

EMBEDDING, OUTPUT = "tok_embeddings", "output"


def share_of(job: Job, stages: Iterable[int]) -> Job:
    """Return the share of `job` that has those of its pipeline stages."""
    share = replace(job, stages=tuple(job.stages[i] for i in stages))
    return replace(share, model_args=replace(job.model_args, n_layers=len(blocks_of(share))))


def rank_shares(job: Job) -> list[Job]:
    """Return the share of each pipeline rank; `job` alone without pipelines."""
    if job.degrees.pp == 1:
        return [job]
    return [share_of(job, job.rank_stages(rank)) for rank in range(job.degrees.pp)]


def blocks_of(job: Job) -> Sequence[int]:
    """Return the indices, in the whole model, of the blocks in a job's stages."""
    return _blocks(job.stages)


@cache
def _blocks(stages: Stages) -> Sequence[int]:
    names = (name.partition(".") for stage in stages for name in stage)
    return [int(index) for kind, _, index in names if kind == "layers"]


def checkpointed_blocks(job: Job) -> Sequence[int]:
    """Return those of the blocks that recompute, apart from the compiler's choices."""
    blocks = blocks_of(job)
    every = job.config.activation_checkpoint.checkpointed_layers(max(blocks, default=0) + 1)
    return [i for i in blocks if i in every]


def has(job: Job, module: str) -> bool:
    """Whether `module`, EMBEDDING or OUTPUT, is in a job's stages."""
    return any(module in stage for stage in job.stages)


def modules_in(job: Job, names: Collection[str]) -> Sequence[str]:
    """Return those `names` of modules, such as layers.3.attention.wq, that are in its stages."""
    return _modules(job.stages, tuple(names))


@cache
def _modules(stages: Stages, names: tuple[str, ...]) -> Sequence[str]:
    there = {name for stage in stages for name in stage}
    # A module is a stage's if the first part of its name is, or both of a block.
    return [name for name in names if name in there or ".".join(name.split(".", 2)[:2]) in there]


def linears_in(job: Job, linears: Collection[LinearChoice]) -> Sequence[LinearChoice]:
    """Return the linears that are in its stages."""
    named = [replace(linear, names=tuple(modules_in(job, linear.names))) for linear in linears]
    return [linear for linear in named if linear.names]
