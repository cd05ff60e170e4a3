"""Where a step's time goes: the kernels of a torch.profiler trace, in groups by their names.

On a GPU kernels are what ran on the device. On CPU they are operators, each with the time that is
its own, not that of operators it called; a fused kernel of the compiler has one name there as on a
GPU.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lite.errors import RunError

FP8_GEMM, BF16_GEMM = "GEMM fp8", "GEMM bf16"
GROUPS = (
    FP8_GEMM,
    BF16_GEMM,
    "attention",
    "casts and amax",
    "norms and activations",
    "loss",
    "optimizer",
    "communication",
    "other",
    "idle",
)
"""As they are listed. Communication holds FSDP's copies into and out of its buffers, also on one
device; the optimizer holds clipping. A cast that the compiler fused into a norm, an activation or
an addition is there. Idle is when no kernel runs; on CPU, when no operator does, and then `other`
holds what autograd and Python do around operators."""

GEMM = re.compile(
    r"nvjet|gem[mv]|cutlass|xmma|cublas|wgmma|_mm_|mkldnn_linear|mkl_linear|^aten::(?:\w*mm|matmul|linear)\b"
)
FLOAT8 = re.compile(r"e4m3|e5m2|float8|fp8|f8f8|scaled_mm")
NVJET = re.compile(r"nvjet_(?:sm\d+_)?([a-z]+)_")
"""cuBLAS's own kernels. The letters are the types of A, B, C, compute and D, three of them where A,
B, C and D are of one type: `tst` is bf16 with float32 sums, `hsh` fp16, `qqtst` float8 E4M3 times
E4M3."""
EMULATED = re.compile(r"^aten::(?:\w*mm|matmul|linear)\(float\b")
"""A run computes in bf16: what multiplies float32 on CPU is emulated float8."""
GENERATED = re.compile(r"^(?:graph_\d+_)?(?:triton|cpp)_(?:[a-z]+_)?fused_(\w+?)(?:_\d+)?$")
"""Inductor's kernels, named by the operators that they are made of."""
LOSS_FUNCTION = re.compile(r"_Of(?:Linear|Logits)")
"""What autograd calls the loss, with its gradient, in models/loss.py; eager, its operators are
those of others too."""
LOSS = re.compile(
    r"nll_loss|cross_entropy|log_?soft_?max|logsumexp|soft_?max_?(?:warp|forward|backward)"
)
SOFTMAX_GRADIENT = re.compile(
    r"(?=.*(?<![a-z])exp(?![a-z]))(?=.*(?<![a-z])(?:eq|where|sub)(?![a-z]))"
)
OPTIMIZER = re.compile(r"foreach|adam|lerp.*sqrt")
"""The last is AdamW's update with moments in few bits, in optim.py."""
AMAX = re.compile(r"(?<![a-z])(?:abs|amax|max|clamp|reciprocal)(?![a-z])")
NORM = re.compile(r"(?<![a-z])(?:rsqrt|silu|sigmoid|pow|mean|sum|add|stack|cat|neg)(?![a-z])")
MERE_COPY = re.compile(
    r"^_?(?:(?:to_copy|copy|clone|t|transpose|permute|view|reshape|unsafe_view|expand|cat|slice)_*)+$"
)

RULES = (
    (
        "communication",
        re.compile(r"nccl|c10d|gloo|fsdp|all_?gather|reduce_?scatter|all_?reduce|chunk_cat"),
    ),
    ("communication", re.compile(r"split_with_sizes_copy|foreach_copy|multi_tensor_apply.*copy")),
    ("optimizer", re.compile(r"multi_tensor_apply|adam|foreach|lpnorm|vector_norm|found_inf")),
    ("attention", re.compile(r"flash|fmha|sdpa|attention|attn|dot_do_o|cudnn::fusion")),
    ("loss", LOSS),
)
"""The first that a name in lower case matches decides; then come GEMMs and the rest."""
COPIES = re.compile(
    r"copy_kernel|^aten::(?:copy_|_to_copy|to)\b|absfunctor|maxnanfunctor|max_functor|clamp|reciprocal"
)
AMAX_OPERATORS = re.compile(r"^aten::(?:abs|amax|max|clamp\w*|reciprocal)\b|maxops|minmax")
POINTWISE = re.compile(
    r"elementwise_kernel|reduce_kernel|rms_?norm|layer_?norm|gammabeta|cucomputegrad|silu|sigmoid|catarray|"
    r"^aten::(?:add|sub|mul|div|neg|pow|mean|sum|rsqrt|stack|cat|_fused_rms|fill|zero)\w*"
)


def group_of(name: str) -> str:
    """The group, one of GROUPS but idle, of the kernel or CPU operator called `name`; an operator's
    may end in the type of its first input, in parentheses."""
    low = name.lower()
    if (generated := GENERATED.match(low)) and "_tem_" not in low:
        return _group_of_generated(generated[1])
    for group, pattern in RULES:
        if pattern.search(low):
            return group
    if GEMM.search(low):
        return FP8_GEMM if _multiplies_float8(low) else BF16_GEMM
    if COPIES.search(low) or AMAX_OPERATORS.search(low):
        return "casts and amax"
    return "norms and activations" if POINTWISE.search(low) else "other"


