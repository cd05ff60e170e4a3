"""The order in which the ranks of a pipeline run their stages, and what follows from it alone.

A rank runs the passes of its stages on microbatches, its actions, in the order of
torch.distributed.pipelining. From these orders follow the pauses of each rank, because a stage
waits for its neighbours, and how many microbatches' activations it keeps.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from torchtitan_lite.parallel.schedules import SCHEDULES


class Action(NamedTuple):
    """What a rank does at a time."""

    kind: str  # F: forward; B: backward, or its parts I of inputs and W of weights
    stage: int
    microbatch: int


class Scheduled(NamedTuple):
    """An action in the order in which actions of all ranks can be timed."""

    action: Action
    rank: int
    needs: int  # the action whose result it waits for, by position; -1: none
    sent: bool  # whether that is sent by another rank


def rank_order(
    schedule: str, rank: int, *, degree: int, stages: int, microbatches: int
) -> list[Action]:
    """Return the actions of a rank, as torch/distributed/pipelining/schedules.py orders them."""
    own = SCHEDULES[schedule].rank_stages(rank, degree=degree, stages=stages)
    in_order = _v_shaped if SCHEDULES[schedule].v_shaped else _looped
    passes = in_order(schedule, rank, degree, own, microbatches)

    # A stage takes microbatches by their numbers.
    seen: Counter[tuple[str, int]] = Counter()
    actions = []
    for kind, stage in passes:
        actions.append(Action(kind, stage, seen[kind, stage]))
        seen[kind, stage] += 1
    return [action for action in actions if action.microbatch < microbatches]


Pass = tuple[str, int]  # kind and stage of an action


def _looped(name: str, rank: int, degree: int, own: Sequence[int], n: int) -> list[Pass]:
    """Warm up with forward passes, then take turns. Of several stages, each gets a round of
    microbatches, the first stage first in forward, and last in backward."""
    schedule, total = SCHEDULES[name], n * len(own)
    each = n // max(1, n // degree)
    forward = [("F", own[i // each % len(own)]) for i in range(total)]
    backward_of = [own[-1 - i // each % len(own)] for i in range(total)]

    # Each rank has more than the next one: its neighbour's pass forward, and back if interleaved.
    hops = 2 if schedule.looped and not schedule.zero_bubble else 1
    warmup = (len(own) - 1) * each + hops * (degree - 1 - rank)
    warmup = total if name == "GPipe" else min(warmup, total)
    passes = forward[:warmup]
    for i, stage in enumerate(backward_of):
        passes += forward[warmup + i : warmup + i + 1]
        passes.append(("I" if schedule.zero_bubble else "B", stage))
        if schedule.zero_bubble and i >= rank:
            passes.append(("W", backward_of[i - rank]))
    left = backward_of[total - rank :] if schedule.zero_bubble else []
    return [*passes, *(("W", stage) for stage in left)]


def _v_shaped(_name: str, rank: int, degree: int, own: Sequence[int], n: int) -> list[Pass]:
    """The order of ZBV (arXiv 2401.10241, section 6), whose passes all take the same time. Fewer
    microbatches than it is made for leave pauses."""
    n, ahead = max(2 * degree - 1, n), degree - rank
    steady = n - degree
    words = "F0 " * (2 * ahead - 1) + "F1 F0 " * rank + "F1 I1 W1 " * ahead
    with_forward = n - (2 * degree - 1 - rank)
    words += "F0 I0 W0 F1 I1 W1 " * with_forward
    words += "I0 W0 F1 I1 W1 " * (steady - with_forward)
    words += "I0 I1 " * rank + "I0 W0 " * ahead + "W1 " * rank + "W0 " * rank
    return [(word[0], own[int(word[1])]) for word in words.split()]


@cache
def schedule_actions(schedule: str, degree: int, stages: int, microbatches: int) -> list[Scheduled]:
    """Return the actions of all ranks, each after those that it waits for."""
    orders = [
        rank_order(schedule, rank, degree=degree, stages=stages, microbatches=microbatches)
        for rank in range(degree)
    ]
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}

    # In turns, each rank goes on in its order until it must wait for another.
    scheduled: list[Scheduled] = []
    position: dict[Action, int] = {}
    reached = [0] * degree
    while len(scheduled) < sum(map(len, orders)):
        before = len(scheduled)
        for rank, order in enumerate(orders):
            while reached[rank] < len(order):
                action = order[reached[rank]]
                needed = _needed(action, stages)
                if needed and needed not in position:
                    break
                position[action] = len(scheduled)
                sent = needed is not None and rank_of[needed.stage] != rank
                needs = position[needed] if needed else -1
                scheduled.append(Scheduled(action, rank, needs, sent))
                reached[rank] += 1
        assert len(scheduled) > before, "the ranks of a schedule wait for each other"
    return scheduled


def _needed(action: Action, stages: int) -> Action | None:
    """Return the action of another stage whose result an action waits for."""
    stage = action.stage + (-1 if action.kind == "F" else 1)
    needs = action.kind != "W" and 0 <= stage < stages
    return action._replace(stage=stage) if needs else None


def rank_ends(
    scheduled: Iterable[Scheduled], seconds: Mapping[Pass, float], *, send_s: float, degree: int
) -> list[float]:
    """Return when each rank ends its last action, from the `seconds` of each pass of a stage."""
    ends: list[float] = []
    now = [0.0] * degree
    for (kind, stage, _), rank, needs, sent in scheduled:
        begin = now[rank]
        if needs >= 0:
            begin = max(begin, ends[needs] + send_s * sent)
        now[rank] = begin + seconds[kind, stage]
        ends.append(now[rank])
    return now


def in_flight(
    order: Iterable[Action], kept: Mapping[int, int], freed: Mapping[int, int]
) -> tuple[int, int]:
    """Return the most bytes of activations until the first backward begins, and after it, from the
    bytes that each stage keeps of a microbatch after its forward, and those of them that its
    backward frees."""
    now, most, later = 0, [0, 0], False
    for kind, stage, _ in order:
        now += kept[stage] * (kind == "F")
        most[later] = max(most[later], now)
        later = later or kind in "BI"
        now -= freed[stage] * (kind in "BW")
    return most[0], most[1]
