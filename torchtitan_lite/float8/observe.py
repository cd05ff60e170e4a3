"""What really ran in a step: its matmuls and gathers, counted where they are issued, eager or
compiled, and held against what the config asks for. A switch that no longer matches anything shows
here, and nowhere else."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_lite.collectives import on_all_ranks, on_rank0
from torchtitan_lite.errors import NumericError
from torchtitan_lite.logger import logger
from torchtitan_lite.torchao_types import is_float8_tensor

from .convert import is_float8

MATMULS = {"mm": 1, "addmm": 1, "_mm_plus_mm": 2}
"""Matmuls that an operator stands for, by its name; attention's are not among them."""
SCALED_MATMULS = {"_scaled_mm", "_scaled_mm_v2"}
"""Those on float8 operands."""
FUSED = {
    "fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul",
    "fused_matmul_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
}
"""What the compiler makes of a matmul and a collective under async tensor parallelism."""
PASSED_ON = {torch.Tensor, nn.Parameter, DTensor}
"""Types of tensors whose operators are seen whole."""


@dataclass(frozen=True)
class Asked:
    """What a config asks of a step on each rank, at least: what is recomputed comes on top."""

    linears: int = 0
    """That train in float8."""
    matmuls: int = 0
    """In float8."""
    matmuls_run_in: str = "float8"
    """Type of those matmuls' operands: another than float8 where they are emulated."""
    fsdp_gathers: int = 0
    """Of weights in float8."""
    tp_gathers: int = 0
    """Of activations and gradients in float8."""
    fused: int = 0
    """Collectives that are one operator with a matmul."""


class StepObserver(TorchDispatchMode):
    """Counts, while it is entered, this rank's matmuls and gathers; changes nothing of what they
    compute."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.matmuls: Counter[str] = Counter()
        """By the type of the operands, "float8" for the real ones."""
        self.fsdp_gathers: Counter[str] = Counter()
        """Of weights, by the type that was sent; what has one byte is "float8"."""
        self.tp_gathers: Counter[str] = Counter()
        """Of activations and their gradients, likewise."""
        self.fused = 0
        """Collectives that were one operator with a matmul."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: compiled code is observed as it runs, and compiled as ever."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not PASSED_ON.issuperset(types):
            return NotImplemented  # a float8 tensor takes the operator apart into what it sends and multiplies
        name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
        if name in MATMULS:
            self.matmuls[_type_name(args[-2])] += MATMULS[name]
        elif name in SCALED_MATMULS:
            self.matmuls["float8"] += 1
        elif name == "_allgather_base_":
            self.fsdp_gathers[_type_name(args[1])] += 1
        elif name == "all_gather_into_tensor":
            self.tp_gathers[_type_name(args[0])] += 1
        elif name in FUSED:
            self.fused += 1
            readers = len(args[1]) if isinstance(args[1], list) else 1
            self.matmuls["float8" if "scaled" in name else _type_name(args[0])] += readers
            if "gather" in name:
                self.tp_gathers[_type_name(args[0])] += 1
        return func(*args, **(kwargs or {}))

    def report(self, model: nn.Module, asked: Asked, *, step: int, deterministic: bool) -> None:
        """Say what of float8 ran in `step` of `model`, and what on any rank ran otherwise than
        `asked`, which is a NumericError if the run is to be `deterministic`, else a warning. A
        collective call."""
        for line in self.lines(model, asked):
            logger.info(f"step {step} ran: {line}")
        of_ranks = on_all_ranks(lambda: "; ".join(self.mismatches(model, asked)))
        if not (differing := [rank for rank, found in enumerate(of_ranks) if found]):
            return
        message = (
            f"step {step} ran otherwise than [float8] and [parallelism] ask for on {len(differing)} of {len(of_ranks)} "
            f"ranks, on rank {differing[0]}: {of_ranks[differing[0]]}"
        )
        if deterministic:
            raise NumericError(
                f"{message}. Set [debug] deterministic = false to train on with a warning."
            )
        on_rank0(lambda: logger.warning(message))

    def lines(self, model: nn.Module, asked: Asked) -> list[str]:
        """What ran in `model`, in words."""
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        emulation = (
            ""
            if asked.matmuls_run_in == "float8"
            else f" (float8 is emulated in {asked.matmuls_run_in})"
        )
        lines = [
            f"{sum(map(is_float8, linears))} of {len(linears)} linears are of float8; matmuls: "
            f"{_show(self.matmuls)}{emulation}"
        ]
        if self.fsdp_gathers:
            lines.append(f"gathers of weights by FSDP: {_show(self.fsdp_gathers)}")
        if self.tp_gathers:
            fused = f", {self.fused} collectives fused with matmuls" if asked.fused else ""
            lines.append(
                f"gathers of activations by tensor parallelism: {_show(self.tp_gathers)}{fused}"
            )
        return lines

    def mismatches(self, model: nn.Module, asked: Asked) -> list[str]:
        """What ran otherwise than `asked`."""
        converted = sum(is_float8(module) for module in model.modules())
        found = (
            [f"{converted} linears are of float8, not {asked.linears}"]
            if converted != asked.linears
            else []
        )
        counts = (
            ("matmuls in float8", self.matmuls[asked.matmuls_run_in], asked.matmuls),
            ("gathers of weights in float8", self.fsdp_gathers["float8"], asked.fsdp_gathers),
            ("gathers of activations in float8", self.tp_gathers["float8"], asked.tp_gathers),
            ("collectives fused with matmuls", self.fused, asked.fused),
        )
        for what, seen, least in counts:
            if seen < least:
                found.append(f"{seen} {what}, and at least {least} were asked for")
            elif seen and not least:
                found.append(f"{seen} {what}, and none was asked for")
        return found


def _type_name(tensor: torch.Tensor) -> str:
    """The type of what is sent or multiplied. A DTensor, which the observer does not see taken
    apart, is asked."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if is_float8_tensor(tensor):
        return "float32" if tensor._linear_mm_config.output.emulate else "float8"
    return "float8" if tensor.dtype.itemsize == 1 else str(tensor.dtype).removeprefix("torch.")


def _show(counts: Counter[str]) -> str:
    return ", ".join(f"{count} in {name}" for name, count in counts.items()) or "none"
