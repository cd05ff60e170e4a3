"""Format a plan as text and tables for a terminal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchtitan_lite.metrics.flops import MATMULS
from torchtitan_lite.tables import format_columns

GIB = 2**30
FLOPS_PARTS = ("block_linears", "output", "attention")
Plan = Mapping[str, Any]
"""What `make_plan` returns, or a section of it."""


def format_plan(plan: Plan) -> str:
    """Format the result of `make_plan`, section by section."""
    if_on = "" if plan["request"]["float8_recipe"] else ", if it were on"
    prediction = plan["prediction"]
    sections = {
        "Run": _run(plan["request"], plan["peaks"]),
        "Model": _model(plan["model"], plan["flops_per_token"]),
        f"Float8, linear by linear{if_on}": _linears(plan["linears"], prediction["better_kept"]),
        "Prediction": _prediction(prediction),
        "Memory of a rank": _memory(plan["memory"]),
        "What to expect": _schedule(plan["schedule"], plan["peaks"]),
    }
    return "\n\n".join(f"{title}\n{'-' * len(title)}\n{text}" for title, text in sections.items())


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Align all columns but the first and the last to the right."""
    return format_columns([header, *rows], right=range(1, len(header) - 1))


def _number(value: float | None, form: str = ",.2f") -> str:
    return "n/a" if value is None else format(value, form)


def _run(request: Plan, peaks: Plan) -> str:
    recipe, compiled = request["float8_recipe"], "on" if request["compile"] else "off"
    gather = " with float8 all-gather" if recipe and request["float8_all_gather"] else ""
    mask = ", document mask (attention counts as if documents were one)"
    mask = mask if request["document_mask"] else ""
    return (
        "{model} on {world_size} x {device}: dp_replicate {dp_replicate} x dp_shard {dp_shard} x "
        "tp {tp}, global batch {global_batch_size} x {seq_len:,} tokens\n".format_map(request)
        + f"float8 {recipe or 'off'}{gather}, "
        f"activation checkpointing {request['activation_checkpoint']}, compile {compiled}{mask}\n"
        f"dense peaks in TFLOPS: bf16 {_number(peaks['bf16'], '.4g')}, "
        f"fp8 {_number(peaks['fp8'], '.4g')}; of this run's mix "
        f"{_number(peaks['effective'], '.1f')}, a harmonic mean "
        f"(arithmetic {_number(peaks['arithmetic'], '.1f')})"
    )


def _model(model: Plan, flops: Plan) -> str:
    total = flops["total"]
    parts = {name.replace("_", " "): flops[name] for name in FLOPS_PARTS}
    parts |= {f"in {name}": flops[name] for name in ("fp8", "bf16", "fp32")}
    parts["recomputed, on top"] = flops["recompute"]
    rows = [(name, f"{count:,}", f"{count / total:.2%}") for name, count in parts.items() if count]
    without = f"{model['parameters_without_embedding']:,} without the input embedding"
    if model["tie_embeddings"]:
        without = "and the input embedding is the projection to the vocabulary"
    table = _table(("FLOPs per token", f"{total:,}", "share"), rows)
    return f"{model['parameters']:,} parameters, {without}\n{table}"


def _linears(linears: Sequence[Plan], better_kept: Sequence[str]) -> str:
    def trained_in(row: Plan) -> str:
        if not row["converted"]:
            return f"kept: {row['kept_because']}"
        kept_is_better, others = row["kind"] in better_kept, ", ".join(row["shares_cast_with"])
        surprises = others and (kept_is_better or (row["time_ratio"] or 0) >= 1)
        shared = f": its input's cast is shared with {others}" if surprises else ""
        return f"float8{', better kept in bf16' if kept_is_better else ''}{shared}"

    header = ("linear", "count", "M x N x K per rank", *MATMULS, "/16", "fp8/bf16", "trained in")
    rows = [
        (
            row["kind"],
            str(row["count"]),
            "{m} x {n} x {k}".format_map(row["gemms"]["output"]),
            *(row["gemms"][name]["precision"] for name in MATMULS),
            "yes" if row["divisible_by_16"] else "no",
            _number(row["time_ratio"]),
            trained_in(row),
        )
        for row in linears
    ]
    note = "fp8/bf16: predicted time of the three matmuls and their casts in float8, over bf16"
    return f"{_table(header, rows)}\n{note}"


