"""Count the FLOPs of training one token, matmul by matmul, from the converted model.

Counted are the three matmuls of every linear (output, grad_input, grad_weight) and attention's
scores and values with their gradients. Embedding look-up, norms, rotary embeddings, softmax and
loss are not counted. Recomputation by activation checkpointing is counted apart.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import nn

from torchtitan_lite.torchao_types import is_float8_linear

Precision = Literal["fp8", "bf16", "fp32"]
FlopsConvention = Literal["palm", "causal"]

_PRECISION_OF: dict[torch.dtype, Precision] = {torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class LinearFlops:
    """The matmuls of one linear: its global shape, and each matmul's precision in its recipe."""

    name: str
    in_features: int
    out_features: int
    output: Precision
    grad_input: Precision
    grad_weight: Precision
    recomputed: bool
    """Whether the backward pass computes `output` again."""

    @property
    def flops_per_matmul(self) -> int:
        """FLOPs per token of each of the three matmuls."""
        return 2 * self.in_features * self.out_features


@dataclass(frozen=True)
class FlopsLedger:
    """FLOPs per trained token of a whole model, forward and backward."""

    linears: tuple[LinearFlops, ...]
    attention: int
    """Scores and values in all layers, with their gradients."""
    recomputed_attention: int
    """Scores and values that the backward pass computes again."""
    high_precision: Precision
    """Precision of attention and of the linears that are not converted."""
    recompute_is_known: bool = True
    """Whether `recompute` is complete; under a memory budget the compiler decides."""
    fp8_runs_in: Precision = "fp8"
    """Precision in which fp8 matmuls are computed and counted: another one if emulated."""

    @property
    def emulated(self) -> bool:
        """Whether the fp8 matmuls run in another precision."""
        return self.fp8_runs_in != "fp8"

    @cached_property
    def total(self) -> int:
        """All FLOPs per token, without recomputation."""
        return self.attention + sum(3 * linear.flops_per_matmul for linear in self.linears)

    @property
    def output(self) -> int:
        """FLOPs per token of the linear `output`, the projection to the vocabulary."""
        return sum(3 * row.flops_per_matmul for row in self.linears if row.name == "output")

    @cached_property
    def by_precision(self) -> dict[Precision, int]:
        """FLOPs per token by the precision that computes them; the sum is `total`."""
        matmuls = (
            (precision, linear.flops_per_matmul)
            for linear in self.linears
            for precision in (linear.output, linear.grad_input, linear.grad_weight)
        )
        return self._sum(self.attention, matmuls)

    @cached_property
    def recompute(self) -> dict[Precision, int]:
        """FLOPs per token that the backward pass computes again, by precision; not in `total`."""
        matmuls = ((row.output, row.flops_per_matmul) for row in self.linears if row.recomputed)
        return self._sum(self.recomputed_attention, matmuls)

    def _sum(
        self, attention: int, matmuls: Iterable[tuple[Precision, int]]
    ) -> dict[Precision, int]:
        flops: dict[Precision, int] = {"fp8": 0, "bf16": 0, "fp32": 0}
        flops[self.high_precision] += attention
        for precision, count in matmuls:
            flops[self.fp8_runs_in if precision == "fp8" else precision] += count
        return flops


def count_flops(
    model: nn.Module,
    *,
    n_layers: int,
    n_heads: int,
    head_dim: int,
    seq_len: int,
    high_precision: torch.dtype,
    convention: FlopsConvention = "palm",
    recomputed: Collection[str] = (),
    recompute_is_known: bool = True,
) -> FlopsLedger:
    """Return the ledger of `model`, after float8 conversion and before sharding.

    Attention counts two matmuls forward and four backward: 12 * layers * heads * head_dim * seq_len
    per token by the `palm` convention (arXiv 2204.02311, appendix B), half of it by `causal`.
    `recomputed` names the linears and `attention` modules whose forward the backward pass repeats.
    """
    linears = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    precision = _PRECISION_OF[high_precision]
    rows = [
        _linear_flops(name, linear, high_precision=precision, recomputed=name in recomputed)
        for name, linear in linears.items()
    ]

    # Each of a layer's two attention matmuls, per token.
    matmul = 2 * n_heads * head_dim * seq_len // (2 if convention == "causal" else 1)
    recomputed_layers = sum(name.endswith(".attention") for name in recomputed)
    return FlopsLedger(
        linears=tuple(rows),
        attention=6 * n_layers * matmul,
        recomputed_attention=2 * recomputed_layers * matmul,
        high_precision=precision,
        recompute_is_known=recompute_is_known,
        fp8_runs_in=_fp8_runs_in(linears.values(), high_precision=precision),
    )


def _fp8_runs_in(linears: Iterable[nn.Linear], *, high_precision: Precision) -> Precision:
    """Return the precision of emulated fp8 matmuls: float32 in torchao's Float8Linear, in MXFP8 the
    precision from which the operands were cast."""
    for linear in linears:
        if is_float8_linear(linear) and linear.config.emulate:
            return "fp32"
        if _is_mxfp8(linear) and linear.emulate:
            return high_precision
    return "fp8"


def _is_mxfp8(linear: nn.Linear) -> bool:
    """Return whether this is our MXFP8 linear, the only other one with an attribute `emulate`."""
    return not is_float8_linear(linear) and hasattr(linear, "emulate")


def _linear_flops(
    name: str, linear: nn.Linear, *, high_precision: Precision, recomputed: bool
) -> LinearFlops:
    """Return the row of `linear`. MXFP8 runs all three matmuls in fp8; torchao has a config for
    each, in which both operands of a matmul are cast or neither."""
    output = grad_input = grad_weight = "fp8" if _is_mxfp8(linear) else high_precision
    if is_float8_linear(linear):
        from torchao.float8.config import ScalingType  # slow to import

        config = linear.config
        output, grad_input, grad_weight = (
            high_precision if cast.scaling_type is ScalingType.DISABLED else "fp8"
            for cast in (
                config.cast_config_input,
                config.cast_config_grad_output,
                config.cast_config_input_for_grad_weight,
            )
        )
    shape = (linear.in_features, linear.out_features)
    return LinearFlops(name, *shape, output, grad_input, grad_weight, recomputed)
