"""Find the longest sequences that fit, by the number of ranks that share each."""

import math
from bisect import bisect_left
from collections.abc import Mapping
from functools import cache
from textwrap import fill
from typing import Any

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.config import resolve_model, sequence_parts

from .search import CP, GLOBAL, LOCAL, SHARD, Candidate, Space, figures_of, try_config
from .search_report import format_rows

DEGREES = (1, 2, 4, 8, 16)
STEP = 1024
"""Lengths are multiples of it, and of what the degrees divide."""
MOST = 2**20
"""The longest length where the model has no limit."""
SEQ_LEN = "training.seq_len"
REPLACED = {SHARD: -1, LOCAL: 1, GLOBAL: -1}
"""Values of keys whose own the answer ignores."""
START = tuple(f"--{name}={value}" for name, value in ({CP: 1, SEQ_LEN: STEP} | REPLACED).items())
"""Overrides for a config that is loaded for this answer, so that no ignored value is refused."""


def make_longest(space: Space) -> dict[str, Any]:
    """Return for each of DEGREES of context parallelism the longest `seq_len` that fits, as plain
    values for JSON, or the reason for none. Each group of ranks trains one sequence at a time:
    data_parallel_shard_degree and the batch sizes follow from that. Other keys are the config's.

    Raises ConfigError if there is no length for any degree."""
    limit = min(resolve_model(space.config.model).max_seq_len, MOST)

    # A degree that cannot be planned is left out, with the reason.
    lengths: list[dict[str, Any]] = []
    for cp in DEGREES:
        try:
            longest = _longest(space, cp, limit)
        except ConfigError as error:
            lengths.append({"cp": cp, "left_out": str(error)})
            continue
        seq_len = longest.work.job.config.training.seq_len
        found = {"cp": cp, "left_out": None, "seq_len": seq_len}
        lengths.append(found | figures_of(longest, space, None))
        model_name = longest.work.job.model_name
    if not any("seq_len" in each for each in lengths):
        raise ConfigError("\n".join(f"cp {each['cp']}: {each['left_out']}" for each in lengths))
    return {
        "request": {
            "model": model_name,
            "device": space.device.name,
            "world_size": space.world_size,
            "memory_gib": space.device.memory_gib,
            "limit": limit,
        },
        "lengths": lengths,
    }


def _longest(space: Space, cp: int, limit: int) -> Candidate:
    """Return the longest config with `cp` that fits. Raises ConfigError if none does."""
    settings = space.unchanged | {CP: cp} | REPLACED
    tp = space.config.parallelism.tensor_parallel_degree
    step = math.lcm(STEP, sequence_parts(cp=cp, tp=tp))
    lengths = range(step, max(limit, step) + 1, step)

    @cache  # the bisection plans its answer too
    def plan(seq_len: int) -> Candidate:
        return try_config(space, settings | {SEQ_LEN: seq_len})

    # Memory grows with the length: from some length on, none fits.
    fitting = bisect_left(lengths, True, key=lambda seq_len: plan(seq_len).step_s == math.inf)
    if not fitting:
        needs = f"{plan(step).reserved_gib:,.1f} of {space.device.memory_gib:g} GiB"
        raise ConfigError(f"even {step:,} tokens do not fit: {needs}")
    return plan(lengths[fitting - 1])


def format_longest(answer: Mapping[str, Any]) -> str:
    """Format the result of `make_longest` as text for a terminal of 80 columns."""
    request = answer["request"]

    # A row for each degree that was planned; a note for each other one.
    columns = {
        "cp": "{cp}",
        "tokens": "{seq_len:,}",
        "replicate x shard x TP": "{dp_replicate} x {dp_shard} x {tp}",
        "recompute": "{activation_checkpoint}",
        "GiB": "{reserved_gib:,.1f}",
        "tokens/s": "{tps:,.0f}",
        "waits": "{exposed_pct:.0f} %",
    }
    lengths = answer["lengths"]
    rows = [each for each in lengths if each["left_out"] is None]
    left_out = [
        "cp {cp} is left out: {left_out}".format_map(each)
        for each in lengths
        if each["left_out"] is not None
    ]

    # The table between its title and what it means.
    title = "Longest sequences of {model} on {world_size} x {device}".format_map(request)
    notes = (
        "One sequence at a time on the cp ranks that share it, one microbatch a step; other keys "
        "as in the config. Up to {limit:,} tokens, in multiples of 1,024. GiB: reserved, of "
        "{memory_gib:g}. Tokens/s: per device."
    ).format_map(request)
    table = format_rows(columns, rows, right=(0, 1, 4, 5, 6))
    return "\n\n".join([title, table, *(fill(each, 80) for each in (notes, *left_out))])