def _prediction(prediction: Plan) -> str:
    if prediction["step_speedup"] is None:
        return str(prediction["verdict"])
    steps = prediction["bf16"], prediction["float8"]
    times = {
        part: [step["device_parts_s"][part] for step in steps]
        for part in steps[0]["device_parts_s"]
    }
    times |= {part: [step["exposed_s"][part] for step in steps] for part in steps[0]["exposed_s"]}
    times["step"] = [step["step_s"] for step in steps]
    times["the host, meanwhile"] = [step["host_s"] for step in steps]
    times["communication hidden"] = [step["hidden_s"] for step in steps]
    rows = [
        [name, *(f"{1e3 * each:,.2f}" for each in seconds), ""] for name, seconds in times.items()
    ]
    return f"{prediction['verdict']}\n" + _table(("milliseconds", "bf16", "float8", ""), rows)


def _memory(memory: Plan) -> str:
    peak, device = memory["peak"], memory["device_bytes"]
    rows = [
        (name.replace("_", " "), f"{size / GIB:,.2f}", "")
        for name, size in peak.items()
        if name not in ("name", "total") and size
    ]
    rows.append(("peak", f"{peak['total'] / GIB:,.2f}", f"at: {peak['name']}"))
    fits = "fits" if memory["fits"] else "tight" if peak["total"] <= device else "does not fit"
    note = f"{fits}: the device has {device / GIB:,.2f}"
    rows.append(("reserved, at most", f"{memory['reserved'] / GIB:,.2f}", note))
    table = _table(("GiB", "", ""), rows)
    if memory["fits"]:
        return table
    layouts = [
        "{world_size} GPUs with tp {tensor_parallel_degree} and activation checkpointing "
        "{activation_checkpoint}".format_map(each)
        for each in memory["would_fit"]
    ]
    more = "no number of GPUs, with tp up to 8 either; lower local_batch_size or seq_len"
    return f"{table}\nwould fit: {', or '.join(layouts) or more}"


def _schedule(schedule: Plan, peaks: Plan) -> str:
    rows = [
        (name, _number(schedule[name]), f"of {_number(peaks[peak], '.1f')} TFLOPS{note}")
        for name, peak, note in (
            ("mfu", "effective", ", each matmul at its own peak"),
            ("mfu_bf16_peak", "bf16", ""),
            ("mfu_fp8_peak", "fp8", ""),
            ("mfu_arithmetic_peak", "arithmetic", ""),
            ("hfu", "effective", ", with what is recomputed"),
        )
    ]
    return (
        f"tps {schedule['tps']:,.0f} per device ({schedule['origin']}), "
        f"tflops {schedule['tflops']:,.2f}, step {schedule['step_s']:,.3f} s\n"
        f"{_table(('percent', '', ''), rows)}\n"
        f"{schedule['tokens_per_day']:.3g} tokens a day, "
        f"{schedule['days_per_trillion_tokens']:,.1f} days and "
        f"{schedule['gpu_hours_per_trillion_tokens']:,.0f} GPU-hours for 10^12; "
        f"the {schedule['run_tokens']:.3g} of this run take {24 * schedule['run_days']:,.1f} hours "
        f"and {schedule['run_gpu_hours']:,.1f} GPU-hours\n"
        f"a checkpoint is {schedule['checkpoint_bytes'] / GIB:,.1f} GiB over all ranks: "
        f"{schedule['checkpoint_s']:,.1f} s where each writes 1 GB/s"
    )
