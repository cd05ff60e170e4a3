"""Forward and backward passes of the microbatches of a step."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from torchtitan_lite.config import ParallelismConfig
from torchtitan_lite.models.llama3 import Output, Transformer
from torchtitan_lite.models.loss import CrossEntropy, OutsideLoss

from .fsdp import start_microbatch

Microbatch = tuple[Tensor, Tensor]
"""Tokens and labels [B, S], on the device."""
Timed = Callable[[str], AbstractContextManager[None]]
"""Measures what a name stands for, without waiting for the device."""


class ModelLoss:
    """The loss of a model, or what a stage of it passes to the next."""

    def __init__(
        self, model: Transformer, loss: CrossEntropy | OutsideLoss, *, gathers_logits: bool
    ) -> None:
        """`gathers_logits`: whether `loss` takes whole logits, rather than the output's weight."""
        self.model, self._loss = model, loss
        # A float8 linear has taken the place of an Output that is trained in float8.
        self._fuses_output = isinstance(model.output, Output) and not gathers_logits

    def __call__(
        self, tokens: Tensor, labels: Tensor, hidden: Tensor | None = None, *, scale: float
    ) -> Tensor:
        """Return the loss of `tokens` and `labels` [B, S], summed over this rank's tokens and
        scaled, [] float32; without an output, the residual stream, as from `hidden`."""
        model = self.model
        if model.output is None:
            return model(tokens, hidden=hidden)

        labels = model.shard_sequence(labels, 1)
        if not self._fuses_output:
            return self._loss(model(tokens, hidden=hidden), None, labels, scale=scale)
        return model(tokens, partial(self._loss, labels=labels, scale=scale), hidden)


class PlainMicrobatches:
    """Microbatches of a model that is whole on this rank, one after another."""

    def __init__(self, loss: ModelLoss, parallelism: ParallelismConfig) -> None:
        self._loss, self._parallelism = loss, parallelism

    def train(self, batches: Sequence[Microbatch], *, scale: float) -> Tensor:
        """Run forward and backward of a step's microbatches. Return this rank's part of their loss,
        summed and scaled, [] float32."""
        losses = []
        for number, batch in enumerate(batches, start=1):
            start_microbatch(self._loss.model, self._parallelism, last=number == len(batches))
            loss = self._loss(*batch, scale=scale)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Microbatch], *, scale: float) -> Tensor:
        """Return the loss of microbatches without a backward pass."""
        return torch.stack([self._loss(*batch, scale=scale) for batch in batches]).sum()
