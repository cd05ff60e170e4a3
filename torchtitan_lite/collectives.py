"""What ranks tell each other besides tensors of the model. All functions are collective calls, on
CPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from torchtitan_lite.errors import RunError

T = TypeVar("T")


def on_rank0(make: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """What `make` returned on rank 0, where alone it runs. A RunError that it raised is raised on
    every rank."""
    outcome: list[T | RunError | None] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [make()]
        except RunError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, group=group)
    if isinstance(outcome[0], RunError):
        raise outcome[0]
    return outcome[0]  # type: ignore[return-value]


def on_all_ranks(make: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> list[T]:
    """What `make` returned, by rank. A RunError that it raised on some ranks is raised on every
    rank: that of the first of them, with `rank` set."""
    outcome: T | RunError
    try:
        outcome = make()
    except RunError as error:
        outcome = error
    outcomes: list[T | RunError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome, group=group)
    for rank, other in enumerate(outcomes):
        if isinstance(other, RunError):
            other.rank = rank
            raise other
    return outcomes  # type: ignore[return-value]


@dataclass(frozen=True)
class Wishes:
    """What ranks want before they go on; each rank its own, or of all ranks what any of them
    wants."""

    stop: int = 0
    """The signal that asks to end the run; 0: none."""
    save: bool = False
    """Save at the end of this step."""


def agree(wishes: Wishes, *, error: RunError | None) -> Wishes:
    """The wishes of all ranks. An `error` that one of them has is raised on every rank, as
    `on_all_ranks` does."""
    flags = torch.tensor([wishes.stop, wishes.save, error is not None], dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    stop, save, failed = flags.tolist()
    if failed:
        on_all_ranks(lambda: _raise(error))
    return Wishes(stop, bool(save))


def _raise(error: RunError | None) -> None:
    if error is not None:
        raise error
