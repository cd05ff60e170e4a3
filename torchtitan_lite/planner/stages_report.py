"""Format the stages of a planned pipeline as text of 80 columns."""

from collections.abc import Mapping
from textwrap import fill
from typing import Any

from torchtitan_lite.tables import format_columns

GIB = 2**30
HEADER = ("stage", "rank", "modules", "GFLOPs", "GiB", "F, ms", "B, ms", "idle")
NUMBERS = (0, 1, 3, 4, 5, 6, 7)
"""The columns that are aligned to the right."""


def format_stages(pipeline: Mapping[str, Any]) -> str:
    """Format the result of `plan_pipeline`: a row for each stage, by rank, what holds for all, and
    a faster division of the blocks, if there is one."""
    table = format_columns([HEADER, *map(_row, pipeline["stages"])], right=NUMBERS)

    # The pauses, with the share that a formula gives for equal stages.
    equal = pipeline["bubble_of_equal_stages"]
    formula = (
        "" if equal is None else f"; {equal:.1%} if stages were equal and sending took no time"
    )
    text = (
        "GFLOPs: per token. GiB: that the rank reserves at most. F and B: forward and backward of "
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
