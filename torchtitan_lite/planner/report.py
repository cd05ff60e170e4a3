"""A plan in words and tables, for a terminal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchtitan_lite.tables import format_columns

GIB = 2**30


def format_plan(plan: Mapping[str, Any]) -> str:
    """What `make_plan` found, section by section."""
    sections = {
        "Run": _run(plan["request"], plan["peaks"]),
        "Model": _model(plan["model"], plan["flops_per_token"]),
        "FLOPs per token as others count them": _formulas(
            plan["formulas"], plan["flops_per_token"]["total"]
        ),
        "Operators of a forward pass, as PyTorch counts them": _operators(plan["operators"]),
        f"Float8, linear by linear{'' if plan['request']['float8_recipe'] else ', if it were on'}": _linears(
            plan["linears"]
        ),
        "Prediction": _prediction(plan["prediction"]),
        "Memory of a rank": _memory(plan["memory"]),
        "What to expect": _schedule(plan["schedule"], plan["peaks"]),
    }
    return "\n\n".join(f"{title}\n{'-' * len(title)}\n{text}" for title, text in sections.items())


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """All columns but the first and the last are aligned to the right."""
    return format_columns([header, *rows], right=range(1, len(header) - 1))


def _number(value: float | None, form: str = ",.2f") -> str:
    return "n/a" if value is None else format(value, form)


def _run(request: Mapping[str, Any], peaks: Mapping[str, Any]) -> str:
    recipe = request["float8_recipe"] or "off"
    mask = (
        ", document mask (attention counts as if documents were one)"
        if request["document_mask"]
        else ""
    )
    gather = (
        " with float8 all-gather"
        if request["float8_recipe"] and request["float8_all_gather"]
        else ""
    )
    return (
        f"{request['flavor']} on {request['world_size']} x {request['device']}: dp_replicate {request['dp_replicate']} "
        f"x dp_shard {request['dp_shard']} x tp {request['tp']}, global batch {request['global_batch_size']} x "
        f"{request['seq_len']:,} tokens\n"
        f"float8 {recipe}{gather}, activation checkpointing {request['activation_checkpoint']}, "
        f"compile {'on' if request['compile'] else 'off'}{mask}\n"
        f"dense peaks in TFLOPS: bf16 {_number(peaks['bf16'], '.4g')}, fp8 {_number(peaks['fp8'], '.4g')}; "
        f"of this run's mix {_number(peaks['effective'], '.1f')}, a harmonic mean "
        f"(arithmetic {_number(peaks['arithmetic'], '.1f')})"
    )


def _model(model: Mapping[str, Any], flops: Mapping[str, Any]) -> str:
    total = flops["total"]
    parts = {
        "block linears": flops["block_linears"],
        "output": flops["output"],
        "attention": flops["attention"],
        "in fp8": flops["fp8"],
        "in bf16": flops["bf16"],
        "in fp32": flops["fp32"],
        "recomputed, on top": flops["recompute"],
    }
    rows = [(name, f"{count:,}", f"{count / total:.2%}") for name, count in parts.items() if count]
    return (
        f"{model['parameters']:,} parameters, {model['parameters_without_embedding']:,} without the input embedding\n"
        + _table(("FLOPs per token", f"{total:,}", "share"), rows)
    )


def _formulas(formulas: Sequence[Mapping[str, Any]], total: int) -> str:
    rows = [
        (
            row["used_by"],
            f"{row['flops_per_token'] / 1e9:,.3f} G",
            f"{row['flops_per_token'] / total:.3f}",
            row["differs"],
        )
        for row in formulas
    ]
    return _table(("used by", "FLOPs", "to ours", "counts otherwise"), rows)


def _operators(operators: Mapping[str, Any]) -> str:
    rows = [
        (
            row["module"],
            row["operator"],
            row["precision"],
            f"{row['flops_per_token']:,}",
            f"{row['share']:.2%}",
        )
        for row in operators["rows"]
    ]
    shares = ", ".join(
        f"{share:.2%} {precision}" for precision, share in operators["shares"].items()
    )
    return (
        _table(("module", "operator", "precision", "FLOPs per token", "share"), rows)
        + f"\ntotal {operators['forward']:,}, equal to the forward part of the ledger; {shares}"
    )


def _linears(linears: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for row in linears:
        gemms = row["gemms"]
        m, n, k = (gemms["output"][size] for size in "mnk")
        rows.append(
            (
                row["kind"],
                str(row["count"]),
                f"{m} x {n} x {k}",
                *(gemms[name]["precision"] for name in ("output", "grad_input", "grad_weight")),
                "yes" if row["divisible_by_16"] else "no",
                _number(row["time_ratio"]),
                "float8" if row["converted"] else f"kept: {row['kept_because']}",
            )
        )
    header = (
        "linear",
        "count",
        "M x N x K per rank",
        "output",
        "grad_input",
        "grad_weight",
        "/16",
        "fp8/bf16",
        "trained in",
    )
    return (
        _table(header, rows)
        + "\nfp8/bf16: predicted time of the three matmuls and their casts in float8, over bf16"
    )


def _prediction(prediction: Mapping[str, Any]) -> str:
    if prediction["step_speedup"] is None:
        return str(prediction["verdict"])
    steps = prediction["bf16"], prediction["float8"]

    def row(name: str, seconds: Iterable[float], note: str = "") -> tuple[str, ...]:
        return name, *(f"{1e3 * each:,.2f}" for each in seconds), note

    rows = [
        row(part, (step["device_parts_s"][part] for step in steps))
        for part in steps[0]["device_parts_s"]
    ]
    rows.append(row("the host, meanwhile", (step["host_s"] for step in steps)))
    rows.append(
        row(
            "microbatch",
            (step["microbatch_s"] for step in steps),
            note="the longer of device and host",
        )
    )
    return f"{prediction['verdict']}\n" + _table(("milliseconds", "bf16", "float8", ""), rows)


def _memory(memory: Mapping[str, Any]) -> str:
    peak, device = memory["peak"], memory["device_bytes"]
    parts = {
        name.replace("_", " "): size
        for name, size in peak.items()
        if name not in ("name", "total") and size
    }
    fits = "fits" if memory["fits"] else "tight" if peak["total"] <= device else "does not fit"
    rows = [(name, f"{size / GIB:,.2f}", "") for name, size in parts.items()]
    rows.append(("peak", f"{peak['total'] / GIB:,.2f}", f"at: {peak['name']}"))
    note = f"{fits}: the device has {device / GIB:,.2f}"
    rows.append(("reserved, at most", f"{memory['reserved'] / GIB:,.2f}", note))
    return _table(("GiB", "", ""), rows)


def _schedule(schedule: Mapping[str, Any], peaks: Mapping[str, Any]) -> str:
    rows = [
        (name, _number(schedule[name]), f"of {_number(peak, '.1f')} TFLOPS{note}")
        for name, peak, note in (
            ("mfu", peaks["effective"], ", each matmul at its own peak"),
            ("mfu_bf16_peak", peaks["bf16"], ""),
            ("mfu_fp8_peak", peaks["fp8"], ""),
            ("mfu_arithmetic_peak", peaks["arithmetic"], ""),
            ("hfu", peaks["effective"], ", with what is recomputed"),
        )
    ]
    return (
        f"tps {schedule['tps']:,.0f} per device ({schedule['origin']}), tflops {schedule['tflops']:,.2f}, "
        f"step {schedule['step_s']:,.3f} s\n"
        + _table(("percent", "", ""), rows)
        + f"\n{schedule['tokens_per_day']:.3g} tokens a day, "
        f"{schedule['days_per_trillion_tokens']:,.1f} days for 10^12; "
        f"the {schedule['run_tokens']:.3g} of this run take {24 * schedule['run_days']:,.1f} hours\n"
        f"a checkpoint is {schedule['checkpoint_bytes'] / GIB:,.1f} GiB over all ranks: "
        f"{schedule['checkpoint_s']:,.1f} s where each writes 1 GB/s"
    )
