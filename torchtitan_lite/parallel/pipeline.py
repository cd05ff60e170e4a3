"""Pipeline parallelism: each rank has stages of the model, and microbatches pass through them.

Schedules and transfers are torch.distributed.pipelining's. All ranks of a pipeline read the same
microbatches: each stage needs the tokens for its positions and document masks, and the last one the
labels. Between stages passes only the residual stream, and its gradient.

Shapes: B sequences of a microbatch, s = seq_len / cp / tp, D dim.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from torchtitan_lite.models.loss import IGNORED

from .microbatches import Microbatch, ModelLoss, Timed
from .one_rank import MixedPrecisionTransformer


class _Stage(PipelineStage):
    """A stage that computes the loss itself if it is the last one."""

    def __init__(self, loss: ModelLoss, timed: Timed, **settings: Any) -> None:
        super().__init__(loss.model, **settings)
        self._loss, self._timed = loss, timed

    def forward_maybe_with_nosync(self, *hidden: Tensor, **batch: Any) -> Tensor:
        """Return the loss of a microbatch, or the residual stream [B, s, D]."""
        with self._pass(last=False):  # whether it is the last is known once its backward begins
            return self._loss(hidden=hidden[0] if hidden else None, **batch)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False
    ) -> Any:
        """Run the backward pass. The last one of a step completes the gradients."""
        with self._pass(last=last_backward):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def _pass(self, *, last: bool) -> AbstractContextManager[None]:
        if isinstance(self.submod, MixedPrecisionTransformer):
            self.submod.copies.last_microbatch = last
        return self._timed(f"stage {self.stage_index}")


class PipelinedMicrobatches:
    """Microbatches that pass through the stages of all ranks of a pipeline."""

    def __init__(
        self,
        losses: Sequence[ModelLoss],
        indices: Sequence[int],
        *,
        schedule: str,
        n_stages: int,
        n_microbatches: int,
        hidden: Tensor,
        group: dist.ProcessGroup,
        device: torch.device,
        timed: Timed,
    ) -> None:
        """`losses` are this rank's stages, `indices` their numbers of `n_stages`. `hidden` is like
        the residual stream of a microbatch, on meta [B, s, D]. `timed` measures the time of the
        `pipeline` and of `stage N`."""
        self._number, self._timed = n_microbatches, timed
        of_loss = torch.empty((), device="meta")
        self._stages = stages = [
            _Stage(
                loss,
                timed,
                stage_index=index,
                num_stages=n_stages,
                device=device,
                # Known shapes spare a pass through the model to find them out.
                input_args=() if index == 0 else hidden,
                output_args=of_loss if index == n_stages - 1 else hidden,
                group=group,
            )
            for index, loss in zip(indices, losses, strict=True)
        ]
        schedule_class = get_schedule_class(schedule)
        self._schedule: Any = schedule_class(
            stages[0] if issubclass(schedule_class, PipelineScheduleSingle) else stages,
            n_microbatches=n_microbatches,
            loss_fn=lambda loss, _: loss,  # the last stage returns it
            scale_grads=False,
        )

    def train(self, batches: Sequence[Microbatch], *, scale: float) -> Tensor:
        """Run forward and backward of a step's microbatches. Return this rank's part of their loss,
        summed and scaled, [] float32: 0 without the last stage."""
        return self._run(self._schedule.step, batches, scale=scale)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Microbatch], *, scale: float) -> Tensor:
        """Return the loss of as many microbatches at most, without a backward pass."""
        # A schedule has a fixed number of microbatches. The others repeat one, without labels.
        tokens, labels = batches[-1]
        spare = [(tokens, torch.full_like(labels, IGNORED))] * (self._number - len(batches))
        loss = self._run(self._schedule.eval, [*batches, *spare], scale=scale)
        for stage in self._stages:  # which would keep all results until the next step
            stage.clear_runtime_states()
        if not hasattr(self._schedule, "_initialize_pp_stages"):
            # torch before 2.13 prepares stages for what runs first, which may be a validation.
            self._schedule._stage_forward_initialized = False
            self._schedule._stages_forward_initialized = False
        return loss

    def _run(self, run: Any, batches: Sequence[Microbatch], *, scale: float) -> Tensor:
        tokens, labels = map(torch.cat, zip(*batches, strict=True))
        losses: list[Tensor] = []
        batch = {"tokens": tokens, "labels": labels, "scale": scale}
        with self._timed("pipeline"):
            try:
                # Stages have the labels in `batch`. The schedule demands a target too.
                run(target=labels, losses=losses, return_outputs=False, **batch)
            except RuntimeError as error:
                # The schedule hides what a stage raised, such as that memory is exhausted.
                raise error.__cause__ or error from None
        if not losses:
            return torch.zeros((), device=tokens.device)
        return torch.stack(losses).detach().sum()
