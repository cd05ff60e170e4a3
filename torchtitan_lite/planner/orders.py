"""The order in which the ranks of a pipeline run their stages, and what follows from it alone.

A rank runs the passes of its stages on microbatches, its actions, in the order of
torch.distributed.pipelining. From these orders follow the pauses of each rank, because a stage
waits for its neighbours, and how many microbatches' activations it keeps.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from torchtitan_lite.catalog.schedules import SCHEDULES
from torchtitan_lite.config.job import Job


class Action(NamedTuple):
    """What a rank does at a time."""

    kind: str  # F: forward; B: backward
    stage: int
    microbatch: int


Pass = tuple[str, int]
"""Kind and stage of an action."""


def pipeline_orders(job: Job) -> list[Sequence[Action]]:
    """Return the actions of each rank of a job's pipeline."""
    schedule, stages = job.config.parallelism.pipeline_parallel_schedule, len(job.stages)
    degree, n = job.degrees.pp, job.batch.grad_accum_steps
    return [
        rank_order(schedule, rank, degree=degree, stages=stages, microbatches=n)
        for rank in range(degree)
    ]


@cache
def rank_order(
    schedule: str, rank: int, *, degree: int, stages: int, microbatches: int
) -> Sequence[Action]:
    """Return the actions of a rank, as torch/distributed/pipelining/schedules.py orders them."""
    own = range(rank, stages, degree)
    passes = _looped(schedule, rank, degree, own, microbatches)

    # A stage takes microbatches by their numbers.
    seen: Counter[tuple[str, int]] = Counter()
    actions = []
    for kind, stage in passes:
        actions.append(Action(kind, stage, seen[kind, stage]))
        seen[kind, stage] += 1
    return [action for action in actions if action.microbatch < microbatches]


def _looped(name: str, rank: int, degree: int, own: Sequence[int], n: int) -> list[Pass]:
    """Warm up with forward passes, then take turns. Of several stages, each gets a round of
    microbatches, the first stage first in forward, and last in backward."""
    schedule, total = SCHEDULES[name], n * len(own)
    each = n // max(1, n // degree)
    forward = [("F", own[i // each % len(own)]) for i in range(total)]
    backward_of = [own[-1 - i // each % len(own)] for i in range(total)]

    # Each rank has more than the next one: its neighbour's pass forward, and back if interleaved.
    hops = 2 if schedule.looped else 1
    warmup = (len(own) - 1) * each + hops * (degree - 1 - rank)
    warmup = total if name == "GPipe" else min(warmup, total)
    passes = forward[:warmup]
    for i, stage in enumerate(backward_of):
        passes += forward[warmup + i : warmup + i + 1]
        passes.append(("B", stage))
    return passes


def rank_ends(
    orders: Sequence[Sequence[Action]], seconds: Mapping[Pass, float], *, send_s: float
) -> list[float]:
    """Return when each rank ends its last action, from the actions of each rank and the `seconds`
    of each pass of a stage."""
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    ends: dict[Action, float] = {}
    now, done = [0.0] * len(orders), [0] * len(orders)

    # In turns, each rank goes on in its order until it must wait for another.
    while len(ends) < sum(map(len, orders)):
        before = len(ends)
        for rank, order in enumerate(orders):
            for action in order[done[rank] :]:
                kind, stage, microbatch = action
                needed = Action(kind, stage + (-1 if kind == "F" else 1), microbatch)
                if needed.stage in rank_of:
                    if needed not in ends:
                        break
                    sending = send_s if rank_of[needed.stage] != rank else 0.0
                    now[rank] = max(now[rank], ends[needed] + sending)
                now[rank] += seconds[kind, stage]
                ends[action] = now[rank]
                done[rank] += 1
        assert len(ends) > before, "the ranks of a schedule wait for each other"
    return now


def in_flight(
    order: Iterable[Action], kept: Mapping[int, int], freed: Mapping[int, int]
) -> tuple[int, int]:
    """Return the most bytes of activations until the first backward begins, and after it, from the
    bytes that each stage keeps of a microbatch after its forward, and those of them that its
    backward frees."""
    now = before = after = 0
    has_backward = False
    for kind, stage, _ in order:
        if kind == "F":
            now += kept[stage]
        if has_backward:
            after = max(after, now)
        else:
            before = max(before, now)
        if kind == "B":
            has_backward = True
            now -= freed[stage]
    return before, after
