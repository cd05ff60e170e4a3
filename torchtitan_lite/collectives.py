"""Exchange of Python values and errors between ranks. All functions are collective, on CPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from torchtitan_lite.errors import RunError

T = TypeVar("T")


def on_rank0(make: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Run `make` on rank 0 only, and return its result on every rank. A RunError is raised on every
    rank."""
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
    """Run `make` on every rank, and return the results in the order of ranks. If some ranks raise a
    RunError, the first one is raised on every rank, with `rank` set."""
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
    """Requests of a rank, or the union of all ranks' requests, at the end of a step."""

    stop: int = 0
    """Number of the signal that asks to end the run; 0: none."""
    save: bool = False
    """Save at the end of this step."""


def agree(wishes: Wishes, *, error: RunError | None) -> Wishes:
    """Return the union of all ranks' wishes. If a rank has an `error`, it is raised on every rank,
    as in `on_all_ranks`."""
    flags = torch.tensor([wishes.stop, wishes.save, error is not None], dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    stop, save, failed = flags.tolist()
    if failed:
        on_all_ranks(lambda: _raise(error))
    return Wishes(stop, bool(save))


def _raise(error: RunError | None) -> None:
    if error is not None:
        raise error
