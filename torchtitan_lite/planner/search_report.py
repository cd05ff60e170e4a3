"""Format the answer of a search as text for a terminal of 80 columns."""

import json
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from textwrap import fill, wrap
from typing import Any

from torchtitan_lite.base.tables import format_columns
from torchtitan_lite.float8.selection import AUTO

from .search import SHOWN

Layout = Mapping[str, Any]
"""One of the layouts that `make_search` returns."""


def format_rows(
    columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]], *, right: Collection[int]
) -> str:
    """Format a table from the template of each column's cells, by its heading."""
    cells = [[template.format_map(row) for template in columns.values()] for row in rows]
    return format_columns([list(columns), *cells], right=right)


def format_search(search: Mapping[str, Any]) -> str:
    """Format the result of `make_search`: the fastest layout in a sentence, the table, what holds
    for all, and the options that choose the first."""
    request, layouts = search["request"], search["layouts"]
    return "\n\n".join(
        [
            "\n".join(fill(line, 80) for line in _answer(request, layouts[0])),
            _settings(layouts),
            _figures(layouts),
            fill(_notes(request, layouts[-1]), 80, break_on_hyphens=False),
            _options(layouts[0]["changes"]),
        ]
    )


def _answer(request: Mapping[str, Any], best: Layout) -> tuple[str, str]:
    """Return the figure and the layout of the fastest in a line each."""
    where = "{model} on {world_size} x {device}".format_map(request)
    context = f"CP {request['cp']} x " if request["cp"] > 1 else ""
    pipeline = "PP {pp} ({pipeline_schedule}) x ".format_map(best) if best["pp"] > 1 else ""
    layout = (
        pipeline
        + f"replicate {{dp_replicate}} x shard {{dp_shard}} x {context}TP {{tp}}".format_map(best)
    )
    microbatch = f"microbatch {best['local_batch_size']}"
    if (passes := best["grad_accum_steps"]) > 1:
        microbatch = f"{passes} passes x {microbatch}"
    kept = " ".join(kind.rpartition(".")[2] for kind in best["kept_in_bf16"])
    if kept and best["float8_recipe"]:
        microbatch += f", {kept} in bf16"
    return (
        f"{where}: {best['tps']:,.0f} tokens/s per device with {_recipe(best)},",
        f"{layout}, {microbatch}, activation checkpointing {best['activation_checkpoint']}.",
    )


def _settings(layouts: Sequence[Layout]) -> str:
    axes, sizes = "replicate x shard x TP", "{dp_replicate} x {dp_shard} x {tp}"
    if any(layout["pp"] > 1 for layout in layouts):
        axes, sizes = f"PP x {axes}", f"{{pp}} x {sizes}"
    columns = {
        "": "{rank}",
        axes: sizes,
        "passes x batch": "{grad_accum_steps} x {local_batch_size}",
        "recompute": "{activation_checkpoint}",
        "recipe": "{recipe}",
    }
    rows = [{**layout, "recipe": _recipe(layout)} for layout in layouts]
    return format_rows(columns, rows, right=[0])


def _recipe(layout: Layout) -> str:
    """Name the recipe, and what chooses its linears if that is the planner."""
    if layout["float8_recipe"] is None:
        return "bf16"
    chosen = ", auto" if AUTO in layout["filter_fqns"] else ""
    return f"{layout['float8_recipe']}{chosen}"


def _figures(layouts: Sequence[Layout]) -> str:
    columns = {
        "": "{rank}",
        "tokens/s": "{tps:,.0f}",
        "between": "{tps_band[0]:,.0f} to {tps_band[1]:,.0f}",
        "GiB": "{reserved_gib:,.1f}",
        "waits": "{exposed_pct:.0f} %",
        "days": "{days_per_trillion_tokens:,.1f}",
        "GPU-hours": "{gpu_hours_per_trillion_tokens:,.0f}",
    }
    if layouts[0]["cost_per_trillion_tokens"] is not None:
        columns["cost"] = "{cost_per_trillion_tokens:,.0f}"
    return format_rows(columns, layouts, right=range(len(columns)))


def _notes(request: Mapping[str, Any], last: Layout) -> str:
    batch = "{global_batch_size:,} sequences of {seq_len:,} tokens in a step".format_map(request)
    if not request["global_batch_size_given"]:
        batch += ", as the config does; --training.global_batch_size sets another number"
    beyond = f"Number {last['rank']} is the fastest in bf16. " if last["rank"] > SHOWN else ""
    kept = f" Kept as given: {', '.join(request['kept'])}." if request["kept"] else ""
    return (
        "{fitting:,} configs fit in {memory_gib:g} GiB. ".format_map(request)
        + f"{beyond}All train on {batch}. Between: what uncertain constants leave open. Waits: the "
        "part of the step in which the device waits for communication. Days, GPU-hours and cost: "
        "for 10^12 tokens. Published runs were mostly slower than predicted: see "
        f"docs/published.md.{kept}"
    )


def _options(changes: Mapping[str, Any]) -> str:
    """Format settings as options of training and planning, to be pasted into a shell."""
    if not changes:
        return "The config is the first of them."
    words = []
    for name, value in changes.items():
        text = ",".join(value) if isinstance(value, tuple | list) else value
        words += [f"--{name}", shlex.quote(text) if isinstance(text, str) else json.dumps(text)]
    lines = wrap(" ".join(words), 78, break_long_words=False, break_on_hyphens=False)
    return "The first of them, as options:\n" + " \\\n".join(lines)
