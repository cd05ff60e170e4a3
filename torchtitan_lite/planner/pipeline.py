"""Time of a step with pipeline parallelism.

Ranks with equal stages pause for a share of (p - 1) / (n v + p - 1) of the step, with p ranks of v
stages and n microbatches (1F1B, GPipe, Interleaved1F1B: arXiv 2104.04473, section 2.2), apart from
sending. Stages are not equal, so the order of all passes is timed instead.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torchtitan_lite.float8.selection import LinearChoice
from torchtitan_lite.job import Job

from .communication import Network, pipeline_ring
from .orders import rank_ends, schedule_actions
from .rank import Rank
from .roofline import Roofline
from .share import (
    EMBEDDING,
    OUTPUT,
    blocks_of,
    checkpointed_blocks,
    has,
    linears_in,
    modules_in,
    rank_shares,
    share_of,
)
from .step import OTHER_STAGES, Step, StepTime


@dataclass(frozen=True)
class PipelineTime:
    """Times of a step of a pipeline."""

    ranks: list[StepTime]
    """Of each rank, all as long as the slowest makes them."""
    actions_s: Sequence[Mapping[str, float]]
    """Seconds of a microbatch on each stage, by kind of action."""
    send_s: float
    """Seconds to send the result of a stage to the next one."""

    @property
    def bubble(self) -> float:
        """Share of the step in which a rank waits for others, as the mean of ranks."""
        return sum(step.idle_s[OTHER_STAGES] / step.step_s for step in self.ranks) / len(self.ranks)


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
    job, pp = roofline.job, roofline.job.degrees.pp
    step_of = _Steps(roofline, linears, in_float8).of
    actions_s = [step_of(share_of(job, [i])).actions_s() for i in range(len(job.stages))]

    # The order of passes, with sends and as if these took no time.
    n, schedule = job.batch.grad_accum_steps, job.config.parallelism.pipeline_parallel_schedule
    scheduled = schedule_actions(schedule, pp, len(job.stages), n)
    passes_s = {(k, i): seconds for i, each in enumerate(actions_s) for k, seconds in each.items()}
    network = Network(roofline.device, roofline.rates)
    send_s = network.send_s(Rank(job, (), on_cpu=False).residual, pipeline_ring(job.degrees))
    ends = rank_ends(scheduled, passes_s, send_s=send_s, degree=pp)
    sending = max(ends) - max(rank_ends(scheduled, passes_s, send_s=0.0, degree=pp))

    # What is not in the passes is before or after all of them: FSDP, and the host if it is slower.
    # Clipping waits for all ranks.
    steps = [step_of(share) for share in rank_shares(job)]
    times = [step.time() for step in steps]
    updates = [
        (1 + step.late) * time.device_parts_s["optimizer"]
        for step, time in zip(steps, times, strict=True)
    ]
    passed = []
    for rank, (time, update, end) in enumerate(zip(times, updates, ends, strict=True)):
        own = [actions_s[i]["F"] + actions_s[i]["B"] for i in job.rank_stages(rank)]
        passed.append(end + time.step_s - update - n * sum(own))
    step_s = max(passed) + max(updates)
    return PipelineTime([_waiting(time, step_s, sending) for time in times], actions_s, send_s)


class _Steps:
    """Steps of shares. Equal shares have the same."""

    def __init__(
        self,
        roofline: Roofline,
        linears: Sequence[LinearChoice],
        in_float8: Collection[LinearChoice],
    ) -> None:
        self.roofline, self.linears, self.in_float8 = roofline, linears, in_float8
        self.made: dict[tuple[int, ...], Step] = {}

    def of(self, share: Job) -> Step:
        """Return the step of a share."""
        blocks, ends = len(blocks_of(share)), (has(share, EMBEDDING), has(share, OUTPUT))
        kind = blocks, len(checkpointed_blocks(share)), *ends
        if kind not in self.made:
            own = frozenset(modules_in(share, self.roofline.recomputed))
            part = replace(self.roofline, job=share, recomputed=own)
            linears, in_float8 = linears_in(share, self.linears), linears_in(share, self.in_float8)
            self.made[kind] = Step(part, linears, in_float8)
        return self.made[kind]


def _waiting(step: StepTime, step_s: float, sending: float) -> StepTime:
    """Return a rank's step with what it waits for in one of `step_s`."""
    idle = max(0.0, step_s - step.step_s)
    sending = min(sending, idle)
    return replace(
        step,
        step_s=max(step_s, step.step_s),
        exposed_s={**step.exposed_s, "pipeline": sending},
        idle_s={OTHER_STAGES: idle - sending},
    )
