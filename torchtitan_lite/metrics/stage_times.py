"""Share of a pipeline's time that its ranks wait, and the speed of each of its stages.

The pipeline's time is the longest of its ranks' from the first action of the schedule to the last.
What a rank does not compute of it is bubble: (p - 1) / (m + p - 1) with p ranks, m microbatches and
equal stages, for GPipe (arXiv 1811.06965, section 2.3) and 1F1B.

Shapes: P ranks of a pipeline, R ranks that share a stage, V stages of a rank.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan_lite.catalog.devices import Precision

from .hardware import Peaks


class StageTimes:
    """The times of a pipeline's stages on all ranks, from totals that the ranks exchange."""

    def __init__(
        self,
        rank_stages: Sequence[Sequence[int]],
        *,
        pipeline_rank: int,
        flops: Sequence[Mapping[Precision, int]],
    ) -> None:
        """`rank_stages` has the stages of each of P ranks, of which this is `pipeline_rank`, and
        `flops` each stage's FLOPs per token by precision."""
        self._rank_stages, self._flops = rank_stages, flops
        self._own_stages = own_stages = rank_stages[pipeline_rank]
        self._totals = torch.zeros(len(rank_stages), 1, 2 + len(own_stages), dtype=torch.float64)
        self._recorded, self._memory_gib = self._totals, torch.zeros(1)

    def own(self, totals: Mapping[str, float], memory_gib: float) -> list[float]:
        """Return the figures for other ranks, [3 + V]: the peak memory in GiB, and of `totals` the
        number of steps and the seconds of the pipeline and of each stage."""
        stages = [totals[f"stage {stage}"] for stage in self._own_stages]
        return [memory_gib, totals["steps"], totals["pipeline"], *stages]

    def exchanged(self, ranks: Tensor) -> None:
        """Take the values that `own` returned on all ranks, [P * R, 3 + V]."""
        self._memory_gib = ranks[:, 0]
        self._totals = ranks[:, 1:].view(len(self._rank_stages), -1, ranks.shape[1] - 1)
        if not self._recorded[..., 0].all():  # each rank's first step is warm-up
            self._recorded = self._totals

    def figures(self, step_tokens: float, peaks: Peaks) -> dict[str, Any]:
        """Return figures of StepRecord over the steps since the last call, with `step_tokens` each;
        none before every rank has exchanged such a step."""
        since = self._totals - self._recorded  # [P, R, 2 + V]
        if not since[..., 0].all():
            return {}
        self._recorded = self._totals

        # A stage takes the mean of the ranks that share it, which divide its tokens evenly.
        seconds = (since[..., 2:] / since[..., :1]).mean(1).flatten().tolist()  # [P * V]
        stages = itertools.chain(*self._rank_stages)
        stage_time_s = dict(sorted(zip(stages, seconds, strict=True)))
        tokens = step_tokens / since.shape[1]
        stage_mfu = {
            stage: peaks.utilisation(tokens / time_s, self._flops[stage])
            for stage, time_s in stage_time_s.items()
        }

        # The bubble of each rank, [P, R].
        steps, pipeline_s, computed_s = since[..., 0], since[..., 1], since[..., 2:].sum(-1)
        longest_s = (pipeline_s / steps).amax(0)  # [R]
        bubble = 1 - computed_s / steps / longest_s
        return {
            "memory_max_gib": self._memory_gib.max().item(),
            "memory_max_rank": int(self._memory_gib.argmax()),
            "bubble_pct": 100 * bubble.mean().item(),
            "stage_time_s": stage_time_s,
            "stage_mfu": {stage: mfu for stage, mfu in stage_mfu.items() if mfu is not None},
        }
