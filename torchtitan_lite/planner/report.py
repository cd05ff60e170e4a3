"""Format a plan as text of 80 columns, for somebody who decides whether to pay for the run."""

import json
import math
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torchtitan_lite.base.tables import format_columns
from torchtitan_lite.metrics.flops import MATMULS

GIB = 2**30
UNITS = {"days": 1, "hours": 24, "minutes": 24 * 60, "seconds": 24 * 3600}  # in a day
UTILISATIONS = {
    "mfu": ("effective", ", each matmul at its own peak"),
    "mfu_bf16_peak": ("bf16", ""),
    "mfu_fp8_peak": ("fp8", ""),
    "mfu_arithmetic_peak": ("arithmetic", ""),
    "hfu": ("effective", ", with what is recomputed"),
}
"""The peak by which each is divided, and a note."""
ASSUMED = (
    "Rates of kernels, links and nodes are in torchtitan_lite/planner/constants.py, with sources: "
    "to replace them, measure with scripts/gpu_day.sh and give its file (--measured). Each GPU can "
    "send {link_gb_s:,g} GB/s within a node of {node_devices:,}, and {network_gb_s:,g} to other "
    "nodes (--link, --node-devices, --network). Attention runs in PyTorch's {attention_kernel} "
    "kernel. Ranges hold the middle 80 % of published runs of this kind, beside "
    "their predictions: see docs/published.md."
)
Plan = Mapping[str, Any]
"""What `make_plan` returns, or a section of it."""

_wrap = partial(textwrap.fill, width=80, break_long_words=False, break_on_hyphens=False)


def format_plan(plan: Plan) -> str:
    """Format the result of `make_plan`: the answer, then section by section."""
    prediction, schedule = plan["prediction"], plan["schedule"]
    off = prediction["recipe"] if not plan["request"]["float8_recipe"] else None
    linears = f"Linears if {off} float8 were on" if off else "Linears"
    sections = {
        "Run": _run(plan["request"]),
        "Time of a step, predicted": _time(prediction, ", if on" if off else ""),
        "Memory of a rank, predicted": _memory(plan["memory"]),
        f"Cost at the {schedule['origin']} rate": _cost(schedule),
        linears: _linears(plan["linears"]),
        f"MFU at the {schedule['origin']} rate": _mfu(plan),
        "Assumed": _assumed(plan),
    }
    titled = (f"{title}\n{'-' * len(title)}\n{text}" for title, text in sections.items())
    return "\n\n".join([format_answer(plan), *titled])


def format_answer(plan: Plan) -> str:
    """Return in a sentence whether the run fits, its rate, time and cost, and float8's gain."""
    request, schedule, memory = plan["request"], plan["schedule"], plan["memory"]
    rate = f"{_digits(schedule['tps'])} tokens/s per device"
    before, after = "; given: ", "; predicted: "
    if schedule["origin"] == "predicted":
        rate += " ({} to {})".format(*map(_digits, schedule["tps_range"]))
        before, after = ", " if memory["fits"] else "; if it did, ", "; "

    # The largest unit that is not a fraction, and the verdict without its advice.
    durations = {unit: schedule["run_days"] * size for unit, size in UNITS.items()}
    unit = next((each for each in durations if durations[each] >= 2), "seconds")
    gain, _, _ = plan["prediction"]["verdict"].rstrip(".").partition(";")
    days, hours = (
        _digits(schedule[f"{each}_per_trillion_tokens"]) for each in ("days", "gpu_hours")
    )
    return _wrap(
        "{model} on {world_size} x {device}, predicted: ".format_map(request)
        + f"{_fit(memory)}{before}{rate}, {_digits(schedule['step_s'])} s a step, "
        f"{_digits(durations[unit])} {unit} and {_digits(schedule['run_gpu_hours'])} GPU-hours for "
        f"{request['steps']:,} steps (10^12 tokens: {days} days, {hours} GPU-hours){after}{gain}."
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, notes: bool = False) -> str:
    """Align all columns but the first to the right; the last one not, if it has `notes`."""
    end = len(header) - 1 if notes else len(header)
    return format_columns([header, *rows], right=range(1, end))


def _number(value: float | None, form: str = ",.2f") -> str:
    return "n/a" if value is None else format(value, form)


