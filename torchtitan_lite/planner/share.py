"""A share of a job's model: the stages of one pipeline rank, or one of them.

A share is a job whose model has the blocks of its stages only. Memory and time of a rank are those
of its share, computed like any job's.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cache

from torchtitan_lite.config import Stages
from torchtitan_lite.job import Job

EMBEDDING = "tok_embeddings"


def share_of(job: Job, stages: Iterable[int]) -> Job:
    """Return the share of `job` that has those of its pipeline stages."""
    own = tuple(job.stages[i] for i in stages)
    model_args = replace(job.model_args, n_layers=len(blocks_of(own)))
    return replace(job, stages=own, model_args=model_args)


def rank_shares(job: Job) -> list[Job]:
    """Return the share of each pipeline rank; `job` alone without pipelines."""
    if job.degrees.pp == 1:
        return [job]
    return [share_of(job, job.rank_stages(rank)) for rank in range(job.degrees.pp)]


def blocks_of(stages: Stages) -> list[int]:
    """Return the indices, in the whole model, of the blocks in `stages`."""
    names = (name.partition(".") for stage in stages for name in stage)
    return [int(index) for kind, _, index in names if kind == "layers"]


def checkpointed_blocks(job: Job) -> list[int]:
    """Return those of the blocks that recompute, apart from the compiler's choices."""
    blocks = blocks_of(job.stages)
    every = job.config.activation_checkpoint.checkpointed_layers(max(blocks, default=0) + 1)
    return [i for i in blocks if i in every]


def has(job: Job, module: str) -> bool:
    """Return whether `module`, EMBEDDING or OUTPUT, is in a job's stages."""
    return any(module in stage for stage in job.stages)


@cache
def modules_in(stages: Stages, names: Collection[str]) -> tuple[str, ...]:
    """Return those `names`, such as layers.3.attention.wq, whose block or module `stages` have."""
    there = {name for stage in stages for name in stage}
    return tuple(name for name in names if ".".join(name.split(".", 2)[:2]) in there)
