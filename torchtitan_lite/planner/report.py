"""Format a plan as text of 80 columns, for somebody who decides whether to pay for the run."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torchtitan_lite.base.tables import format_columns
from torchtitan_lite.metrics.flops import MATMULS

from .pipeline_report import format_stages

GIB = 2**30
FLOPS_PARTS = ("block_linears", "output", "attention")
UNITS = {"days": 1, "hours": 24, "minutes": 24 * 60, "seconds": 24 * 3600}  # in a day
TRIAL_TOKENS = 1e10  # of a run that is too short to be what is paid for
UTILISATIONS = {
    "mfu": ("effective", ", each matmul at its own peak"),
    "mfu_bf16_peak": ("bf16", ""),
    "mfu_fp8_peak": ("fp8", ""),
    "mfu_arithmetic_peak": ("arithmetic", ""),
    "hfu": ("effective", ", with what is recomputed"),
}
"""The peak by which each is divided, and a note."""
STEP_PARTS = {
    "device_parts_s": "",
    "exposed_s": "exposed: ",
    "slowed_s": "slowed: ",
    "idle_s": "idle: ",
}
"""What a step consists of, unless the host is slower, and what its rows begin with."""
LEGEND = {
    "fsdp copies": "copies of weights and gradients in other types",
    "exposed": "communication that the device waits for",
    "slowed": "how much longer computation takes",
    "idle": "waiting for computation of other ranks",
    "hidden": "communication during computation, which costs no time itself",
    "host": "the CPU's time to launch the kernels",
}
UNKNOWN_DEVICE = (
    "No data sheet of the {device} is known: its multiprocessors are assumed, and its links and "
    "nodes unless they are given."
)
LINKS = (
    "GB/s: what large collectives reach. Each GPU can send {link_gb_s:,g} within a node of "
    "{node_devices:,}, and {network_gb_s:,g} between nodes, where a ring uses the network of all "
    "its GPUs in a node (--link, --node-devices, --network)."
)
UNCERTAIN = (
    "The ranges above come from these alone. Published runs were mostly slower than predicted: see "
    "docs/published.md. To replace values, measure them with scripts/gpu_day.sh and give its file "
    "(--measured). --tps replaces the predicted rate by that of a short run."
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
        "Run": _run(plan["request"], prediction["converted"]),
        "Time of a step, predicted": _time(prediction, ", if on" if off else ""),
        "Memory of a rank, predicted": _memory(plan["memory"]),
        **({"Stages of the pipeline": format_stages(plan["pipeline"])} if plan["pipeline"] else {}),
        f"Cost at the {schedule['origin']} rate": _cost(schedule),
        linears: _linears(plan["linears"], prediction["better_kept"]),
        "Model": _model(plan["model"], plan["flops_per_token"]),
        f"MFU at the {schedule['origin']} rate": _mfu(schedule, plan["peaks"]),
        "Assumed": _assumed(plan),
    }
    titled = (f"{title}\n{'-' * len(title)}\n{text}" for title, text in sections.items())
    return "\n\n".join([format_answer(plan), *titled])


def format_answer(plan: Plan) -> str:
    """Return in a sentence whether the run fits, its rate, time and cost, and float8's gain."""
    request, schedule = plan["request"], plan["schedule"]
    fits, fit = _fit(plan["memory"])

    # Say at each change what is predicted and what is given.
    rate = f"{_digits(schedule['tps'])} tokens/s per device"
    before, after = "; given: ", "; predicted: "
    if schedule["origin"] == "predicted":
        rate += " ({} to {})".format(*map(_digits, schedule["tps_band"]))
        before, after = ", " if fits else "; if it did, ", "; "

    # The largest unit that is not a fraction, and the verdict without its advice.
    durations = {unit: schedule["run_days"] * size for unit, size in UNITS.items()}
    unit = next((each for each in durations if durations[each] >= 2), "seconds")
    gain, _, _ = plan["prediction"]["verdict"].rstrip(".").partition(";")

    cost = f"{_digits(durations[unit])} {unit} and {_digits(schedule['run_gpu_hours'])} GPU-hours"
    trillion = ""
    if schedule["run_tokens"] < TRIAL_TOKENS:
        days, hours = (schedule[f"{each}_per_trillion_tokens"] for each in ("days", "gpu_hours"))
        trillion = f" (10^12 tokens: {_digits(days)} days and {_digits(hours)} GPU-hours)"
    return _wrap(
        "{model} on {world_size} x {device}, predicted: ".format_map(request)
        + f"{fit}{before}{rate}, {_digits(schedule['step_s'])} s a step, {cost} for "
        f"{request['steps']:,} steps{trillion}{after}{gain}."
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


def _run(request: Plan, converted: Sequence[str]) -> str:
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
    if recipe and not converted:
        gather = " with every linear in bf16"
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

    def rows(key: str, prefix: str) -> list[list[str]]:
        times = {kind: [step[key][kind] for step in steps] for kind in steps[0][key]}
        return [row(prefix + kind, seconds) for kind, seconds in times.items() if any(seconds)]

    device_s = [sum(sum(step[key].values()) for key in STEP_PARTS) for step in steps]
    waits = [step["step_s"] - each for step, each in zip(steps, device_s, strict=True)]
    table = [
        *(row for key, prefix in STEP_PARTS.items() for row in rows(key, prefix)),
        *([row("waits for the host", waits)] if max(waits) > 5e-5 else []),
        row("step", [step["step_s"] for step in steps]),
        *rows("hidden_s", "beside it, hidden: "),
        row("beside it, host", [step["host_s"] for step in steps]),
    ]
    header = ("milliseconds", "bf16", f"{prediction['recipe']}{note}")[: len(steps) + 1]
    names = " ".join(name for name, *_ in table)
    legend = "; ".join(f"{word}: {text}" for word, text in LEGEND.items() if word in names)
    return f"{_table(header, table)}\n{_wrap(legend)}"


def _fit(memory: Plan) -> tuple[bool, str]:
    """Whether the peak fits, and how well."""
    peak, reserved, device = (
        size / GIB for size in (memory["peak"]["total"], memory["reserved"], memory["device_bytes"])
    )
    if memory["fits"]:
        return True, f"fits ({_digits(reserved)} of {device:g} GiB)"
    if peak <= device:
        return True, f"tight ({_digits(peak)} to {_digits(reserved)} of {device:g} GiB)"
    return False, f"does not fit ({_digits(peak)} of {device:g} GiB)"


def _memory(memory: Plan) -> str:
    peak = memory["peak"]
    rows = [
        (name.replace("_", " "), f"{size / GIB:,.2f}", "")
        for name, size in peak.items()
        if name not in ("name", "total") and size
    ]
    rows.append(("peak", f"{peak['total'] / GIB:,.2f}", f"at: {peak['name']}"))
    rows.append(("reserved", f"{memory['reserved'] / GIB:,.2f}", _fit(memory)[1]))
    table = _table(("GiB", "", ""), rows, notes=True)
    if memory["fits"]:
        return table
    layouts = [
        "{world_size} GPUs with tp {tensor_parallel_degree} and activation checkpointing "
        "{activation_checkpoint}".format_map(each)
        for each in memory["would_fit"]
    ]
    more = "no number of GPUs, with tp up to 8 either; lower local_batch_size or seq_len"
    return table + "\n" + _wrap(f"would fit: {', or '.join(layouts) or more}")


def _cost(schedule: Plan) -> str:
    rates = {schedule["origin"]: schedule["tps"]}
    if schedule["tps_band"]:
        rates["slow"], rates["fast"] = schedule["tps_band"]
    speeds = [rate / schedule["tps"] for rate in rates.values()]
    durations = {
        "a step, seconds": schedule["step_s"],
        "this run, hours": 24 * schedule["run_days"],
        "this run, GPU-hours": schedule["run_gpu_hours"],
        "10^12 tokens, days": schedule["days_per_trillion_tokens"],
        "10^12 tokens, GPU-hours": schedule["gpu_hours_per_trillion_tokens"],
    }
    rows = [
        ["tokens/s per device", *(f"{rate:,.0f}" for rate in rates.values())],
        ["tokens a day", *(f"{schedule['tokens_per_day'] * speed:.2e}" for speed in speeds)],
        *([name, *(_digits(each / speed) for speed in speeds)] for name, each in durations.items()),
    ]
    text = (
        f"This run trains {schedule['run_tokens']:.3g} tokens. A checkpoint is "
        f"{schedule['checkpoint_bytes'] / GIB:,.1f} GiB over all ranks: "
        f"{schedule['checkpoint_s']:,.1f} s where each writes 1 GB/s."
    )
    return f"{_table(('', *rates), rows)}\n{_wrap(text)}"


def _linears(linears: Sequence[Plan], better_kept: Sequence[str]) -> str:
    def trained_in(row: Plan) -> str:
        if not row["converted"]:
            return "bf16"
        others = [name for name in MATMULS if row["gemms"][name]["precision"] != "fp8"]
        return f"float8{', ' if others else ''}{', '.join(others)}{' in bf16' if others else ''}"

    rows = [
        (
            _short(row["kind"]),
            str(row["count"]),
            "{m} x {n} x {k}".format_map(row["gemms"]["output"]),
            _number(row["time_ratio"]),
            trained_in(row),
        )
        for row in linears
    ]
    header = ("linear", "count", "M x N x K per rank", "fp8/bf16", "trained in")
    notes = ["fp8/bf16: predicted time of three matmuls and their casts in float8, over bf16"]

    # Why some are kept, and why others are in float8 that seem slower in it.
    reasons = dict.fromkeys(row["kept_because"] for row in linears if not row["converted"])
    for reason in reasons:
        kinds = (_short(row["kind"]) for row in linears if row["kept_because"] == reason)
        notes.append(f"{', '.join(kinds)} in bf16: {reason}")
    for row in (row for row in linears if row["converted"]):
        kind, others = _short(row["kind"]), ", ".join(map(_short, row["shares_cast_with"]))
        if row["kind"] in better_kept:
            even = f", even with its input's cast shared with {others}" if others else ""
            notes.append(f"{kind}: slower in float8{even}")
        elif others and row["time_ratio"] >= 1:
            notes.append(f"{kind}: its input's cast is shared with {others}")
    return "\n".join([_table(header, rows, notes=True), *map(_wrap, notes)])


def _short(kind: str) -> str:
    return kind.rpartition(".")[2]


def _model(model: Plan, flops: Plan) -> str:
    total = flops["total"]
    parts = {name.replace("_", " "): flops[name] for name in FLOPS_PARTS}
    parts |= {f"in {name}": flops[name] for name in ("fp8", "bf16", "fp32")}
    parts["recomputed, on top"] = flops["recompute"]
    rows = [(name, f"{count:,}", f"{count / total:.2%}") for name, count in parts.items() if count]
    without = f"{model['parameters_without_embedding']:,} without the input embedding"
    if model["tie_embeddings"]:
        without = "and the input embedding is the projection to the vocabulary"
    text = _wrap(f"{model['parameters']:,} parameters, {without}")
    return f"{text}\n{_table(('FLOPs per token', f'{total:,}', 'share'), rows)}"


def _mfu(schedule: Plan, peaks: Plan) -> str:
    rows = [
        (name, _number(schedule[name]), f"of {_number(peaks[peak], '.1f')} TFLOPS{note}")
        for name, (peak, note) in UTILISATIONS.items()
    ]
    header = ("percent", "", f"at {schedule['tflops']:,.2f} TFLOPS per device")
    return _table(header, rows, notes=True)


def _assumed(plan: Plan) -> str:
    communication, request = plan["communication"], plan["request"]
    parts = [] if plan["peaks"]["data_sheet"] else [_wrap(UNKNOWN_DEVICE.format_map(request))]

    # Links, of several devices.
    if communication["collectives"]:
        rows = [
            (
                each["kind"],
                str(each["ring_size"]),
                "yes" if each["crosses_nodes"] else "no",
                _digits(each["gb_s"]),
            )
            for each in communication["collectives"]
        ]
        parts.append(_table(("ring", "GPUs", "crosses nodes", "GB/s"), rows))
        parts.append(_wrap(LINKS.format_map(communication)))
    parts.append(f"Attention runs in PyTorch's {request['attention_kernel']} kernel (--attention).")

    # Constants.
    rows = [
        (
            each["name"],
            *(f"{value:g}" for value in (each["value"], *each["between"])),
            *(f"{ratio - 1:+.1%}" for ratio in each["step_ratio"]),
            "guess" if each["guessed"] else "measured",
        )
        for each in plan["assumed"]
    ]
    if rows:
        header = ("uncertain", "value", "slow", "fast", "step, slow", "step, fast", "")
        parts += [_table(header, rows, notes=True), _wrap(UNCERTAIN)]
    if plan["measured"]:
        values = ", ".join("{name} {value:.3g}".format_map(each) for each in plan["measured"])
        source = plan["measured"][0]["source"]
        parts.append(_wrap(f"Not published or guessed, but {source}: {values}."))
    return "\n".join(parts)