def _digits(value: float) -> str:
    """Format with three digits, or with all of those before the point."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


def _run(request: Plan) -> str:
    degrees = " x ".join(
        f"{name} {request[name]}"
        for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        if request[name] > 1 or name not in ("pp", "cp")
    )
    group = "each rank" if request["cp"] == 1 else f"every {request['cp']} ranks"
    seq_len, compiled = f"{request['seq_len']:,}", "on" if request["compile"] else "off"

    # What the figures do not cover stands beside the setting.
    recipe, checkpointing = request["float8_recipe"], request["activation_checkpoint"]
    gather = " with float8 all-gather" if recipe and request["float8_all_gather"] else ""
    if checkpointing == "memory_budget":
        checkpointing += " (the time of what it recomputes is not counted)"
    mask = ", document mask (attention counts as if documents were one)"
    return _wrap(
        f"{degrees}; {request['global_batch_size']} x {seq_len} tokens a step, "
        f"{request['local_batch_size']} x {seq_len} at a time on {group}; "
        f"float8 {recipe or 'off'}{gather}, activation checkpointing {checkpointing}, "
        f"compile {compiled}, fsdp_reshard_after_forward {request['fsdp_reshard_after_forward']}"
        f"{mask if request['document_mask'] else ''}"
    )


def _time(prediction: Plan, note: str) -> str:
    steps = [prediction[name] for name in ("bf16", "float8") if prediction[name]]

    def row(name: str, seconds: Sequence[float]) -> list[str]:
        return [name, *(f"{1e3 * each:,.1f}" for each in seconds)]

    rows = []
    for key, prefix in (("compute_s", ""), ("waits_s", "waits: ")):
        times = {part: [step[key][part] for step in steps] for part in steps[0][key]}
        rows += [row(prefix + part, seconds) for part, seconds in times.items() if any(seconds)]
    rows.append(row("step", [step["step_s"] for step in steps]))
    rows.append(row("hidden: FSDP", [step["hidden_s"] for step in steps]))
    return _table(("milliseconds", "bf16", f"{prediction['recipe']}{note}")[: len(steps) + 1], rows)


def _fit(memory: Plan) -> str:
    """Whether what is reserved fits, or at least the peak."""
    peak, reserved, device = (
        size / GIB for size in (memory["peak"]["total"], memory["reserved"], memory["device_bytes"])
    )
    if memory["fits"]:
        return f"fits ({_digits(reserved)} of {device:g} GiB)"
    if peak <= device:
        return f"tight ({_digits(peak)} to {_digits(reserved)} of {device:g} GiB)"
    return f"does not fit ({_digits(peak)} of {device:g} GiB)"


def _memory(memory: Plan) -> str:
    rows = [
        (name.replace("_", " "), f"{size / GIB:,.2f}", "")
        for name, size in memory["peak"].items()
        if name != "name" and size
    ]
    rows.append(("reserved", f"{memory['reserved'] / GIB:,.2f}", _fit(memory)))
    table = _table(("GiB", "", f"at its peak, {memory['peak']['name']}"), rows, notes=True)
    if memory["fits"]:
        return table
    gpus, full = memory["would_fit"], "activation checkpointing full"
    fewest = f"{gpus:,} GPUs with {full}" if gpus else f"no number of GPUs, with {full} either"
    advice = f"would fit: {fewest}; or lower [training] local_batch_size or seq_len, or --search"
    return f"{table}\n{_wrap(advice)}"


def _cost(schedule: Plan) -> str:
    """Rate, time and cost at the predicted rate and at both ends of its range, or at the given
    one."""
    rates = {schedule["origin"]: schedule["tps"]}
    if schedule["tps_range"]:
        rates |= dict(zip(("slow", "fast"), schedule["tps_range"], strict=True))
    figures = {
        "a step, seconds": schedule["step_s"],
        "this run, hours": 24 * schedule["run_days"],
        "this run, GPU-hours": schedule["run_gpu_hours"],
        "10^12 tokens, days": schedule["days_per_trillion_tokens"],
        "10^12 tokens, GPU-hours": schedule["gpu_hours_per_trillion_tokens"],
    }
    rows = [["tokens/s per device", *map(_digits, rates.values())]]
    for name, value in figures.items():
        rows.append([name, *(_digits(value * schedule["tps"] / rate) for rate in rates.values())])
    text = (
        f"This run trains {schedule['run_tokens']:.3g} tokens. A checkpoint is "
        f"{schedule['checkpoint_bytes'] / GIB:,.1f} GiB over all ranks."
    )
    return f"{_table(('', *rates), rows)}\n{_wrap(text)}"


def _linears(linears: Sequence[Plan]) -> str:
    def trained_in(row: Plan) -> str:
        kept = [name for name in MATMULS if row["precisions"][name] != "fp8"]
        if not row["converted"]:
            return row["precisions"]["output"]
        return "float8" + (f", {', '.join(kept)} in bf16" if kept else "")

    rows = [
        (
            _short(row["kind"]),
            str(row["count"]),
            "{m} x {n} x {k}".format_map(row),
            _number(row["time_ratio"]),
            trained_in(row),
        )
        for row in linears
    ]
    header = ("linear", "count", "M x N x K per rank", "fp8/bf16", "trained in")
    notes = ["fp8/bf16: predicted time of three matmuls and their casts in float8, over bf16"]
    for reason in dict.fromkeys(row["kept_because"] for row in linears if not row["converted"]):
        kinds = (_short(row["kind"]) for row in linears if row["kept_because"] == reason)
        notes.append(f"{', '.join(kinds)} in bf16: {reason}")
    return "\n".join([_table(header, rows, notes=True), *map(_wrap, notes)])


def _short(kind: str) -> str:
    return kind.rpartition(".")[2]


def _mfu(plan: Plan) -> str:
    schedule, peaks = plan["schedule"], plan["peaks"]
    rows = [
        (name, _number(schedule[name]), f"of {_number(peaks[peak], '.1f')} TFLOPS{note}")
        for name, (peak, note) in UTILISATIONS.items()
    ]
    header = ("percent", "", f"at {schedule['tflops']:,.2f} TFLOPS per device")
    counted = (
        f"{plan['model']['parameters']:,} parameters, {plan['flops_per_token']['total']:,} FLOPs a "
        f"token, of which {plan['flops_per_token']['fp8']:,} in fp8."
    )
    return f"{_table(header, rows, notes=True)}\n{_wrap(counted)}"


def _assumed(plan: Plan) -> str:
    lines = []
    if not plan["peaks"]["data_sheet"]:
        device = plan["request"]["device"]
        lines.append(f"No data sheet of the {device} is known: figures not given are assumed.")
    lines.append(ASSUMED.format_map(plan["request"]))
    if plan["measured"]:
        values = ", ".join("{name} {value:.3g}".format_map(each) for each in plan["measured"])
        lines.append(f"Not published, but {plan['measured'][0]['source']}: {values}.")
    return "\n".join(map(_wrap, lines))


# ----- Answers of a search -----

LAYOUT = {
    "DP x FSDP x CP x TP": "{dp_replicate} x {dp_shard} x {cp} x {tp}",
    "passes x batch": "{grad_accum_steps} x {local_batch_size}",
    "recompute": "{activation_checkpoint}",
    "recipe": "{recipe}",
}
FIGURES = {
    "tokens/s": "{tps:,.0f}",
    "between": "{tps_range[0]:,.0f} to {tps_range[1]:,.0f}",
    "GiB": "{reserved_gib:,.1f}",
    "waits": "{waits_pct:.0f} %",
    "days": "{days_per_trillion_tokens:,.1f}",
    "GPU-hours": "{gpu_hours_per_trillion_tokens:,.0f}",
}
NOTES = (
    "{fitting:,} configs fit in {memory_gib:g} GiB, the last one shown is the fastest in bf16. All "
    "train on {global_batch_size:,} sequences of {seq_len:,} tokens in a step. Between: the middle "
    "80 % of published runs beside their predictions (docs/published.md). Waits: the part of the "
    "step in which the device waits. Days, GPU-hours and cost: for 10^12 tokens."
)


def _rows(columns: Mapping[str, str], rows: Iterable[Plan], *, left: Sequence[int] = ()) -> str:
    """Format a table from the template of each column's cells, by its heading."""
    cells = [[template.format_map(row) for template in columns.values()] for row in rows]
    return format_columns([list(columns), *cells], right={*range(len(columns))} - {*left})


