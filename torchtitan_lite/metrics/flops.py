"""The FLOPs of training one token, counted matmul by matmul from the converted model.

Counted are the three matmuls of every linear and the two of attention with their gradients. The
embedding look-up, norms, rotary embeddings, softmax and the loss are not. What activation
checkpointing computes again is counted apart.
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
    """One linear's matmuls: its global shape, and the precision that its recipe gives each of the
    three."""

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
        """FLOPs per token of `output`, and the same again of `grad_input` and of `grad_weight`."""
        return 2 * self.in_features * self.out_features


@dataclass(frozen=True)
class FlopsLedger:
    """FLOPs per trained token, forward and backward, of a whole model."""

    linears: tuple[LinearFlops, ...]
    attention: int
    """Scores and values in every layer, with their gradients."""
    recomputed_attention: int
    """Scores and values that the backward pass computes again."""
    high_precision: Precision
    """Of attention, and of the linears that are not converted."""
    recompute_is_known: bool = True
    """Whether `recompute` is all that is computed again."""
    fp8_runs_in: Precision = "fp8"
    """What the fp8 matmuls are computed in, and count as in `by_precision` and `recompute`: another
    where emulated."""

    @property
    def emulated(self) -> bool:
        """Whether the fp8 matmuls run in another precision."""
        return self.fp8_runs_in != "fp8"

    @cached_property
    def total(self) -> int:
        """All FLOPs per token, none of them twice."""
        return self.attention + sum(3 * linear.flops_per_matmul for linear in self.linears)

    @property
    def output(self) -> int:
        """FLOPs per token of the `output` linear, the projection to the vocabulary."""
        return sum(
            3 * linear.flops_per_matmul for linear in self.linears if linear.name == "output"
        )

    @cached_property
    def by_precision(self) -> dict[Precision, int]:
        """FLOPs per token that the device computes in each precision; they add up to `total`."""
        return self._sum(
            self.attention,
            (
                (precision, linear.flops_per_matmul)
                for linear in self.linears
                for precision in (linear.output, linear.grad_input, linear.grad_weight)
            ),
        )

    @cached_property
    def recompute(self) -> dict[Precision, int]:
        """FLOPs per token on top of `total` that the backward pass computes again, by precision."""
        return self._sum(
            self.recomputed_attention,
            (
                (linear.output, linear.flops_per_matmul)
                for linear in self.linears
                if linear.recomputed
            ),
        )

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
    """The ledger of `model`, float8-converted and not yet sharded: sharding changes who computes,
    not how much.

    Attention is counted as the full square, 12 * layers * heads * head_dim * seq_len per token
    (PaLM, arXiv 2204.02311, appendix B): two matmuls forward and four backward; or by the causal
    convention as half of that. `recomputed` names the linears and the `attention` modules whose
    forward the backward pass runs again; there are others unless `recompute_is_known`."""
    linears = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    precision = _PRECISION_OF[high_precision]
    layer_matmul = 2 * n_heads * head_dim * seq_len // (2 if convention == "causal" else 1)
    return FlopsLedger(
        linears=tuple(
            _linear_flops(name, linear, high_precision=precision, recomputed=name in recomputed)
            for name, linear in linears.items()
        ),
        attention=6 * n_layers * layer_matmul,
        recomputed_attention=2
        * layer_matmul
        * sum(name.endswith(".attention") for name in recomputed),
        high_precision=precision,
        recompute_is_known=recompute_is_known,
        fp8_runs_in=_fp8_runs_in(linears.values(), high_precision=precision),
    )


def _fp8_runs_in(linears: Iterable[nn.Linear], *, high_precision: Precision) -> Precision:
    """Emulated, torchao's Float8Linear multiplies in float32, and MXFP8 in what its operands were
    cast from."""
    for linear in linears:
        if is_float8_linear(linear) and linear.config.emulate:
            return "fp32"
        if _is_mxfp8(linear) and linear.emulate:
            return high_precision
    return "fp8"


def _is_mxfp8(linear: nn.Linear) -> bool:
    """Whether a linear is one of MXFP8, which is not torchao's: it casts for all matmuls, and knows
    if it emulates."""
    return not is_float8_linear(linear) and hasattr(linear, "emulate")


def _linear_flops(
    name: str, linear: nn.Linear, *, high_precision: Precision, recomputed: bool
) -> LinearFlops:
    """`linear`'s row of the ledger. torchao has both operands of a matmul cast to float8, or
    neither."""
    output = grad_input = grad_weight = "fp8" if _is_mxfp8(linear) else high_precision
    if is_float8_linear(linear):
        from torchao.float8.config import ScalingType

        output, grad_input, grad_weight = (
            high_precision if cast.scaling_type is ScalingType.DISABLED else "fp8"
            for cast in (
                linear.config.cast_config_input,
                linear.config.cast_config_grad_output,
                linear.config.cast_config_input_for_grad_weight,
            )
        )
    return LinearFlops(
        name, linear.in_features, linear.out_features, output, grad_input, grad_weight, recomputed
    )
