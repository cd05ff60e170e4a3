"""Format a plan as text of 80 columns, for somebody who decides whether to pay for the run."""

import json
import math
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torchtitan_lite.base.tables import format_columns
from torchtitan_lite.metrics.flops import MATMULS

GIB = 2**30
FIGURES = (
    *("tps", "step_s", "tflops", "mfu", "mfu_bf16_peak", "mfu_fp8_peak", "mfu_arithmetic_peak"),
    *("hfu", "run_hours", "run_gpu_hours", "gpu_hours_per_trillion_tokens"),
)
SETTINGS = (
    "{layout}. Activation checkpointing {activation_checkpoint}, fsdp_reshard_after_forward "
    "{fsdp_reshard_after_forward}, attention in PyTorch's {attention_kernel} kernel."
)
ASSUMED = (
    "Of the memory on a data sheet 97.5 % can be used. Rates of kernels, links and nodes are in "
    "torchtitan_lite/planner/constants.py, with sources. Each GPU can send {link_gb_s:,g} GB/s "
    "within a node of {node_devices:,}, and {network_gb_s:,g} to other nodes (--link, "
    "--node-devices, --network). Ranges hold the middle 80 % of published runs of this kind, "
    "beside their predictions: see docs/published.md."
)
Plan = Mapping[str, Any]  # what `plan` returns, or a section of it

_wrap = partial(textwrap.fill, width=80, break_long_words=False, break_on_hyphens=False)


def format_plan(plan: Plan) -> str:
    """Format the result of `plan` section by section."""
    sections = _answer, _time, _memory, _cost, _linears, _assumed
    return "\n\n".join(section(plan) for section in sections)


def _answer(plan: Plan) -> str:
    """Return in a sentence whether the run fits, its rate, time and cost, and float8's gain."""
    request, schedule, memory = plan["request"], plan["schedule"], plan["memory"]
    rate = f"{_digits(schedule['tps'])} tokens/s per device"
    before, after = "; given: ", "; predicted: "
    if schedule["origin"] == "predicted":
        rate += " ({} to {})".format(*map(_digits, schedule["tps_range"]))
        before, after = ", " if memory["fits"] else "; if it did, ", "; "

    hours, gpu_hours, trillion = (
        _digits(schedule[name])
        for name in ("run_hours", "run_gpu_hours", "gpu_hours_per_trillion_tokens")
    )
    return _wrap(
        "{model} on {world_size} x {device}, predicted: ".format_map(request)
        + f"{_fit(plan)}{before}{rate}, {_digits(schedule['step_s'])} s a step, "
        f"{hours} hours and {gpu_hours} GPU-hours for {request['steps']:,} steps "
        f"(10^12 tokens: {trillion} GPU-hours){after}{plan['prediction']['verdict']}"
    )


def _fit(plan: Plan) -> str:
    """Return whether what is reserved fits."""
    memory, device = plan["memory"], plan["device"]["memory_gib"]
    verdict = "fits" if memory["fits"] else "does not fit"
    return f"{verdict} ({_digits(memory['reserved'] / GIB)} of {device:g} GiB)"


def _digits(value: float | None) -> str:
    """Format with three digits, or with all of those before the point."""
    if not value:
        return "n/a" if value is None else "0"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


