"""The schedules of torch.distributed.pipelining that can be chosen, as data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Properties of a schedule. Stages are numbered in the order of the model."""

    looped: bool = False
    """Of p ranks, rank r has the stages r, r + p, r + 2p and so on; else only stage r."""


DEFAULT_SCHEDULE = "1F1B"
SCHEDULES = {
    DEFAULT_SCHEDULE: Schedule(),
    "GPipe": Schedule(),
    "Interleaved1F1B": Schedule(looped=True),
}
ZERO_BUBBLE = dict.fromkeys(
    ("InterleavedZeroBubble", "ZBVZeroBubble"),
    "PyTorch computes wrong gradients with it, without an error, under compile, resharding or "
    f'activation checkpointing (pytorch/pytorch#161904); use "{DEFAULT_SCHEDULE}"',
)
"""Schedules of torch that no run can use, and why."""
