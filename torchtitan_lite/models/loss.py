"""Cross-entropy of next-token prediction, without float32 logits of all tokens.

The forward pass overwrites the logits with their gradient, and the backward pass only multiplies it
by the incoming gradient. If the logits are the output of a linear, the forward pass also computes
the gradients of the linear's input and weight, a chunk of tokens at a time.

Shapes: N tokens, B batch, S seq_len, D dim, V vocab_size; V is this rank's share if the vocabulary
is split over ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial

from torchtitan_lite.base.outside import check_outside, load_object

from .init import local_offset

IGNORED = -100  # label of a token that does not count
CHUNK_LOGITS = 2**30
"""Maximum number of logits in a chunk of tokens: 2 GiB in bfloat16. Each chunk after the first
costs a pass over the weight's gradient in float32."""
PIECE_LOGITS = 2**23
"""Minimum number of logits that eager kernels process at a time: 32 MiB in float32. For a large
linear, as many as fit into the memory that the weight's gradient takes afterwards. Compiled kernels
store no float32 logits."""
FLOAT32_COPIES = 2
"""Float32 tensors of that size at a time: the scores and, on CPU, the logits."""


def _log_sum_exp(logits: Tensor) -> Tensor:
    """Compute the log-sum-exp of each token's `logits` [N, V], [N] float32."""
    largest = logits.amax(-1, keepdim=True).float()
    return (logits - largest).exp_().sum(-1).log_() + largest.squeeze(-1)


def _to_softmax(logits: Tensor, log_sum_exp: Tensor, scale: Tensor) -> None:
    """Overwrite `logits` [N, V] by their softmax times `scale` [N]."""
    scores = (logits - log_sum_exp.unsqueeze(-1)).exp_()
    torch.mul(scores, scale.unsqueeze(-1), out=logits)


def _turn_to_softmax(logits: Tensor, scale: Tensor) -> Tensor:
    """Do the same and return the log-sum-exp [N] that the logits had, in one kernel."""
    if torch.compiler.is_compiling():
        # The compiler would store shared exponentials in float32. It computes them twice instead.
        log_sum_exp = _log_sum_exp(logits)
        _to_softmax(logits, log_sum_exp, scale)
        return log_sum_exp

    largest = logits.amax(-1, keepdim=True).float()
    scores = (logits - largest).exp_()
    total = scores.sum(-1, keepdim=True)
    torch.mul(scores, scale.unsqueeze(-1) / total, out=logits)
    return (total.log() + largest).squeeze(-1)


@dataclass(frozen=True)
class _Call:
    """What one call of a loss computes, apart from its tensors."""

    scale: float
    with_gradient: bool
    first_id: int  # token id of this rank's first logit
    group: dist.ProcessGroup | None  # the ranks that share the vocabulary if it is split


