"""Exchange of Python values and errors between ranks. All functions are collective, on CPU."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import RunError

T = TypeVar("T")


def on_rank0(make: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Run `make` on rank 0 only, and return its result on every rank. A RunError is raised on every
    rank."""
    outcome: list[Any] = [_outcome(make) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(outcome, group=group)
    if isinstance(outcome[0], RunError):
        raise outcome[0]
    return outcome[0]


def on_all_ranks(make: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Run `make` on every rank, and return the results in the order of ranks. If some ranks raise a
    RunError, the first one is raised on every rank, with `rank` set."""
    return _gather(_outcome(make), group=group)


def agree(
    *, stop: int, error: RunError | None, figures: Sequence[float] = ()
) -> tuple[int, Tensor]:
    """Return the highest signal number `stop` of all ranks (0: none), and all ranks' `figures`, as
    many and not negative, [ranks, figures] float64. If a rank has an `error`, it is raised on every
    rank, as in `on_all_ranks`."""
    # The largest value of each place, and only its own rank puts figures into a row.
    rows = torch.zeros(dist.get_world_size(), len(figures), dtype=torch.float64)
    rows[dist.get_rank()] = torch.tensor(figures, dtype=torch.float64)
    flags = torch.tensor([stop, error is not None], dtype=torch.float64)
    shared = torch.cat([flags, rows.flatten()])
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    highest, failed = shared[:2].tolist()
    if failed:
        _gather(error)
    return int(highest), shared[2:].view_as(rows)


def _outcome(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except RunError as error:
        return error


def _gather(outcome: Any, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    outcomes = [outcome]
    if dist.is_initialized():  # not in a program of a single process that uses the library
        outcomes = [None] * dist.get_world_size(group)
        dist.all_gather_object(outcomes, outcome, group=group)
    for rank, other in enumerate(outcomes):
        if isinstance(other, RunError):
            other.rank = rank
            raise other
    return outcomes