# ----- Sections of a plan -----


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Align all columns but the first to the right. The first row is the header."""
    return format_columns(rows, right=range(1, len(rows[0])))


def _section(title: str, *parts: str) -> str:
    return "\n".join([title, "-" * len(title), *parts])


def _time(plan: Plan) -> str:
    prediction, recipe = plan["prediction"], plan["request"]["float8_recipe"]
    steps = {"bf16": prediction["bf16"]}
    steps |= {recipe: prediction["float8"]} if recipe else {}
    times = [
        {
            **step["compute_s"],
            **{f"waits: {name}": seconds for name, seconds in step["waits_s"].items()},
            "step": step["step_s"],
            "hidden: FSDP": step["hidden_s"],
        }
        for step in steps.values()
    ]
    rows = [[name, *(f"{1e3 * each[name]:,.1f}" for each in times)] for name in times[0]]
    taken = [row for row in rows if set(row[1:]) != {"0.0"}]
    return _section("Time of a step, predicted", _table([["milliseconds", *steps], *taken]))


def _memory(plan: Plan) -> str:
    memory = plan["memory"]
    sizes = memory["peak"] | {"reserved": memory["reserved"]}
    rows = [
        (name.replace("_", " "), f"{size / GIB:,.2f}")
        for name, size in sizes.items()
        if name != "name" and size
    ]
    header, note = (f"at its peak, {memory['peak']['name']}", "GiB"), _fit(plan)
    if not memory["fits"]:
        note += (
            "; use more GPUs, activation checkpointing, or a lower [training] local_batch_size or "
            "seq_len, or [optimizer] state_dtype, or try --search"
        )
    return _section("Memory of a rank, predicted", _table([header, *rows]), _wrap(note))


def _cost(plan: Plan) -> str:
    schedule, model, flops = plan["schedule"], plan["model"], plan["flops_per_token"]
    text = (
        f"mfu and hfu: percent of {_digits(schedule['effective_peak'])} TFLOPS, each matmul at its "
        f"own peak (docs/metrics.md). {model['parameters']:,} parameters and {flops['total']:,} "
        f"FLOPs a token, of which {flops['fp8']:,} in fp8. A checkpoint is "
        f"{model['checkpoint_bytes'] / GIB:,.1f} GiB over all ranks."
    )
    rows = [("", schedule["origin"]), *((name, _digits(schedule[name])) for name in FIGURES)]
    return _section(f"Cost at the {schedule['origin']} rate", _table(rows), _wrap(text))


def _linears(plan: Plan) -> str:
    rows = [("linear", "count", "M x N x K per rank", "fp8/bf16", "trained in")]
    reasons: dict[str, list[str]] = {}
    for linear in plan["linears"]:
        name, reason = linear["kind"].rpartition(".")[2], linear["kept_because"]
        in_bf16 = [f"{each} in bf16" for each in MATMULS if linear["precisions"][each] != "fp8"]
        if reason:
            reasons.setdefault(reason, []).append(name)
        trained_in = "bf16" if reason else ", ".join(["float8", *in_bf16])
        sizes = " x ".join(map(str, (linear["tokens"], *linear["local_shape"])))
        ratio = _digits(linear["time_ratio"])
        rows.append((name, str(len(linear["names"])), sizes, ratio, trained_in))

    notes = ["fp8/bf16: predicted time of three matmuls and their casts in float8, over bf16"]
    notes += [f"{', '.join(names)} in bf16: {why}" for why, names in reasons.items()]
    return _section("Linears", _table(rows), *map(_wrap, notes))


def _assumed(plan: Plan) -> str:
    """Format the settings, and where the rates come from."""
    device, notes = plan["device"], [SETTINGS.format_map(plan["request"])]
    if not device["data_sheet"]:
        name = device["name"]
        notes.append(f"No data sheet of the {name} is known: figures not given are assumed.")
    notes.append(ASSUMED.format_map(device))
    return _section("Assumed", *map(_wrap, notes))


# ----- Answer of a search -----

COLUMNS = {
    "": "{rank}",
    "PPxDPxFSDPxCPxTP": "{pp}x{dp_replicate}x{dp_shard}x{cp}x{tp}",
    "batch": "{grad_accum_steps}x{local_batch_size}x{seq_len:,}",
    "recompute": "{activation_checkpoint}",
    "recipe": "{recipe}",
    "tokens/s": "{tps:,.0f}",
    "GiB": "{reserved_gib:,.1f}",
}
NOTES = (
    "{fitting:,} configs fit in {memory_gib:g} GiB. If none of the first five is in bf16, the last "
    "one shown is the first that is. Batch: passes of a step, sequences of a pass, and tokens of "
    "each. All train on the global batch of {global_batch_size:,} sequences: to try a larger one, "
    "give --training.global_batch_size."
)


def format_search(search: Plan) -> str:
    """Format the result of `make_search`: the layouts, what holds for all, and the options that
    choose the first."""
    request, first = search["request"], search["layouts"][0]
    rows = [each | {"recipe": each["float8_recipe"] or "bf16"} for each in search["layouts"]]
    cells = [[cell.format_map(row) for cell in COLUMNS.values()] for row in rows]
    title = "Fastest layouts of {model} on {world_size} x {device}".format_map(first)
    notes = NOTES.format_map({**request, **first})
    if request["kept"]:
        notes += f" Kept as given: {', '.join(request['kept'])}."
    options = f"The first of them, as options:\n{_options(first['changes'])}"
    return "\n\n".join([_wrap(title), _table([[*COLUMNS], *cells]), _wrap(notes), options])


def _options(changes: Plan) -> str:
    """Format settings as options of training and planning, to be pasted into a shell."""
    words = []
    for name, value in changes.items():
        text = ",".join(value) if isinstance(value, tuple | list) else value
        words += [f"--{name}", shlex.quote(text) if isinstance(text, str) else json.dumps(text)]
    lines = textwrap.wrap(" ".join(words), 78, break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(lines) or "those of the config"
