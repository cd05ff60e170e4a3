"""The schedules of torch.distributed.pipelining that can be chosen, as data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Properties of a schedule. Stages are numbered in the order of the model."""

    looped: bool = False
    """A rank has several stages."""
    v_shaped: bool = False
    """Of p ranks, rank r has stages r and 2p-1-r. Else it has stages r, r + p, r + 2p and so on."""
    zero_bubble: bool = False
    """Gradients of weights are computed apart from those of inputs, in what were pauses."""

    def rank_stages(self, rank: int, *, degree: int, stages: int) -> tuple[int, ...]:
        """Return which of `stages` a rank has, of the `degree` ranks of a pipeline."""
        return (rank, stages - 1 - rank) if self.v_shaped else tuple(range(rank, stages, degree))


DEFAULT_SCHEDULE = "1F1B"
SCHEDULES = {
    DEFAULT_SCHEDULE: Schedule(),
    "GPipe": Schedule(),
    "Interleaved1F1B": Schedule(looped=True),
    "InterleavedZeroBubble": Schedule(looped=True, zero_bubble=True),
    "ZBVZeroBubble": Schedule(looped=True, v_shaped=True, zero_bubble=True),
}
