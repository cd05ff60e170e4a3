"""Cross-entropy of next-token prediction, in pieces: logits of all tokens never exist in float32.

The forward pass turns the logits, in place, into the gradient of the loss, as all that it depends
on is known there; the backward pass only hands it on. Where the logits come from a linear, the
gradients of its input and weight are made there too, a chunk of tokens at a time.

Shapes: N tokens, B batch, S seq_len, D dim, V vocab_size. Over a vocabulary that is split, V is
this rank's share.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

IGNORED = -100
"""The label of a token that does not count."""
CHUNK_LOGITS = 2**30
"""Logits that a chunk of tokens has at most: 2 GiB in bfloat16. More chunks take less memory, but
each but the first costs a pass over the weight's gradient in float32."""
PIECE_LOGITS = 2**24
"""Logits that are in float32 at once where the kernels are not compiled: 64 MiB. Compiled, none
are."""


def _log_sum_exp(logits: Tensor) -> Tensor:
    """That of each token's logits [N, V], [N] float32."""
    largest = logits.amax(-1, keepdim=True).float()
    scores = logits.to(torch.float32, copy=True)
    return scores.sub_(largest).exp_().sum(-1).log_() + largest.squeeze(-1)


def _to_softmax(logits: Tensor, log_sum_exp: Tensor, scale: Tensor) -> None:
    """Overwrite `logits` [N, V] by `scale` [N] times their softmax."""
    scores = logits.to(torch.float32, copy=True)
    logits.copy_(scores.sub_(log_sum_exp.unsqueeze(-1)).exp_().mul_(scale.unsqueeze(-1)))


def _turn_to_softmax(logits: Tensor, scale: Tensor) -> Tensor:
    """The same, and the log-sum-exp [N] that they had: with one exponential for both, and compiled
    in one kernel."""
    if (
        torch.compiler.is_compiling()
    ):  # it would keep the exponentials, in float32, for the second use
        log_sum_exp = _log_sum_exp(logits)
        _to_softmax(logits, log_sum_exp, scale)
        return log_sum_exp
    largest = logits.amax(-1, keepdim=True).float()
    scores = logits.to(torch.float32, copy=True).sub_(largest).exp_()
    total = scores.sum(-1, keepdim=True)
    logits.copy_(scores.mul_(scale.unsqueeze(-1) / total))
    return (total.log() + largest).squeeze(-1)


@dataclass(frozen=True)
class _Vocabulary:
    """The part of a vocabulary that this rank has the logits of."""

    start: int = 0
    """Id of the first."""
    group: dist.ProcessGroup | None = None
    """The ranks that have the others; None: there are none."""


