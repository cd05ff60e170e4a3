"""The work of `torchtitan-lite bench`: choose rows, run them, print tables."""

import argparse
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torchtitan_lite.base.errors import STOPPED_EXIT_CODE, ConfigError, RunError
from torchtitan_lite.base.tables import format_columns
from torchtitan_lite.metrics.hardware import device_name
from torchtitan_lite.planner.plan import find_device

from .bench import (
    DONE,
    STOPPED,
    Result,
    Row,
    choose_rows,
    find_regressions,
    local_device,
    plan_row,
    read_earlier,
    run_benchmark,
)

BUDGET_S = {"GPU": 525.0, "CPU": 300.0, "quick GPU": 240.0, "quick CPU": 180.0}
TOLERANCE_PCT = {"GPU": 5.0, "CPU": 50.0}
USABLE_MEMORY = 0.98
"""Share of a data sheet's memory that the driver leaves."""

# Columns of the tables, each with the format of its figures.
FIGURES = {"tps": ",.0f", "bf16_ratio": ".3f", "compile_ratio": ".3f", "tflops": ".4g"}
FIGURES |= {"mfu": ".1f", "mfu_achievable": ".1f", "memory_gib": ".1f", "step_time_s": ".4f"}
FIGURES |= {"spread_pct": ".1f"}
PREDICTIONS = {"predicted_tps": ",.0f", "predicted_memory_gib": ".1f"}


def format_rows(rows: Iterable[Result], figures: Mapping[str, str]) -> str:
    """Return a table of `rows` with `figures`, each by its format."""
    columns = dict.fromkeys(Row.__annotations__, "") | dict(figures)
    cells = [
        ["-" if row[key] is None else format(row[key], form) for key, form in columns.items()]
        for row in rows
    ]
    return format_columns([list(columns), *cells], right=range(1, len(columns)))


def format_report(report: Mapping[str, Any]) -> str:
    """Return the report as text: the table, then the rows without figures and why."""
    done = [row for row in report["rows"] if row["status"] == DONE]
    other = [row for row in report["rows"] if row["status"] != DONE]
    lines = [report["device"]]
    if report["emulated"]:
        lines.append("float8 is emulated on a CPU: its rows show that it runs, not what it gains")
    if done:
        lines += ["", format_rows(done, FIGURES), ""]
    lines += [f"{row['name']}: {row['status']}: {row['reason']}" for row in other]
    lines += [f"{row['name']}: not run: {row['reason']}" for row in report["skipped"]]
    return "\n".join([*lines, f"{report['ended_by']} after {report['seconds']:.0f} s"])


def print_plan(options: argparse.Namespace) -> None:
    """Print the rows for the device of --dry-run, with predictions."""
    spec = find_device(options.device)
    device = dataclasses.replace(spec, memory_gib=USABLE_MEMORY * spec.memory_gib)
    planned, refused = [], []
    for row in choose_rows("quick GPU" if options.quick else "GPU", options.only):
        try:
            row, predictions = plan_row(row, device)
        except ConfigError as error:
            refused.append(f"{row.name}: not run: {error}")
        else:
            planned.append(dataclasses.asdict(row) | predictions)
    print(f"plan for {device.name}\n\n{format_rows(planned, PREDICTIONS)}\n", *refused, sep="\n")
    print("predicted_tps: modelled by the planner from rates of kernels, not measured")


def run_options(options: argparse.Namespace) -> int:
    """Run the rows that `options` choose, print the report, and return the exit code."""
    if options.dry_run:
        print_plan(options)
        return 0

    device = local_device()
    on = "CPU" if device is None else "GPU"
    kind = f"quick {on}" if options.quick else on
    rows = choose_rows(kind, options.only)
    earlier = options.check and read_earlier(options.check, device=device_name())

    budget_s = BUDGET_S[kind] if options.budget is None else options.budget
    report = run_benchmark(rows, device, budget_s=budget_s, out=options.out)
    print(format_report(report))

    if report["ended_by"] == STOPPED:
        return STOPPED_EXIT_CODE
    if not any(row["status"] == DONE for row in report["rows"]):
        raise RunError("no row is done")
    if earlier is not None:
        tolerance = TOLERANCE_PCT[on] if options.tolerance is None else options.tolerance
        regressions = find_regressions(report["rows"], earlier, tolerance_pct=tolerance)
        print(f"{len(regressions)} regressions of more than {tolerance:g} %")
        if regressions:
            raise RunError("\n".join(regressions))
    return 0
