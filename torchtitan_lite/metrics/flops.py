"""Count the FLOPs of training one token, matmul by matmul.

The count has the three matmuls of every linear and the two of attention with their gradients, but
not the embedding look-up, norms, rotary embeddings, softmax and the loss. Recomputation by
activation checkpointing is counted separately.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import nn

Precision = Literal["fp8", "bf16", "fp32"]
FlopsConvention = Literal["palm", "causal"]


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
    high_precision: Precision,
    float8_linears: Collection[str] = (),
    float8_matmuls: Collection[str] = (),
    fp8_runs_in: Precision = "fp8",
    convention: FlopsConvention = "palm",
    recomputed: Collection[str] = (),
    recompute_is_known: bool = True,
) -> FlopsLedger:
    """Count the FLOPs of `model`, not yet sharded: sharding changes who computes, not how much.

    `float8_linears` names the linears that train in float8, `float8_matmuls` the fields of
    LinearFlops that then run in it. Attention is counted as the full square, 12 * layers * heads *
    head_dim * seq_len per token (PaLM, arXiv 2204.02311, appendix B): two matmuls forward and four
    backward; or by the causal convention as half of that. `recomputed` names the linears and the
    `attention` modules whose forward the backward pass runs again; there are others unless
    `recompute_is_known`."""
    linears = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            in_float8 = float8_matmuls if name in float8_linears else ()
            output, grad_input, grad_weight = (
                "fp8" if matmul in in_float8 else high_precision
                for matmul in ("output", "grad_input", "grad_weight")
            )
            linears.append(
                LinearFlops(
                    name,
                    module.in_features,
                    module.out_features,
                    output,
                    grad_input,
                    grad_weight,
                    recomputed=name in recomputed,
                )
            )

    layer_matmul = 2 * n_heads * head_dim * seq_len // (2 if convention == "causal" else 1)
    recomputed_layers = sum(name.endswith(".attention") for name in recomputed)
    return FlopsLedger(
        linears=tuple(linears),
        attention=6 * n_layers * layer_matmul,
        recomputed_attention=2 * layer_matmul * recomputed_layers,
        high_precision=high_precision,
        recompute_is_known=recompute_is_known,
        fp8_runs_in=fp8_runs_in,
    )
