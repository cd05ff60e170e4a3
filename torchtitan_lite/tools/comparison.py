"""Compare runs at equal tokens, from their metrics.jsonl, and by their configs.

Equal tokens are the token counts at which every run has logged a step; nothing is interpolated.
"""

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.jsonfile import read_toml
from torchtitan_lite.base.tables import format_columns
from torchtitan_lite.config.keys import flat_config, show
from torchtitan_lite.metrics.records import Line, read_records
from torchtitan_lite.metrics.summary import curves_line

TOKENIZERS = (
    "Tokenizers differ: losses of their tokens do not compare, bits per byte do (`evaluate`)."
)
COLUMNS = {
    "run": "{}",
    "steps": "{:,.0f}",
    "tokens": "{:,.0f}",
    "final loss": "{:.4f}",
    "validation loss": "{:.4f}",
    "to first": "{:+.2f} %",
    "median loss off": "{:.2f} %",
    "loss at most off": "{:.2f} %",
    "at step": "{:,.0f}",
    "grad norm at most off": "{:.2f} %",
    "tps": "{:,.0f}",
    "times first": "{:.2f}",
    "mfu": "{:.1f} %",
    "memory": "{:.1f} GiB",
}
"""Format of each column of a comparison."""
SPEEDS = ("tps", "mfu", "mfu_bf16_peak", "mfu_fp8_peak")


@dataclass(frozen=True)
class Run:
    """What a comparison reads of a run's folder. Unknown numbers are NaN."""

    folder: Path
    figures: Mapping[str, NDArray[np.float64]]
    """Of its lines, one value per step."""
    validations: Mapping[str, NDArray[np.float64]]
    """Of its validations: `tokens`, `validation_loss`."""
    settings: Mapping[str, Any]
    """Values of the config by `[table] key`; none if there is no config."""


Runs = Mapping[str, Run]


def read_runs(paths: Sequence[Path]) -> Runs:
    """Read the runs at `paths`, run folders or their metrics.jsonl, each named after its folder and
    the parents in which they differ. Raises ConfigError, also for no run and for one twice."""
    folders = [(path.parent if path.is_file() else path).absolute() for path in paths]
    if len(set(map(os.path.realpath, folders))) < max(len(folders), 1):
        given = ", ".join(map(str, paths)) or "none"
        raise ConfigError(f"a comparison needs different runs, and got: {given}.")
    parent = os.path.commonpath([folder.parent for folder in folders])
    return {str(folder.relative_to(parent)): _read_run(folder) for folder in folders}


def _read_run(folder: Path) -> Run:
    """Read the run in `folder`. Raises ConfigError."""
    # Of a token count that is there twice, the last line counts.
    lines = read_records(folder / "metrics.jsonl")
    steps = [*{step.tokens: step for _, step in lines if step.tokens is not None}.values()]
    if not steps:
        raise ConfigError(f"{folder} has no metrics.jsonl with a logged step; name a run folder.")

    # A run without validations or config is compared by its steps.
    config = folder / "config.toml"
    try:
        settings = flat_config(read_toml(config)) if config.exists() else {}
    except ValueError as error:
        raise ConfigError(f"{config}: {error}") from error
    validations = [line for _, line in read_records(folder / "validation.jsonl")]
    figures, validated = (
        {
            name: np.array([getattr(line, name) for line in lines], float)
            for name in Line.model_fields
        }
        for lines in (steps, validations)
    )
    validated["tokens"] = np.interp(validated["step"], figures["step"], figures["tokens"])
    return Run(folder, figures, validated, settings)


def equal_tokens(runs: Runs) -> NDArray[np.float64]:
    """Return the token counts at which all runs logged, in order. Raises ConfigError if none is."""
    tokens = {name: run.figures["tokens"] for name, run in runs.items()}
    equal: NDArray[np.float64] = functools.reduce(np.intersect1d, tokens.values())
    if not equal.size:
        spans = [f"{name} {counts[0]:,.0f} to {counts[-1]:,.0f}" for name, counts in tokens.items()]
        raise ConfigError(f"there is no token count at which all runs logged: {', '.join(spans)}.")
    return equal


