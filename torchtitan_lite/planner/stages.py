"""The section of a plan about its pipeline: a row for each stage, and a better division."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from torchtitan_lite.config import resolve_stages
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.metrics.devices import DeviceSpec
from torchtitan_lite.parallel.schedules import SCHEDULES

from .meta_model import MetaModel, Workload, peak_bytes
from .pipeline import time_pipeline
from .rank import Rank
from .share import OUTPUT, blocks_of, has, share_of
from .step import OTHER_STAGES

FASTER = 1.01
"""A division of the blocks is proposed if it is at least as many times as fast."""
FIRST_LESS, LAST_LESS = "first_stage_less_layers", "last_stage_less_layers"
MOST_LESS = 4
UNDIVIDED = {"module_fqns_per_model_part": (), "pipeline_parallel_split_points": ()}


def plan_pipeline(meta: MetaModel, device: DeviceSpec, kernel: str) -> dict[str, Any] | None:
    """Return the stages and the pauses of a pipeline as plain values; None without one."""
    job, degrees, n = meta.job, meta.job.degrees, meta.job.batch.grad_accum_steps
    if degrees.pp == 1:
        return None
    name = job.config.parallelism.pipeline_parallel_schedule
    timed = time_pipeline(meta.roofline(device, kernel), meta.choices, meta.converted)
    peaks = [peak_bytes(moments) for moments in meta.rank_moments()]
    block_flops = (meta.ledger.total - meta.ledger.output) / job.model_args.n_layers

    stages = []
    for rank, index in sorted((r, i) for r in range(degrees.pp) for i in job.rank_stages(r)):
        share, step = share_of(job, [index]), timed.ranks[rank]
        flops = block_flops * len(blocks_of(share)) + meta.ledger.output * has(share, OUTPUT)
        stages.append(
            {
                "stage": index,
                "rank": rank,
                "modules": list(job.stages[index]),
                "flops_per_token": round(flops),
                "forward_s": timed.actions_s[index]["F"],
                "backward_s": timed.actions_s[index]["B"],
                "rank_reserved": round(meta.reserved_ratio * peaks[rank]),
                "rank_idle": step.idle_s[OTHER_STAGES] / step.step_s,
            }
        )

    # Equal stages pause for this share, unless passes are split (arXiv 2104.04473, section 2.2).
    passes, pauses = n * len(stages) // degrees.pp, degrees.pp - 1
    sent = Rank(job, (), on_cpu=False).residual
    return {
        "schedule": name,
        "microbatches": n,
        "stages": stages,
        "largest_rank": peaks.index(max(peaks)),
        "bubble": timed.bubble,
        "bubble_of_equal_stages": (
            None if SCHEDULES[name].zero_bubble else pauses / (passes + pauses)
        ),
        "send_bytes": sent,
        "send_s": timed.send_s,
        "sent_bytes_per_step": 2 * n * sent * len(stages) // degrees.pp,
        "faster_division": _find_faster(meta, device, kernel),
    }


def _find_faster(meta: Workload, device: DeviceSpec, kernel: str) -> dict[str, Any] | None:
    """Return how to divide the blocks so that a step is clearly faster, if that fits."""
    step_s = meta.time(device, kernel).step_s
    best = min(
        (
            (other.time(device, kernel).step_s, sum(less.values()), other, less)
            for other, less in _divisions(meta)
            if other.reserved_bytes() <= device.memory_gib * 2**30
        ),
        key=lambda each: each[:2],
        default=None,
    )
    if best is None or step_s < FASTER * best[0]:
        return None
    return {
        **best[3],
        "blocks": [
            len(blocks_of(share_of(best[2].job, [i]))) for i in range(len(best[2].job.stages))
        ],
        "speedup": step_s / best[0],
    }


def _divisions(meta: Workload) -> Iterator[tuple[Workload, dict[str, int]]]:
    """Yield the other divisions in which the ends have less blocks, and how many less."""
    seen = {meta.job.stages}
    for first, last in product(range(MOST_LESS + 1), repeat=2):
        less = {FIRST_LESS: first, LAST_LESS: last}
        values = {f"pipeline_parallel_{key}": value for key, value in less.items()}
        job = meta.job.choose("parallelism", **UNDIVIDED, **values)
        try:
            stages = resolve_stages(job.config.parallelism, n_layers=job.model_args.n_layers)
        except ConfigError:
            continue
        if stages not in seen and len(stages) == len(meta.job.stages):
            seen.add(stages)
            yield replace(meta, job=replace(job, stages=stages)), less
