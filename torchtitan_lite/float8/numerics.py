"""What the casts to float8 lose, measured on the casts that a training step makes.

torchao makes every cast of a Float8Linear through one function, wherever that is: before a matmul,
before FSDP gathers a weight, before tensor parallelism gathers an input. While casts are observed,
a function that also looks on is in its place. Each cast carries the config object that its linear
made for itself, which tells whose it is.

Shapes: L Float8Linears of the model, R roles of what is cast.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.patches import observe_float8_casts
from torchtitan_lite.torchao_types import is_float8_linear

ROLES = ("input", "weight", "grad_output")
"""What a linear casts, by the names of torchao's GemmInputRole."""
Numerics = dict[str, dict[str, dict[str, float]]]
"""Figures by kind of linear, role and name."""
FIGURES: dict[str, Any] = {"sqnr_db": min, "amax": max, "underflow": max, "saturation": max}
"""The figures of a cast, and which of two is the worse."""
_LAYER = re.compile(r"layers\.(\d+)\.(?:_checkpoint_wrapped_module\.)?")


def saturation_limit(dtype: torch.dtype) -> float:
    """The least magnitude that is cut off to the largest number of a float8 type, and not merely
    rounded to it: half their spacing above it."""
    largest = torch.tensor(torch.finfo(dtype).max).to(dtype)
    below = (largest.view(torch.uint8) - 1).view(dtype)
    return 1.5 * largest.item() - 0.5 * below.item()


def measure_cast(tensor: Tensor, data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Of the cast of `tensor` to the float8 `data` [same shape], which is `tensor` times `scale`:
    the sum of squares, that of the squared errors, how many values became 0, how many were cut off,
    and how many there are, [5] float64; and the largest magnitude, [] float32."""
    values, rounded = tensor.float(), data.float()
    signal, noise = (
        torch.linalg.vector_norm(x).double().square() for x in (values, values - rounded / scale)
    )
    underflows = ((values != 0) & (rounded == 0)).sum()
    saturated = ((values * scale).abs() >= saturation_limit(data.dtype)).sum()
    sums = torch.stack(
        [signal, noise, underflows, saturated, torch.full_like(signal, tensor.numel())]
    )
    return sums, torch.linalg.vector_norm(values, ord=math.inf)


@contextmanager
def run_eagerly(model: nn.Module) -> Iterator[None]:
    """Run the modules of `model` that are compiled without their compiled code, which is kept.
    Unlike under the compiler's "force_eager", what else is compiled stays so: FlexAttention, which
    eager computes every score."""
    compiled = {
        module: module._compiled_call_impl
        for module in model.modules()
        if module._compiled_call_impl
    }
    try:
        for module in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call


class NumericsMonitor:
    """Measures, every `freq` steps, what a model's casts to float8 lose."""

    def __init__(self, model: nn.Module, *, freq: int, device: torch.device) -> None:
        """`freq` 0: never. `device` is that of the casts."""
        self._model = model
        self._freq = freq
        linears = [
            (name, module) for name, module in model.named_modules() if is_float8_linear(module)
        ]
        self._rows = {id(linear.linear_mm_config): row for row, (_, linear) in enumerate(linears)}
        assert len(self._rows) == len(linears), "each Float8Linear makes a config object of its own"
        self._kinds: dict[str, dict[int | None, int]] = {}  # rows by the layer's number
        for row, (name, _) in enumerate(linears):
            layer = _LAYER.match(name)
            self._kinds.setdefault(_LAYER.sub("", name), {})[int(layer[1]) if layer else None] = row
        # FSDP casts weights on a stream of its own. No other cast adds to the same elements.
        self._sums = torch.zeros(
            len(linears), len(ROLES), 5, dtype=torch.float64, device=device
        )  # [L, R, 5]
        self._amax = torch.zeros(len(linears), len(ROLES), device=device)  # [L, R]

    def due(self, step: int) -> bool:
        """Whether `step` is one to measure; none is if nothing is cast."""
        return self._freq > 0 and step % self._freq == 0 and bool(self._rows)

    @contextmanager
    def observe(self) -> Iterator[None]:
        """Measure the casts that are made until the end, and no others. Compiled blocks run eagerly
        meanwhile: a compiled cast cannot be looked at."""
        self._sums.zero_()
        self._amax.zero_()
        with run_eagerly(self._model), observe_float8_casts(self._add):
            yield

    @torch.no_grad()
    def _add(self, tensor: Tensor, cast: Any) -> None:
        """Count a cast of this rank. Uses no operator whose results activation checkpointing
        keeps."""
        tensor, cast = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, cast))
        row = self._rows.get(id(cast._linear_mm_config))
        assert row is not None, "a cast carries the config object of its linear"
        role = ROLES.index(cast._gemm_input_role.value)
        sums, amax = measure_cast(tensor, cast._data, cast._scale)
        self._sums[row, role] += sums
        self._amax[row, role] = torch.maximum(self._amax[row, role], amax)

    def figures(self) -> Numerics:
        """What the observed casts of all ranks lost, by kind of linear, which is its name without
        the layer, by role, and by name; of a kind's layers the worst each, and its number as
        NAME_layer, but for `output`:

        sqnr_db: ratio of signal to quantisation noise, in decibels; inf without noise, -inf if not
        finite amax: largest magnitude; inf if not finite underflow, saturation: share of values
        that became 0, and that were cut off to the largest number

        A role that nothing was cast in is left out. Waits for the device. A collective call."""
        dist.all_reduce(self._sums)
        dist.all_reduce(self._amax, op=dist.ReduceOp.MAX)
        signal, noise, underflows, saturated, count = self._sums.cpu().unbind(-1)  # [L, R] each
        sqnr = 10 * torch.log10(signal / noise)
        sqnr[noise == 0] = math.inf
        not_finite = ~signal.isfinite()
        sqnr[not_finite] = -math.inf
        amax = self._amax.cpu()
        amax[not_finite] = math.inf  # a maximum over ranks may lose a NaN; a sum does not
        table = torch.stack([sqnr, amax, underflows / count, saturated / count], dim=-1).tolist()
        kinds: Numerics = {}
        for kind, rows in self._kinds.items():
            kinds[kind] = {}
            for role, name in enumerate(ROLES):
                layers = {
                    layer: table[row][role] for layer, row in rows.items() if count[row, role]
                }
                if layers:
                    kinds[kind][name] = _worst(layers)
        return kinds


def _worst(layers: Mapping[int | None, Sequence[float]]) -> dict[str, float]:
    """The worst of each of FIGURES, by layer in this order, and which layer's it is."""
    worst: dict[str, float] = {}
    for (name, choose), values in zip(
        FIGURES.items(), zip(*layers.values(), strict=True), strict=True
    ):
        worst[name] = choose(values)
        layer = list(layers)[values.index(worst[name])]
        if layer is not None:
            worst[f"{name}_layer"] = layer
    return worst
