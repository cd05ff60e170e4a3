"""What really ran in a step: its matmuls and gathers, counted as they run, eager or compiled.

An option that silently has no effect any more, because a name or an operator has changed, is found
here and nowhere else.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_lite.base.collectives import on_all_ranks, on_rank0
from torchtitan_lite.base.errors import NumericError
from torchtitan_lite.base.logger import logger
from torchtitan_lite.base.torchao_types import is_float8_tensor

from .convert import is_float8

MATMULS = {"mm": 1, "addmm": 1, "_mm_plus_mm": 2}
"""Number of matmuls that an operator computes, by its name; attention is not counted."""
SCALED_MATMULS = {"_scaled_mm", "_scaled_mm_v2"}  # of float8 operands
FUSED = ("fused_all_gather_", "fused_matmul_reduce_", "fused_scaled_matmul_reduce_")
"""Prefixes of operators that async tensor parallelism has fused of a matmul and a collective."""
OBSERVED_TYPES = {torch.Tensor, nn.Parameter, DTensor}
"""Types whose operators are counted; a float8 tensor splits an operator into those on its parts."""


@dataclass(frozen=True)
class Asked:
    """Least counts of a step on each rank that the config asks for, without recomputation."""

    linears: int = 0  # that train in float8
    matmuls: int = 0  # in float8
    matmuls_run_in: str = "float8"  # type of their operands: another one if they are emulated
    fsdp_gathers: int = 0  # of weights in float8
    tp_gathers: int = 0  # of activations and gradients in float8
    fused: int = 0  # collectives that are fused with a matmul
    graphs: int = 0  # compiled ones, in all steps


class StepObserver(TorchDispatchMode):
    """Counts this rank's matmuls and gathers while it is entered."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        # By the type of the operands, or that was sent: "float8" for types of one byte.
        self.matmuls: Counter[str] = Counter()
        self.fsdp_gathers: Counter[str] = Counter()  # of weights
        self.tp_gathers: Counter[str] = Counter()  # of activations and gradients
        self.fused = 0  # collectives that were fused with a matmul

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Observe compiled code as it runs, but not its compilation."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not OBSERVED_TYPES.issuperset(types):
            return NotImplemented
        name = getattr(getattr(func, "overloadpacket", None), "__name__", "")

        if name in MATMULS:
            self.matmuls[_type_name(args[-2])] += MATMULS[name]
        elif name in SCALED_MATMULS:
            self.matmuls["float8"] += 1
        elif name == "_allgather_base_":
            self.fsdp_gathers[_type_name(args[1])] += 1
        elif name == "all_gather_into_tensor":
            self.tp_gathers[_type_name(args[0])] += 1
        elif name.startswith(FUSED):
            # A gathered tensor can have several readers, whose weights are a list.
            self.fused += 1
            readers = len(args[1]) if isinstance(args[1], list) else 1
            self.matmuls["float8" if "scaled" in name else _type_name(args[0])] += readers
            if "gather" in name:
                self.tp_gathers[_type_name(args[0])] += 1

        return func(*args, **(kwargs or {}))

    def report(self, model: nn.Module, asked: Asked, *, step: int, deterministic: bool) -> None:
        """Log what ran in `step` of `model`, and compare it with `asked` on all ranks. A mismatch
        is a NumericError if the run is `deterministic`, else a warning. A collective call."""
        for line in self.lines(model, asked):
            logger.info(f"step {step} ran: {line}")
        of_ranks = on_all_ranks(lambda: "; ".join(self.mismatches(model, asked)))
        differing = [f"rank {rank}: {found}" for rank, found in enumerate(of_ranks) if found]
        if not differing:
            return
        message = (
            f"step {step} ran otherwise than [float8], [parallelism] and [compile] ask for on "
            f"{len(differing)} of {len(of_ranks)} ranks, on {differing[0]}"
        )
        if deterministic:
            raise NumericError(
                f"{message}. Set [debug] deterministic = false to train on with a warning."
            )
        on_rank0(lambda: logger.warning(message))

    def lines(self, model: nn.Module, asked: Asked) -> list[str]:
        """Describe what ran in `model`."""
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        line = f"{sum(map(is_float8, linears))} of {len(linears)} linears are of float8; "
        line += f"matmuls: {_show(self.matmuls)}"
        if asked.matmuls_run_in != "float8":
            line += f" (float8 is emulated in {asked.matmuls_run_in})"
        lines = [line]
        if self.fsdp_gathers:
            lines.append(f"gathers of weights by FSDP: {_show(self.fsdp_gathers)}")
        if self.tp_gathers:
            fused = f", {self.fused} collectives fused with matmuls" if asked.fused else ""
            lines.append(f"gathers of activations: {_show(self.tp_gathers)}{fused}")
        if asked.graphs:
            lines.append(f"torch.compile: {counters['stats']['unique_graphs']} graphs")
        return lines

    def mismatches(self, model: nn.Module, asked: Asked) -> list[str]:
        """List what ran otherwise than `asked`."""
        found = []
        counts = {
            "linears of float8": (sum(map(is_float8, model.modules())), asked.linears),
            "matmuls in float8": (self.matmuls[asked.matmuls_run_in], asked.matmuls),
            "gathers of weights in float8": (self.fsdp_gathers["float8"], asked.fsdp_gathers),
            "gathers of activations in float8": (self.tp_gathers["float8"], asked.tp_gathers),
            "collectives fused with matmuls": (self.fused, asked.fused),
        }
        if asked.graphs:
            counts["compiled graphs"] = (counters["stats"]["unique_graphs"], asked.graphs)
        for what, (seen, least) in counts.items():
            if seen < least:
                found.append(f"{seen} {what}, and at least {least} were asked for")
            elif seen and not least:
                found.append(f"{seen} {what}, and none was asked for")
        return found


def _type_name(tensor: torch.Tensor) -> str:
    """Return the type in which `tensor` is sent or multiplied."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if is_float8_tensor(tensor):
        return "float32" if tensor._linear_mm_config.output.emulate else "float8"
    return "float8" if tensor.dtype.itemsize == 1 else str(tensor.dtype).removeprefix("torch.")


def _show(counts: Counter[str]) -> str:
    return ", ".join(f"{count} in {name}" for name, count in counts.items()) or "none"
