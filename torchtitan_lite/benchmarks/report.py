"""What the benchmark found, from its JSON alone: ratios, the table, and what got worse since a
baseline."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.tables import format_columns

RATIOS = {"bf16_ratio": "tps over the bf16 row's", "compile_ratio": "tps over the eager row's"}
"""The figures of a row that tell of the code and not of the moment."""
DONE = "done"
Result = dict[str, Any]


def check_out(path: Path | None) -> None:
    """Raise ConfigError, before any work is done, if the file of --out, where one is asked for, is
    in no folder."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"--out {path}: there is no folder {path.parent}; make it first.")


def measure(records: Sequence[Mapping[str, Any]], *, warmup_steps: int) -> Result:
    """The figures of a run, from its records without those of the first `warmup_steps` steps."""
    steady = [record for record in records if record["step"] > warmup_steps]

    def median(figure: str) -> float | None:
        known = [record[figure] for record in steady if record[figure] is not None]
        return statistics.median(known) if known else None

    times = [record["step_time_s"] for record in steady]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return {
        "measured_steps": len(steady),
        "tps": median("tps"),
        "tflops": median("tflops"),
        "mfu": median("mfu"),
        "memory_gib": steady[-1]["memory_gib"],
        "step_time_s": middle,
        "spread_pct": 100 * (high - low) / middle,
        "loss": steady[-1]["loss"],
    }


def add_ratios(rows: Sequence[Result]) -> None:
    """Set the RATIOS of each of `rows` that is done, None where what it is to be held against is
    not."""
    by_run = {_run(row): row["tps"] for row in rows if row["status"] == DONE}
    for row in rows:
        own = row.get("tps") if row["status"] == DONE else None
        others = {
            "bf16_ratio": by_run.get(_run(row | {"recipe": "bf16"}))
            if row["recipe"] != "bf16"
            else None,
            "compile_ratio": by_run.get(_run(row | {"compile": False})) if row["compile"] else None,
        }
        row |= {name: own / other if own and other else None for name, other in others.items()}


