"""The FLOPs of a forward pass as PyTorch counts them, operator by operator: an independent check of
the ledger."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.flop_counter import FlopCounterMode, bmm_flop, mm_flop

from .flops import Precision

aten = torch.ops.aten


@dataclass(frozen=True)
class OperatorFlops:
    """The calls of one operator in all modules of one kind, such as the `attention.wq` of every
    layer."""

    module: str
    operator: str
    precision: Precision
    flops_per_token: int
    """Forward only."""


def count_operators(
    model: nn.Module, *, seq_len: int, high_precision: Precision
) -> list[OperatorFlops]:
    """What a forward pass of `model`, which is on meta and computes nothing, calls for one
    sequence, in its order. A matmul is one of fp8 if its operands are wrapped: as float8 numbers
    and their scales."""
    flops: Counter[tuple[str, str, Precision]] = Counter()

    def counting(operator: str, count: Any) -> Any:
        def record(*args: Any, out_val: Any, **kwargs: Any) -> int:
            shapes = (arg.shape for arg in args if isinstance(arg, torch.Tensor))
            counted = count(*shapes)
            precision: Precision = (
                "fp8" if is_traceable_wrapper_subclass(args[0]) else high_precision
            )
            flops[_kind(counter.mod_tracker.parents), operator, precision] += counted
            return counted

        record._get_raw = True  # type: ignore[attr-defined]  # the operands, not only their shapes
        return record

    tokens = torch.zeros(1, seq_len, dtype=torch.long, device="meta")
    mapping = {aten.mm: counting("mm", mm_flop), aten.bmm: counting("bmm", bmm_flop)}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        model(tokens)
    assert sum(flops.values()) == counter.get_total_flops(), (
        "an operator with FLOPs is none of those counted here"
    )
    return [OperatorFlops(*row, flops_per_token=count // seq_len) for row, count in flops.items()]


def _kind(modules: set[str]) -> str:
    """The innermost of nested modules, without the model's name and the layer's number."""
    innermost = max(modules, key=lambda name: name.count("."))
    return ".".join(
        part for part in innermost.split(".")[1:] if part != "layers" and not part.isdigit()
    )