def _multiplies_float8(name: str) -> bool:
    """Whether a GEMM of that name, in lower case, has float8 operands."""
    nvjet = NVJET.search(name)
    if nvjet is not None:
        return len(nvjet[1]) > 3
    return bool(FLOAT8.search(name) or EMULATED.match(name))


def _group_of_generated(operators: str) -> str:
    """The group of a kernel that Inductor made of `operators`, joined by underscores."""
    if OPTIMIZER.search(operators):
        return "optimizer"
    if LOSS.search(operators) or SOFTMAX_GRADIENT.match(operators):
        return "loss"
    if MERE_COPY.match(operators):
        return "casts and amax"
    if AMAX.search(operators) and not NORM.search(operators):
        return "casts and amax"
    return "norms and activations"


@dataclass(frozen=True)
class Breakdown:
    """A step, in parts."""

    wall_s: float
    """From its first kernel to the end of its last one; on CPU all of it."""
    group_s: Mapping[str, float]
    """Seconds of each of GROUPS. Those of kernels that ran at the same time count twice, and then
    the sum is above wall_s."""

    @property
    def share_pct(self) -> dict[str, float]:
        """Percent of the wall time of each group."""
        return {group: 100 * seconds / self.wall_s for group, seconds in self.group_s.items()}


def break_down(trace: Path, *, on_cpu: bool) -> Breakdown:
    """The step of a trace that torch.profiler exported, which holds one step, of a CPU's operators
    or a GPU's kernels. Raises RunError where there are none."""
    events = [
        event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"
    ]
    wanted = ("cpu_op",) if on_cpu else ("kernel", "gpu_memcpy", "gpu_memset")
    found = [event for event in events if event.get("cat") in wanted]
    if not found:
        raise RunError(f"the profiler saw no events of the kind {' or '.join(wanted)}")
    began, ended = _step_span(
        events, "user_annotation" if on_cpu else "gpu_user_annotation"
    ) or _span(found)
    parts: Iterable[tuple[str, float]]
    if on_cpu:
        operators = [event for event in found if began <= event["ts"] < ended]
        parts = _own_times(operators)
        busy = [_clip(event, began, ended) for event in operators]
    else:
        timed = [(str(event["name"]), *_clip(event, began, ended)) for event in found]
        parts = ((name, stop - start) for name, start, stop in timed if stop > start)
        busy = [(start, stop) for _, start, stop in timed if stop > start]
    group_us = dict.fromkeys(GROUPS, 0.0)
    for name, microseconds in parts:
        group_us[group_of(name)] += microseconds
    group_us["idle"] = (ended - began) - covered(busy)
    return Breakdown((ended - began) / 1e6, {group: us / 1e6 for group, us in group_us.items()})


def mean_of(breakdowns: Iterable[Breakdown]) -> Breakdown:
    """A step like the mean of some. Raises RunError if there are none."""
    steps = list(breakdowns)
    if not steps:
        raise RunError("the profiler wrote no trace")
    return Breakdown(
        sum(step.wall_s for step in steps) / len(steps),
        {group: sum(step.group_s[group] for step in steps) / len(steps) for group in GROUPS},
    )


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of `intervals`."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def _step_span(events: Iterable[Mapping[str, Any]], category: str) -> tuple[float, float] | None:
    """From when to when the profiler says that the step lasted, in its microseconds; None if it
    does not say."""
    steps = [
        e for e in events if e.get("cat") == category and str(e["name"]).startswith("ProfilerStep")
    ]
    return _span(steps) if steps else None


def _span(events: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    spans = [(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events]
    return min(start for start, _ in spans), max(stop for _, stop in spans)


def _clip(event: Mapping[str, Any], began: float, ended: float) -> tuple[float, float]:
    """The part of an event that is between two moments; its stop is not after its start if there is
    none."""
    return max(began, float(event["ts"])), min(ended, float(event["ts"]) + float(event["dur"]))


def _own_times(operators: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Each operator, with the type of its first input if it multiplies, or what it is called by if
    that is the loss, and its time less that of those it called."""
    threads: dict[Any, list[Mapping[str, Any]]] = {}
    for event in operators:
        threads.setdefault(event["tid"], []).append(event)
    for events in threads.values():
        callers: list[
            tuple[float, list[Any]]
        ] = []  # the stop of each open operator, and its name and own time
        done: list[list[Any]] = []
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            while callers and callers[-1][0] <= event["ts"]:
                callers.pop()
            if callers:
                callers[-1][1][1] -= event["dur"]
            in_loss = any(LOSS_FUNCTION.match(caller[0]) for _, caller in callers)
            entry = [_name_with_type(event, in_loss=in_loss), float(event["dur"])]
            callers.append((event["ts"] + event["dur"], entry))
            done.append(entry)
        yield from ((name, own) for name, own in done)


def _name_with_type(event: Mapping[str, Any], *, in_loss: bool) -> str:
    name = str(event["name"])
    types = event.get("args", {}).get("Input type") or [""]
    if GEMM.search(name.lower()):
        return f"{name}({types[0]})" if types[0] else name
    return f"cross_entropy {name}" if in_loss else name