@np.errstate(all="ignore")  # a figure of the first run may be 0
def compare(runs: Runs, *, last: int) -> list[dict[str, Any]]:
    """Return the COLUMNS and SPEEDS of each run; NaN if unknown. A final loss is the mean of the
    `last` steps at equal tokens, a median is over the last half; speeds omit the first step."""
    equal = equal_tokens(runs)
    rows: list[dict[str, Any]] = []
    for name, run in runs.items():
        figures = run.figures
        is_equal = np.isin(figures["tokens"], equal)
        curves = {key: figures[key][is_equal] for key in ("loss", "grad_norm")}
        final_loss = np.mean(curves["loss"][-last:])
        medians = {key: np.median(figures[key][1:].tolist() or math.nan) for key in SPEEDS}

        if not rows:  # the run that all are compared with
            first, first_loss, first_tps = curves, final_loss, medians["tps"]
        off = {key: 100 * np.abs(curves[key] / first[key] - 1) for key in curves}
        farthest = np.argmax(off["loss"])  # the first step without a loss, if there is one
        row = {
            "run": name,
            "steps": figures["step"][-1],
            "tokens": figures["tokens"][-1],
            "final loss": final_loss,
            "validation loss": [math.nan, *run.validations["validation_loss"]][-1],
            "to first": 100 * (final_loss / first_loss - 1),
            "median loss off": np.median(off["loss"][len(equal) // 2 :]),
            "loss at most off": off["loss"][farthest],
            "at step": figures["step"][is_equal][farthest] if off["loss"].any() else math.nan,
            "grad norm at most off": np.max(off["grad_norm"]),
            "times first": medians["tps"] / first_tps,
            "memory": figures["memory_gib"][-1],
        }
        rows.append(row | medians)
    return rows


def format_runs(runs: Runs, *, last: int, columns: Sequence[str] = tuple(COLUMNS)) -> str:
    """Format the comparison as a Markdown table: a row per run, or with few runs a column."""
    rows = [
        ["n/a" if row[key] != row[key] else COLUMNS[key].format(row[key]) for key in columns]  # NaN
        for row in compare(runs, last=last)
    ]
    return f"{notes(runs, last=last)[0]}\n\n{_format_narrow([columns, *rows])}"


def notes(runs: Runs, *, last: int) -> list[str]:
    """Say at which tokens the runs are compared, and whether their losses can be."""
    tokens = equal_tokens(runs)
    text = f"At {len(tokens):,} equal token counts, the last one {tokens[-1]:,.0f}; "
    text += f"final loss: mean of the last {min(last, len(tokens))}."
    paths = [run.settings.get("[model] tokenizer_path") for run in runs.values() if run.settings]
    tokenizers = {path and os.path.realpath(str(path)) for path in paths}
    return [text, TOKENIZERS] if len(tokenizers) > 1 else [text]


def setting_rows(runs: Runs) -> list[list[str]]:
    """Return the settings that differ as rows of a table, its headings first; none if none do. The
    keys of [job], such as the run's folder, and runs without settings are left out."""
    known = {name: run.settings for name, run in runs.items() if run.settings}
    all_keys = dict.fromkeys(key for settings in known.values() for key in settings)
    keys = [key for key in all_keys if not key.startswith("[job]")]
    columns = {key: [show(settings.get(key)) for settings in known.values()] for key in keys}
    differing = {key: column for key, column in columns.items() if len(set(column)) > 1}
    rows = zip(known, *differing.values(), strict=True)
    return [["run", *differing], *map(list, rows)] if differing else []


def group_seeds(runs: Runs) -> list[list[str]]:
    """Return the names of the runs in groups whose settings differ in [debug] seed alone, beside
    [job]. A run without settings, or with a seed that its group has, is a group of its own."""
    groups: dict[str, dict[str, str]] = {}  # names by seed
    for name, run in runs.items():
        kind = {key: value for key, value in run.settings.items() if not key.startswith("[job]")}
        seed = show(kind.pop("[debug] seed", None))
        key = show(kind)
        if not kind or seed in groups.get(key, {}):
            key = name
        groups.setdefault(key, {})[seed] = name
    return [[*names.values()] for names in groups.values()]


def _format_narrow(rows: Sequence[Sequence[str]]) -> str:
    """Format the table of `rows`, or the one of its columns if it is narrower."""
    tables = [
        format_columns(table, right=range(1, len(table[0])), markdown=True)
        for table in (rows, list(zip(*rows, strict=True)))
    ]
    return min(tables, key=lambda table: table.index("\n"))


def format_comparison(runs: Runs, *, last: int) -> str:
    """Format everything that `compare` prints: figures, settings, and how to see the curves."""
    parent = os.path.commonpath([run.folder.parent for run in runs.values()])
    parts = [format_runs(runs, last=last), *notes(runs, last=last)[1:]]
    if settings := setting_rows(runs):
        parts.append(_format_narrow(settings))
    return "\n\n".join([*parts, curves_line(parent)])