def format_search(search: Plan) -> str:
    """Format the result of `make_search`: the layouts, what holds for all, and the options that
    choose the first."""
    request, layouts, first = search["request"], search["layouts"], {"": "{rank}"}
    rows = [each | {"recipe": each["float8_recipe"] or "bf16"} for each in layouts]
    layout, figures = first | LAYOUT, first | FIGURES
    if layouts[0]["pp"] > 1:
        layout |= {"PP": "{pp}", "schedule": "{pipeline_schedule}"}
    if layouts[0]["cost_per_trillion_tokens"] is not None:
        figures |= {"cost": "{cost_per_trillion_tokens:,.0f}"}
    kept = f" Kept as given: {', '.join(request['kept'])}." if request["kept"] else ""
    parts = [
        _wrap("Fastest layouts of {model} on {world_size} x {device}".format_map(request)),
        _rows(layout, rows, left=range(1, len(layout))),
        _rows(figures, rows),
        _wrap(NOTES.format_map(request) + kept),
        _options(layouts[0]["changes"]),
    ]
    return "\n\n".join(parts)


def _options(changes: Plan) -> str:
    """Format settings as options of training and planning, to be pasted into a shell."""
    words = []
    for name, value in changes.items():
        text = ",".join(value) if isinstance(value, tuple | list) else value
        words += [f"--{name}", shlex.quote(text) if isinstance(text, str) else json.dumps(text)]
    lines = textwrap.wrap(" ".join(words), 78, break_long_words=False, break_on_hyphens=False)
    return "The first of them, as options:\n" + (" \\\n".join(lines) or "those of the config")


def format_longest(answer: Plan) -> str:
    """Format the result of `make_longest`."""
    columns = {"cp": "{cp}", "tokens": "{seq_len:,}"} | LAYOUT | FIGURES
    for name in ("passes x batch", "recipe", "between", "days", "GPU-hours"):
        del columns[name]
    found = [each for each in answer["lengths"] if each["left_out"] is None]
    left_out = [each for each in answer["lengths"] if each["left_out"] is not None]
    title = _wrap(
        "Longest sequences of {model} on {world_size} x {device}".format_map(answer["request"])
    )
    notes = (
        "One sequence at a time on the cp ranks that share it, other keys as in the config, up to "
        "{limit:,} tokens. GiB: reserved, of {memory_gib:g}. Tokens/s: per device."
    ).format_map(answer["request"])
    reasons = [_wrap("cp {cp} is left out: {left_out}".format_map(each)) for each in left_out]
    return "\n\n".join([title, _rows(columns, found, left=(2, 3)), _wrap(notes), *reasons])
