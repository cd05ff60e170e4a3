"""The pipeline in a plan: a row for each stage, and a better division of the blocks."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from textwrap import fill
from typing import Any

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.tables import format_columns
from torchtitan_lite.catalog.flavors import OUTPUT
from torchtitan_lite.config import resolve_stages
from torchtitan_lite.metrics.flops import FlopsLedger

from .pipeline_time import time_pipeline
from .rank import blocks_of
from .roofline import Roofline
from .step import OTHER_STAGES
from .workload import Workload, peak_bytes

FASTER = 1.01
"""A division of the blocks is proposed if it is at least as many times as fast."""
MOST_LESS = 4
GIB = 2**30
HEADER = ("stage", "rank", "modules", "GFLOPs", "GiB", "F, ms", "B, ms", "idle")
UNDIVIDED = {"module_fqns_per_model_part": (), "pipeline_parallel_split_points": ()}


def plan_pipeline(work: Workload, ledger: FlopsLedger, roofline: Roofline) -> dict[str, Any] | None:
    """Return the stages and the pauses of a pipeline as plain values; None without one."""
    job, degrees, n = work.job, work.job.degrees, work.job.batch.grad_accum_steps
    if degrees.pp == 1:
        return None
    name = job.config.parallelism.pipeline_parallel_schedule
    timed = time_pipeline(roofline, work.choices, work.converted)
    idle = [step.idle_s[OTHER_STAGES] / step.step_s for step in timed.ranks]
    peaks = [peak_bytes(moments) for moments in work.rank_moments()]
    block_flops = (ledger.total - ledger.output) / job.model_args.n_layers

    stages = []
    for rank, index in sorted((r, i) for r in range(degrees.pp) for i in job.rank_stages(r)):
        names = job.stages[index]
        flops = block_flops * len(blocks_of((names,)))
        flops += ledger.output if OUTPUT in names else 0
        stages.append(
            {
                "stage": index,
                "rank": rank,
                "modules": list(names),
                "flops_per_token": round(flops),
                "forward_s": timed.actions_s[index]["F"],
                "backward_s": timed.actions_s[index]["B"],
                "rank_reserved": round(work.reserved_ratio * peaks[rank]),
                "rank_idle": idle[rank],
            }
        )

    # Equal stages pause for this share (arXiv 2104.04473, section 2.2).
    passes, pauses = n * len(stages) // degrees.pp, degrees.pp - 1
    return {
        "schedule": name,
        "microbatches": n,
        "stages": stages,
        "largest_rank": peaks.index(max(peaks)),
        "bubble": sum(idle) / len(idle),
        "bubble_of_equal_stages": pauses / (passes + pauses),
        "send_bytes": timed.send_bytes,
        "send_s": timed.send_s,
        "sent_bytes_per_step": 2 * n * timed.send_bytes * len(stages) // degrees.pp,
        "faster_division": _find_faster(work, roofline),
    }


def _find_faster(work: Workload, roofline: Roofline) -> dict[str, Any] | None:
    """Return how to divide the blocks so that a step is clearly faster, if that fits."""
    device, kernel = roofline.device, roofline.attention_kernel
    fitting = [
        (other.time(device, kernel).step_s, sum(less.values()), other.job, less)
        for other, less in _divisions(work)
        if other.reserved_gib() <= device.memory_gib
    ]
    step_s = work.time(device, kernel).step_s
    best_s, _, job, less = min(fitting, key=lambda each: each[:2], default=(step_s, 0, None, {}))
    if job is None or step_s < FASTER * best_s:
        return None
    blocks = [len(blocks_of((stage,))) for stage in job.stages]
    return {**less, "blocks": blocks, "speedup": step_s / best_s}


def _divisions(work: Workload) -> Iterator[tuple[Workload, dict[str, int]]]:
    """Yield the other divisions in which the ends have less blocks, and how many less."""
    seen = {work.job.stages}
    for first, last in product(range(MOST_LESS + 1), repeat=2):
        less = {"first_stage_less_layers": first, "last_stage_less_layers": last}
        values = {f"pipeline_parallel_{key}": value for key, value in less.items()}
        job = work.job.choose("parallelism", **UNDIVIDED, **values)
        try:
            stages = resolve_stages(job.config.parallelism, n_layers=job.model_args.n_layers)
        except ConfigError:
            continue
        if stages not in seen and len(stages) == len(work.job.stages):
            seen.add(stages)
            yield replace(work, job=replace(job, stages=stages)), less


def format_stages(pipeline: Mapping[str, Any]) -> str:
    """Format the result of `plan_pipeline`: a row for each stage, by rank, what holds for all, and
    a faster division of the blocks, if there is one."""
    table = format_columns([HEADER, *map(_row, pipeline["stages"])], right=(0, 1, 3, 4, 5, 6, 7))

    # The pauses, with the share that a formula gives for equal stages.
    equal = pipeline["bubble_of_equal_stages"]
    formula = (
        "" if equal is None else f"; {equal:.1%} if stages were equal and sending took no time"
    )
    text = (
        "GFLOPs: per token. GiB: that the rank reserves. F and B: forward and backward of "
        "a microbatch. Idle: part of the step in which the rank waits for others, on average "
        f"{pipeline['bubble']:.1%} with {pipeline['microbatches']} microbatches in "
        f"{pipeline['schedule']}{formula}. A rank sends "
        f"{pipeline['sent_bytes_per_step'] / GIB:,.1f} GiB a step to its neighbours, "
        f"{1e3 * pipeline['send_s']:.2f} ms for each microbatch and pass. Rank "
        f"{pipeline['largest_rank']} needs the most memory."
    )

    parts = [table, fill(text, 80, break_on_hyphens=False)]
    if faster := pipeline["faster_division"]:
        keys = " ".join(
            f"--parallelism.pipeline_parallel_{key} {value}"
            for key, value in faster.items()
            if key.endswith("less_layers")
        )
        blocks = ", ".join(map(str, faster["blocks"]))
        proposal = f"{faster['speedup']:.2f}x as fast: {blocks} blocks, by {keys}"
        parts.append(fill(proposal, 80, break_on_hyphens=False))
    return "\n".join(parts)


def _row(stage: Mapping[str, Any]) -> tuple[str, ...]:
    first, last = stage["modules"][0], stage["modules"][-1]
    return (
        str(stage["stage"]),
        str(stage["rank"]),
        f"{first} to {last}" if first != last else first,
        f"{stage['flops_per_token'] / 1e9:,.2f}",
        f"{stage['rank_reserved'] / GIB:,.1f}",
        *(f"{1e3 * stage[key]:,.1f}" for key in ("forward_s", "backward_s")),
        f"{stage['rank_idle']:.1%}",
    )