def _run(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a row from the others."""
    keys = (
        "shape",
        "layers",
        "seq_len",
        "local_batch_size",
        "activation_checkpoint",
        "compile",
        "recipe",
    )
    return tuple(row[key] for key in keys)


def find_regressions(
    now: Mapping[str, Any], baseline: Mapping[str, Any], *, tolerance_pct: float
) -> list[str]:
    """What got worse since `baseline` by more than `tolerance_pct` percent, a line each: a ratio,
    or a row that is no longer done. Rows that are in one of the two alone are not compared. Raises
    ConfigError where that leaves none."""
    before = {row["name"]: row for row in baseline["rows"] if row["status"] == DONE}
    found: list[str] = []
    compared = 0
    for row in now["rows"]:
        if (old := before.get(row["name"])) is None:
            continue
        if row["status"] != DONE:
            found.append(
                f"{row['name']}: {row['status']}, and done in the baseline: {row['reason']}"
            )
            compared += 1
            continue
        for name, what in RATIOS.items():
            if row.get(name) is None or old.get(name) is None:
                continue
            compared += 1
            change_pct = 100 * (row[name] / old[name] - 1)
            if change_pct < -tolerance_pct:
                below = f"{-change_pct:.1f} % below the baseline's {old[name]:.3f}"
                found.append(f"{row['name']}: {what} is {row[name]:.3f}, {below}")
    if not compared:
        raise ConfigError(
            "--check: no ratio is known both now and in the baseline; make a baseline with the same options."
        )
    return found


def check_comparable(device: str, baseline: Mapping[str, Any], *, path: str) -> None:
    """Raise ConfigError if the baseline at `path` is of another device."""
    if baseline["device"] != device:
        raise ConfigError(
            f'--check {path} is of device "{baseline["device"]}", and this is "{device}": ratios of two devices are '
            "not comparable; make a baseline here, with --out."
        )


COLUMNS = (
    ("shape", lambda row: row["shape"]),
    ("layers", lambda row: f"{row['layers']}/{row['all_layers']}"),
    ("seq", lambda row: f"{row['seq_len']}"),
    ("batch", lambda row: f"{row['local_batch_size']}"),
    ("ac", lambda row: row["activation_checkpoint"]),
    ("compile", lambda row: "on" if row["compile"] else "off"),
    ("recipe", lambda row: row["recipe"]),
)
FIGURES = (
    ("tps", "tps", ",.0f"),
    ("/bf16", "bf16_ratio", ".3f"),
    ("/eager", "compile_ratio", ".3f"),
    ("tflops", "tflops", ".4g"),
    ("mfu%", "mfu", ".1f"),
    ("achv%", "mfu_achievable", ".1f"),
    ("GiB", "memory_gib", ".1f"),
    ("step s", "step_time_s", ".4f"),
    ("iqr%", "spread_pct", ".1f"),
)
PLANNED = (
    ("tps", "predicted_tps", ",.0f"),
    ("GiB", "predicted_memory_gib", ".1f"),
    ("run s", "expected_s", ".0f"),
)


def format_report(report: Mapping[str, Any]) -> str:
    """The report as text: the device, its ceilings, the rows as a table, what was not run, and
    where time went."""
    ceilings = ", ".join(
        f"{name} {tflops:.4g}" for name, tflops in report["ceilings_tflops"].items()
    )
    done = [row for row in report["rows"] if row["status"] == DONE]
    head = [f"{report['device']}: matmuls reach {ceilings} TFLOPS", report["layers_policy"]]
    if report["emulated"]:
        head.append("float8 is emulated on CPU: its rows show that it runs, not what it gains")
    parts = ["\n".join(filter(None, head))]
    if done:
        parts.append(_table(done, FIGURES))
    if failed := [row for row in report["rows"] if row["status"] != DONE]:
        parts.append(
            "\n".join(f"{row['name']}: {row['status']}: {row['reason']}" for row in failed)
        )
    if report["skipped"]:
        parts.append(_format_skipped(report["skipped"]))
    if report["profiles"]:
        parts.append(_format_profiles(report["profiles"]))
    return "\n\n".join(
        [
            *parts,
            f"{report['ended_by']} after {report['seconds']:.0f} s of {report['budget_s']:.0f} s",
        ]
    )


def format_plan(plan: Mapping[str, Any]) -> str:
    """The plan of a benchmark as text: its rows, in their order, and what they should come to."""
    total = sum(row["expected_s"] for row in plan["rows"])
    parts = [f"plan for {plan['device']}\n{plan['layers_policy']}", _table(plan["rows"], PLANNED)]
    if plan["skipped"]:
        parts.append(_format_skipped(plan["skipped"]))
    return "\n\n".join(
        [*parts, f"{len(plan['rows'])} rows, {total:.0f} s of {plan['budget_s']:.0f} s"]
    )


def _format_skipped(skipped: Sequence[Mapping[str, str]]) -> str:
    """A line for those rows that were skipped for one reason and are alike but for the recipe."""
    alike: dict[tuple[str, str], list[str]] = {}
    for row in skipped:
        rest, _, recipe = row["name"].rpartition(" ")
        alike.setdefault((rest, row["reason"]), []).append(recipe)
    lines = (
        f"  {rest} {', '.join(recipes)}: {reason}" for (rest, reason), recipes in alike.items()
    )
    return "not run:\n" + "\n".join(lines)


def _format_profiles(profiles: Sequence[Mapping[str, Any]]) -> str:
    groups = list(profiles[0]["share_pct"])
    headings = ["% of the step", *(profile["recipe"] for profile in profiles)]
    rows = [
        [group, *(f"{profile['share_pct'][group]:.1f}" for profile in profiles)] for group in groups
    ]
    rows.append(
        ["step under the profiler, s", *(f"{profile['wall_s']:.4f}" for profile in profiles)]
    )
    table = format_columns([headings, *rows], right=range(1, len(headings)))
    return f"where the time of {profiles[-1]['name']} goes:\n{table}"


def _table(rows: Sequence[Mapping[str, Any]], figures: Sequence[tuple[str, str, str]]) -> str:
    headings = [name for name, _ in COLUMNS] + [heading for heading, _, _ in figures]
    cells = [
        [cell(row) for _, cell in COLUMNS]
        + [_show(row.get(name), form) for _, name, form in figures]
        for row in rows
    ]
    return format_columns([headings, *cells], right=range(1, len(headings)))


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
