"""Count the FLOPs of training one token, matmul by matmul, and rate a device's throughput by them.

Counted are the three matmuls of every linear and the two of attention with their gradients, and
separately what activation checkpointing computes again.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchtitan_lite.catalog.devices import Precision
from torchtitan_lite.models.llama3 import document_starts

from .hardware import Peaks

MATMULS = ("output", "grad_input", "grad_weight")
"""Matmuls of a linear, 2 * in_features * out_features FLOPs per token each."""


@dataclass(frozen=True)
class FlopsLedger:
    """FLOPs per trained token of a whole model, forward and backward."""

    by_precision: Mapping[Precision, int]
    """By the precision that computes them, without recomputation."""
    recompute: Mapping[Precision, int]
    """What the backward pass computes again; not in `by_precision`."""
    attention: int
    """Share of the scores and values in all layers."""
    recompute_is_known: bool = True
    """Whether `recompute` is complete; under a memory budget the compiler decides."""
    fp8_runs_in: Precision = "fp8"
    """What fp8 matmuls are computed and counted in: another precision if emulated."""
    attention_runs_in: Precision = "bf16"
    """As the matmuls of linears that are not in float8."""
    by_module: Mapping[str, Mapping[Precision, int]] = field(default_factory=dict)
    """`by_precision` of each block, such as layers.0, and of `output`."""

    @property
    def total(self) -> int:
        """All FLOPs per token, without recomputation."""
        return sum(self.by_precision.values())

    def count(self, modules: Iterable[str]) -> dict[Precision, int]:
        """Return the part of `by_precision` that is of `modules`."""
        parts = [self.by_module[name] for name in modules if name in self.by_module]
        return {each: sum(part[each] for part in parts) for each in self.by_precision}


def count_flops(
    model: nn.Module,
    *,
    n_layers: int,
    q_dim: int,
    seq_len: int,
    float8_matmuls: Mapping[str, Collection[str]],
    high_precision: Precision = "bf16",
    fp8_runs_in: Precision = "fp8",
    convention: Literal["palm", "causal"] = "palm",
    recomputed: Collection[str] = (),
    recompute_is_known: bool = True,
) -> FlopsLedger:
    """Count the FLOPs of `model`, not yet sharded: sharding changes who computes, not how much.

    Counted are all its nn.Linear, and attention in `n_layers` layers, `layers.0` and so on, of
    `q_dim` = heads * head_dim. `float8_matmuls` has the MATMULS of each linear that run in float8,
    by its name; all others and attention run in `high_precision`. Attention counts 12 * n_layers *
    q_dim * seq_len per token (PaLM, arXiv 2204.02311, appendix B), or half by the causal
    convention. `recomputed` names the linears and `attention` modules that the backward pass runs
    again."""
    layer_matmul = 2 * q_dim * seq_len
    if convention == "causal":
        layer_matmul //= 2
    recomputed_layers = sum(name.endswith(".attention") for name in recomputed)
    none: dict[Precision, int] = {"fp8": 0, "bf16": 0, "fp32": 0}
    recompute = none | {high_precision: 2 * layer_matmul * recomputed_layers}

    # The attention of each block, and the linears.
    blocks = [f"layers.{index}" for index in range(n_layers)]
    by_module = {block: none | {high_precision: 6 * layer_matmul} for block in blocks}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            count = 2 * module.in_features * module.out_features
            in_float8 = float8_matmuls.get(name, ())
            runs_in = [fp8_runs_in if each in in_float8 else high_precision for each in MATMULS]
            own = by_module.setdefault(".".join(name.split(".")[:2]), dict(none))
            for precision in runs_in:
                own[precision] += count
            recompute[runs_in[0]] += count if name in recomputed else 0
    return FlopsLedger(
        {each: sum(own[each] for own in by_module.values()) for each in none},
        recompute,
        6 * n_layers * layer_matmul,
        recompute_is_known,
        fp8_runs_in,
        attention_runs_in=high_precision,
        by_module=by_module,
    )


# ----- Attention within documents -----


def document_squares(
    tokens: Tensor, *, bos_id: int, shard_sequence: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Return this rank's share of the sum of squared document lengths in `tokens` [B, S], [] int64,
    which replaces B * S**2 in the FLOPs of attention. Token i of a document adds 2 * i + 1.

    `shard_sequence` returns what this rank computes of a tensor whose given dimension is a
    sequence. Does not wait for the device."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    positions = shard_sequence(index - document_starts(tokens, bos_id=bos_id), 1)
    return (2 * positions + 1).sum()


def document_values(rank_squares: Tensor, *, whole: int) -> tuple[Tensor, Tensor]:
    """Return two values of a step, [] float64, of `rank_squares` [ranks, microbatches] int64: the
    squares over `whole`, those of sequences that are one document, which is the share of
    attention's FLOPs within documents; and the squares of the busiest rank of each microbatch over
    the mean of ranks. Integers are exact in float64 up to 2**53."""
    total, busiest = rank_squares.sum().double(), rank_squares.amax(0).sum()
    return total / whole, busiest * len(rank_squares) / total


# ----- Rates -----


def compute_rates(
    tps: float, *, ledger: FlopsLedger, peaks: Peaks, attention_share: float | None = None
) -> dict[str, Any]:
    """Return figures of StepRecord for a device that trained on `tps` tokens per second. Document
    masks leave `attention_share` of attention's FLOPs."""
    flops = ledger.by_precision
    with_recompute = {name: count + ledger.recompute[name] for name, count in flops.items()}
    mfu_documents = mfu_fp8_peak = None
    if attention_share is not None:
        of_documents: dict[Precision, float] = dict(flops)
        of_documents[ledger.attention_runs_in] -= (1 - attention_share) * ledger.attention
        mfu_documents = peaks.utilisation(tps, of_documents)
    if ledger.fp8_runs_in == "fp8":
        mfu_fp8_peak = peaks.utilisation(tps, {"fp8": ledger.total})
    return {
        "tps": tps,
        "tflops": ledger.total * tps / 1e12,
        "mfu": peaks.utilisation(tps, flops),
        "mfu_documents": mfu_documents,
        "mfu_bf16_peak": peaks.utilisation(tps, {"bf16": ledger.total}),
        "mfu_fp8_peak": mfu_fp8_peak,
        "hfu": peaks.utilisation(tps, with_recompute) if ledger.recompute_is_known else None,
    }
