"""Measure what casts to float8 lose, on the casts of a real training step.

Shapes: L Float8Linears of the model, R roles of the tensors that are cast.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.tensor import DTensor

from torchtitan_lite.base.torchao_types import is_float8_linear
from torchtitan_lite.patches import observe_float8_casts

ROLES = ("input", "weight", "grad_output")
"""The tensors that a linear casts, by the names of torchao's GemmInputRole."""
FIGURES: dict[str, Any] = {"sqnr_db": min, "amax": max, "underflow": max, "saturation": max}
"""The figures of a cast, and how to find the worst of several."""
Numerics = dict[str, dict[str, dict[str, float]]]  # by kind of linear, role and name of the figure
LAYER = re.compile(r"layers\.(\d+)\.")


def saturation_limit(dtype: torch.dtype) -> float:
    """Return the magnitude from which values saturate: half a spacing above the largest number."""
    largest = torch.tensor(torch.finfo(dtype).max).to(dtype)
    below = (largest.view(torch.uint8) - 1).view(dtype)
    return 1.5 * largest.item() - 0.5 * below.item()


def measure_cast(tensor: Tensor, data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Measure the cast of `tensor` to the float8 `data`, which is `tensor` * `scale`.

    Returns [5] float64: the sum of squares, the sum of squared errors, and the numbers of values
    that became 0, that saturated, and in total; and the largest magnitude, [] float32."""
    values, rounded = tensor.float(), data.float()
    signal = torch.linalg.vector_norm(values).double().square()
    noise = torch.linalg.vector_norm(values - rounded / scale).double().square()
    underflows = ((values != 0) & (rounded == 0)).sum()
    saturated = ((values * scale).abs() >= saturation_limit(data.dtype)).sum()
    count = torch.full_like(signal, tensor.numel())
    sums = torch.stack([signal, noise, underflows, saturated, count])
    return sums, torch.linalg.vector_norm(values, ord=math.inf)


class NumericsMonitor:
    """Measure in some steps what a model's casts to float8 lose."""

    def __init__(self, model: nn.Module, linears: Sequence[str], *, device: torch.device) -> None:
        """`linears` are the names of all Float8Linears, also those on other ranks of a pipeline."""
        self._model, self._linears = model, list(linears)
        # Each cast carries the config object of its linear, which identifies the linear.
        self._rows = {
            id(module.linear_mm_config): self._linears.index(name.replace(_CHECKPOINT_PREFIX, ""))
            for name, module in model.named_modules()
            if is_float8_linear(module)
        }

        # FSDP casts weights on its own stream; no other cast adds to the same elements.
        shape = len(linears), len(ROLES)  # [L, R]
        self._sums = torch.zeros(*shape, 5, dtype=torch.float64, device=device)  # [L, R, 5]
        self._amax = torch.zeros(shape, device=device)

    @contextmanager
    def observe(self) -> Iterator[None]:
        """Measure all casts inside the context. Compiled blocks run eagerly, so theirs are seen."""
        self._sums.zero_()
        self._amax.zero_()

        # Not by "force_eager" of the compiler: eager FlexAttention computes all scores.
        calls = {m: m._compiled_call_impl for m in self._model.modules() if m._compiled_call_impl}
        try:
            for module in calls:
                module._compiled_call_impl = None
            with observe_float8_casts(self._add):
                yield
        finally:
            for module, call in calls.items():
                module._compiled_call_impl = call

    @torch.no_grad()
    def _add(self, tensor: Tensor, cast: Any) -> None:
        """Record a cast of this rank. Must not use an operator whose result activation
        checkpointing keeps."""
        tensor, cast = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, cast))
        row = self._rows[id(cast._linear_mm_config)]
        role = ROLES.index(cast._gemm_input_role.value)
        sums, amax = measure_cast(tensor, cast._data, cast._scale)
        self._sums[row, role] += sums
        self._amax[row, role] = torch.maximum(self._amax[row, role], amax)

    def figures(self) -> Numerics:
        """Return the figures of the last measurement over all ranks, by kind of linear (its name
        without the layer), role and figure: the worst of the kind's layers, whose number is added
        as FIGURE_layer, except for `output`:

        - sqnr_db: signal over quantization noise in decibels; inf without noise, -inf if not finite
        - amax: largest magnitude; inf if not finite
        - underflow, saturation: share of values that became 0, or the largest number

        Roles without casts are left out. Waits for the device. A collective call."""
        dist.all_reduce(self._sums)
        dist.all_reduce(self._amax, op=dist.ReduceOp.MAX)

        # Compute the figures of each linear and role.
        signal, noise, underflows, saturated, count = self._sums.cpu().unbind(-1)  # [L, R] each
        sqnr = 10 * torch.log10(signal / noise)
        sqnr[noise == 0] = math.inf
        not_finite = ~signal.isfinite()
        sqnr[not_finite] = -math.inf
        amax = self._amax.cpu()
        amax[not_finite] = math.inf  # a maximum over ranks may lose a NaN; a sum does not
        values = torch.stack([sqnr, amax, underflows / count, saturated / count], dim=-1).tolist()

        # Find the worst layer of each kind.
        kinds: Numerics = {}
        for kind in dict.fromkeys(LAYER.sub("", name) for name in self._linears):
            kinds[kind] = {}
            rows = [i for i, name in enumerate(self._linears) if LAYER.sub("", name) == kind]
            for role, role_name in enumerate(ROLES):
                if seen := [row for row in rows if count[row, role]]:
                    kinds[kind][role_name] = self._worst({row: values[row][role] for row in seen})
        return kinds

    def _worst(self, rows: Mapping[int, Sequence[float]]) -> dict[str, float]:
        """Return the worst of each figure, and its layer. `rows` holds the FIGURES by linear."""
        worst: dict[str, float] = {}
        for index, (name, choose) in enumerate(FIGURES.items()):
            row = choose(rows, key=lambda row: rows[row][index])
            worst[name] = rows[row][index]
            if layer := LAYER.match(self._linears[row]):
                worst[f"{name}_layer"] = int(layer[1])
        return worst