class CrossEntropy:
    """The cross-entropy of labels in nat, summed over tokens and scaled, [] float32.

    A label of -100 does not count. The backward pass can run once."""

    def __init__(self, *, compiled: bool, backend: str = "inductor") -> None:
        kernels: tuple[Callable[..., Any], ...] = (_log_sum_exp, _to_softmax, _turn_to_softmax)
        self._compiled = compiled
        self._log_sum_exp, self._to_softmax, self._turn_to_softmax = (
            (torch.compile(kernel, backend=backend) for kernel in kernels) if compiled else kernels
        )

    def __call__(
        self, x: Tensor, weight: Tensor | None, labels: Tensor, *, scale: float = 1.0
    ) -> Tensor:
        """Return the loss of `labels` [B, S] for the logits x @ weight.t(), x [B, S, D], weight
        [V, D]; without a weight for the logits `x` [B, S, V].

        The weight, or such logits, may be a DTensor that is split over the vocabulary. Beside such
        a weight, x is a DTensor that is the same on all ranks."""
        first_id, group = 0, None
        split, vocabulary = (x, -1) if weight is None else (weight, 0)
        if isinstance(split, DTensor):
            first_id, group = local_offset(split)[vocabulary], split.device_mesh.get_group()
            assert isinstance(x, DTensor), "x is a DTensor if the weight is one"
            if isinstance(weight, DTensor):
                x, weight = x.to_local(grad_placements=[Partial()]), weight.to_local()
            else:
                x = x.to_local()

        call = _Call(scale, torch.is_grad_enabled(), first_id, group)
        return _Loss.apply(x.flatten(0, 1), weight, labels.flatten(), self, call)

    def _take(self, logits: Tensor, labels: Tensor, call: _Call, *, piece_logits: int) -> Tensor:
        """Return the loss of `labels` [N] for `logits` [N, V].

        With a gradient, `logits` are overwritten by it: the softmax, less 1 at the label. Eager
        kernels process `piece_logits` at a time."""
        # The logit of each label, 0 if another rank has it.
        ids = labels - call.first_id
        here = (ids >= 0) & (ids < logits.shape[-1])
        at_label = torch.arange(len(ids), device=ids.device), torch.where(here, ids, 0)
        picked = torch.where(here, logits[at_label].float(), 0)

        # If no other rank has logits, the log-sum-exp and the softmax are computed together.
        scales = call.scale * (labels != IGNORED)
        size = len(logits) if self._compiled else max(1, piece_logits // logits.shape[-1])
        pieces, piece_scales = logits.split(size), scales.split(size)
        if call.with_gradient and call.group is None:
            log_sums = list(map(self._turn_to_softmax, pieces, piece_scales))
        else:
            log_sums = list(map(self._log_sum_exp, pieces))
        log_sum_exp = torch.cat(log_sums)  # [N]

        # Combine the parts of the vocabulary before the softmax.
        if call.group is not None:
            scores = torch.stack((log_sum_exp, picked))  # [2, N]
            gathered = [torch.empty_like(scores) for _ in range(call.group.size())]
            dist.all_gather(gathered, scores, group=call.group)
            rank_log_sums, rank_picked = torch.stack(gathered, dim=1)  # [ranks, N] each
            log_sum_exp, picked = rank_log_sums.logsumexp(0), rank_picked.sum(0)
            if call.with_gradient:
                for piece in zip(pieces, log_sum_exp.split(size), piece_scales, strict=True):
                    self._to_softmax(*piece)

        if call.with_gradient:
            gradient = ((picked - log_sum_exp).exp() - 1) * scales
            logits[at_label] = torch.where(here, gradient.to(logits.dtype), logits[at_label])
        return ((log_sum_exp - picked) * scales).sum()


class OutsideLoss:
    """A loss from outside the package in place of the cross-entropy: `loss` returns the sum [] over
    tokens for whole logits [B, S, V] and labels [B, S], in which IGNORED does not count."""

    def __init__(self, name: str) -> None:
        """`name` is module:name. Raises ConfigError."""
        self._name, self._loss = name, load_object("[training] loss", name)

    def __call__(
        self, logits: Tensor, weight: None, labels: Tensor, *, scale: float = 1.0
    ) -> Tensor:
        """Return the loss scaled, [] float32. Raises ConfigError if it is none."""
        loss = self._loss(logits, labels)
        fits = (
            isinstance(loss, Tensor)
            and loss.ndim == 0
            and loss.requires_grad == logits.requires_grad
        )
        check_outside("[training] loss", self._name, fits, "must return a differentiable sum, []")
        return scale * loss.float()


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, labels: Tensor, loss: CrossEntropy, call: _Call
    ) -> Tensor:
        # Without a weight, x are the logits.
        if weight is None:
            gradient = x.clone() if call.with_gradient else x
            ctx.save_for_backward(gradient, None)
            return loss._take(gradient, labels, call, piece_logits=PIECE_LOGITS)

        tokens = max(1, CHUNK_LOGITS // len(weight))
        piece = max(PIECE_LOGITS, weight.nbytes // (FLOAT32_COPIES * torch.float32.itemsize))
        x_grad = torch.empty_like(x) if call.with_gradient else None
        weight_grad: Tensor | None = None
        total = torch.zeros((), device=x.device)

        for start in range(0, len(x), tokens):
            chunk = slice(start, start + tokens)
            logits = x[chunk] @ weight.t()
            total += loss._take(logits, labels[chunk], call, piece_logits=piece)
            if x_grad is None:
                continue
            # The logits are now their gradient. Several chunks are summed in float32.
            torch.mm(logits, weight, out=x_grad[chunk])
            if weight_grad is None:
                weight_grad = logits.t() @ x[chunk]
                weight_grad = weight_grad.float() if len(x) > tokens else weight_grad
            else:
                weight_grad += logits.t() @ x[chunk]

        if x_grad is not None and weight_grad is not None:
            ctx.save_for_backward(x_grad, weight_grad.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad = ctx.saved_tensors
        weight_grad = None if weight_grad is None else weight_grad.mul_(incoming)
        return x_grad.mul_(incoming), weight_grad, None, None, None
