"""Time of a step with pipeline parallelism.

Ranks with equal stages pause for a share of (p - 1) / (n v + p - 1) of the step, with p ranks of v
stages and n microbatches (1F1B, GPipe, Interleaved1F1B: arXiv 2104.04473, section 2.2), apart from
sending. Stages are not equal, so the order of all passes is timed instead.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from torchtitan_lite.catalog.flavors import OUTPUT
from torchtitan_lite.config import Stages
from torchtitan_lite.config.job import Job
from torchtitan_lite.float8.selection import LinearChoice

from .communication import PIPELINE
from .orders import pipeline_orders, rank_ends
from .rank import EMBEDDING, blocks_of, checkpointed_blocks, has, rank_shares, share_of
from .roofline import Roofline
from .step import OTHER_STAGES, Step, StepTime


@dataclass(frozen=True)
class PipelineTime:
    """Times of a step of a pipeline."""

    ranks: list[StepTime]  # each as long as the slowest makes it
    actions_s: Sequence[Mapping[str, float]]  # of a microbatch on each stage, by kind of action
    send_bytes: int  # what a stage sends to the next one: its result of a microbatch
    send_s: float  # seconds to send it


def time_step(
    roofline: Roofline, linears: Sequence[LinearChoice], in_float8: Collection[LinearChoice]
) -> StepTime:
    """Time a step of a model of `linears`, of which some train `in_float8`; of a pipeline, on the
    rank that waits least for others."""
    if roofline.job.degrees.pp == 1:
        return Step(roofline, linears, in_float8).time()
    ranks = time_pipeline(roofline, linears, in_float8).ranks
    return min(ranks, key=lambda step: step.idle_s[OTHER_STAGES])


def time_pipeline(
    roofline: Roofline, linears: Sequence[LinearChoice], in_float8: Collection[LinearChoice]
) -> PipelineTime:
    """Time a step on all ranks of a pipeline."""
    job, n = roofline.job, roofline.job.batch.grad_accum_steps
    stages = [share_of(job, [i]) for i in range(len(job.stages))]
    steps = _steps(roofline, linears, in_float8, [*stages, *rank_shares(job)])
    of_stages, of_ranks = steps[: len(stages)], steps[len(stages) :]

    # The order of passes, with sends and as if these took no time.
    actions_s = [step.actions_s() for step in of_stages]
    passes_s = {(k, i): seconds for i, each in enumerate(actions_s) for k, seconds in each.items()}
    send_bytes = steps[0].rank.residual
    send_s = steps[0].network.send_s(send_bytes, steps[0].rings[PIPELINE])
    orders = pipeline_orders(job)
    ends = rank_ends(orders, passes_s, send_s=send_s)
    sending = max(ends) - max(rank_ends(orders, passes_s, send_s=0.0))

    # What is not in the passes is before or after all of them: FSDP, and the host if it is slower.
    # Clipping waits for all ranks.
    times = [step.time() for step in of_ranks]
    updates, passed = [], []
    for rank, (step, time) in enumerate(zip(of_ranks, times, strict=True)):
        own = [actions_s[i]["F"] + actions_s[i]["B"] for i in job.rank_stages(rank)]
        updates.append((1 + step.late) * time.device_parts_s["optimizer"])
        passed.append(ends[rank] + time.step_s - updates[rank] - n * sum(own))
    step_s = max(passed) + max(updates)
    ranks = [_waiting(time, step_s, sending) for time in times]
    return PipelineTime(ranks, actions_s, send_bytes, send_s)


def _steps(
    roofline: Roofline,
    linears: Sequence[LinearChoice],
    in_float8: Collection[LinearChoice],
    shares: Iterable[Job],
) -> list[Step]:
    """Return the step of each share. Equal shares have the same one."""

    def own(choices: Collection[LinearChoice], share: Job) -> list[LinearChoice]:
        named = [replace(each, names=_modules_in(share.stages, each.names)) for each in choices]
        return [each for each in named if each.names]

    steps, made = [], dict[Hashable, Step]()
    for share in shares:
        ends = has(share, EMBEDDING), has(share, OUTPUT)
        kind = len(blocks_of(share.stages)), len(checkpointed_blocks(share)), ends
        if kind not in made:
            recomputed = frozenset(_modules_in(share.stages, roofline.recomputed))
            part = replace(roofline, job=share, recomputed=recomputed)
            made[kind] = Step(part, own(linears, share), own(in_float8, share))
        steps.append(made[kind])
    return steps


@cache
def _modules_in(stages: Stages, names: Collection[str]) -> tuple[str, ...]:
    """Return those `names`, such as layers.3.attention.wq, whose block or module `stages` have."""
    there = {name for stage in stages for name in stage}
    return tuple(name for name in names if ".".join(name.split(".", 2)[:2]) in there)


def _waiting(step: StepTime, step_s: float, sending: float) -> StepTime:
    """Return a rank's step with what it waits for in one of `step_s`."""
    idle = max(0.0, step_s - step.step_s)
    sending = min(sending, idle)
    return replace(
        step,
        step_s=max(step_s, step.step_s),
        exposed_s={**step.exposed_s, PIPELINE: sending},
        idle_s={OTHER_STAGES: idle - sending},
    )