class CrossEntropy:
    """The sum over tokens of the cross-entropy in nat of their labels, times a scale: [] float32. A
    label of -100 does not count. The backward pass can run once."""

    def __init__(self, *, compiled: bool) -> None:
        kernels: tuple[Callable[..., Any], ...] = (_log_sum_exp, _to_softmax, _turn_to_softmax)
        self._compiled = compiled
        self._log_sum_exp, self._to_softmax, self._turn_to_softmax = (
            map(torch.compile, kernels) if compiled else kernels
        )

    def of_logits(self, logits: Tensor, labels: Tensor, *, scale: float = 1.0) -> Tensor:
        """The loss of `labels` [B, S] under `logits` [B, S, V], which may be a DTensor split over
        the vocabulary."""
        vocabulary = _Vocabulary()
        if isinstance(logits, DTensor):
            vocabulary = _vocabulary(logits, dim=-1)
            logits = logits.to_local()
        wanted = torch.is_grad_enabled()
        loss: Tensor = _OfLogits.apply(
            logits.flatten(0, 1), labels.flatten(), self, scale, vocabulary, wanted
        )
        return loss

    def of_linear(self, x: Tensor, weight: Tensor, labels: Tensor, *, scale: float = 1.0) -> Tensor:
        """The loss of `labels` [B, S] under the logits that a linear with `weight` [V, D] makes of
        `x` [B, S, D]. Both may be DTensors: the weight split over the vocabulary, and `x` whole on
        each rank."""
        vocabulary = _Vocabulary()
        if isinstance(weight, DTensor):
            assert isinstance(x, DTensor), "x is distributed as the weight is"
            vocabulary = _vocabulary(weight, dim=0)
            x, weight = x.to_local(grad_placements=[Partial()]), weight.to_local()
        wanted = torch.is_grad_enabled()
        loss: Tensor = _OfLinear.apply(
            x.flatten(0, 1), weight, labels.flatten(), self, scale, vocabulary, wanted
        )
        return loss

    def _take(
        self,
        logits: Tensor,
        labels: Tensor,
        *,
        scale: float,
        vocabulary: _Vocabulary,
        to_gradient: bool,
    ) -> Tensor:
        """The loss of `labels` [N] under `logits` [N, V], which are overwritten by their gradient
        if that is wanted."""
        size = len(logits) if self._compiled else max(1, PIECE_LOGITS // logits.shape[-1])
        ids = labels - vocabulary.start
        here = (ids >= 0) & (ids < logits.shape[-1])  # whether this rank has the logit of the label
        at_label = torch.arange(len(ids), device=ids.device), torch.where(here, ids, 0)
        picked = torch.where(here, logits[at_label].float(), 0)
        scales = scale * (labels != IGNORED)
        pieces, scales_of_pieces = logits.split(size), scales.split(size)
        if to_gradient and vocabulary.group is None:
            log_sum_exp = torch.cat(
                list(map(self._turn_to_softmax, pieces, scales_of_pieces))
            )  # [N]
        else:
            log_sum_exp = torch.cat(list(map(self._log_sum_exp, pieces)))
        if vocabulary.group is not None:
            scores = torch.stack((log_sum_exp, picked))  # [2, N]
            of_ranks = [torch.empty_like(scores) for _ in range(vocabulary.group.size())]
            dist.all_gather(of_ranks, scores, group=vocabulary.group)
            log_sums, parts = torch.stack(of_ranks, dim=1)  # [ranks, N] each
            log_sum_exp, picked = log_sums.logsumexp(0), parts.sum(0)
            if to_gradient:
                for each in zip(pieces, log_sum_exp.split(size), scales_of_pieces, strict=True):
                    self._to_softmax(*each)
        if to_gradient:
            # The gradient is the softmax, less 1 at the label.
            gradient = ((picked - log_sum_exp).exp() - 1) * scales
            logits[at_label] = torch.where(here, gradient.to(logits.dtype), logits[at_label])
        return ((log_sum_exp - picked) * scales).sum()


def _vocabulary(of: DTensor, *, dim: int) -> _Vocabulary:
    """The part of the vocabulary, along `dim`, that is in this rank's shard of a DTensor."""
    _, offset = compute_local_shape_and_global_offset(of.shape, of.device_mesh, of.placements)
    return _Vocabulary(offset[dim], of.device_mesh.get_group())


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        loss: CrossEntropy,
        scale: float,
        vocabulary: _Vocabulary,
        wanted: bool,
    ) -> Tensor:
        gradient = logits.clone() if wanted else logits
        ctx.save_for_backward(gradient)
        return loss._take(gradient, labels, scale=scale, vocabulary=vocabulary, to_gradient=wanted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(incoming), None, None, None, None, None


class _OfLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        loss: CrossEntropy,
        scale: float,
        vocabulary: _Vocabulary,
        wanted: bool,
    ) -> Tensor:
        tokens = max(1, CHUNK_LOGITS // len(weight))
        several = len(x) > tokens
        x_grad = torch.empty_like(x) if wanted else None
        weight_grad: Tensor | None = None
        total = torch.zeros((), device=x.device)
        for start in range(0, len(x), tokens):
            chunk = slice(start, start + tokens)
            logits = x[chunk] @ weight.t()
            total += loss._take(
                logits, labels[chunk], scale=scale, vocabulary=vocabulary, to_gradient=wanted
            )
            if x_grad is not None:
                torch.mm(logits, weight, out=x_grad[chunk])
                if weight_grad is not None:
                    weight_grad += logits.t() @ x[chunk]
                else:
                    weight_grad = logits.t() @ x[chunk]
                    weight_grad = weight_grad.float() if several else weight_grad
        if x_grad is not None and weight_grad is not None:
            ctx.save_for_backward(x_grad, weight_grad.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad = ctx.saved_tensors
        return x_grad.mul_(incoming), weight_grad.mul_(incoming), None, None, None, None, None
