"""Compare runs at equal tokens, from their metrics.jsonl, and by their configs.

Equal tokens are the token counts at which every run has logged a step; nothing is interpolated.
"""

import functools
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.jsonfile import MAX_JSON_BYTES, read_lines, read_toml
from torchtitan_lite.base.tables import format_columns
from torchtitan_lite.config.differences import flat_config
from torchtitan_lite.config.keys import show
from torchtitan_lite.metrics.tensorboard_writer import tensorboard_command

T = TypeVar("T", bound=BaseModel)
COLUMNS = {
    "run": "{}",
    "steps": "{:,.0f}",
    "tokens": "{:,.0f}",
    "final loss": "{:.4f}",
    "validation loss": "{:.4f}",
    "to first": "{:+.2f} %",
    "loss at most off": "{:.2f} %",
    "grad norm at most off": "{:.2f} %",
    "tps": "{:,.0f}",
    "times first": "{:.2f}",
    "mfu": "{:.1f} %",
}
"""Format of each column of a comparison."""
SEED = "[debug] seed"


class _Record(BaseModel, strict=True, allow_inf_nan=False):
    """The figures read of a line of metrics.jsonl."""

    step: float
    tokens: float
    loss: float | None
    grad_norm: float | None
    tps: float
    mfu: float | None


class _Validation(BaseModel, strict=True, allow_inf_nan=False):
    """The figure read of a line of validation.jsonl."""

    validation_loss: float | None


@dataclass(frozen=True)
class Run:
    """What a comparison reads of a run's folder. Unknown numbers are NaN."""

    folder: Path
    figures: Mapping[str, NDArray[np.float64]]
    """Of a _Record, one value per step."""
    validation_loss: float
    """Of the last validation."""
    settings: Mapping[str, Any]
    """Values of the config by `[table] key`; none if there is no config."""


Runs = Mapping[str, Run]


def read_runs(paths: Sequence[Path]) -> Runs:
    """Read the runs at `paths`, run folders or their metrics.jsonl. Their names are the run folders
    with the parent folders in which they differ.

    Raises ConfigError if there are not two different ones, or if one cannot be read.
    """
    files = [(path if path.is_file() else path / "metrics.jsonl").absolute() for path in paths]
    folders = [file.parent for file in files]
    if len(set(folders)) < max(len(folders), 2):
        named = " ".join(map(str, paths)) or "none"
        raise ConfigError(f"a comparison needs two different runs or more, and got: {named}.")
    parent = os.path.commonpath([folder.parent for folder in folders])
    return {str(file.parent.relative_to(parent)): _read_run(file) for file in files}


def _read_run(file: Path) -> Run:
    """Read the run with the metrics.jsonl `file`. Raises ConfigError."""
    if not (records := _read_lines(file, _Record)):
        raise ConfigError(f"{file}: no step has been logged yet.")
    last_at = {each.tokens: each for each in records}  # a token count that is there twice
    rows = [list(each.model_dump().values()) for each in last_at.values()]
    figures = np.array(rows, dtype=float).T

    # A run without validations or config is compared by its steps.
    validations = file.with_name("validation.jsonl")
    losses = _read_lines(validations, _Validation) if validations.exists() else []
    last = losses[-1].validation_loss if losses else None
    config, settings = file.with_name("config.toml"), {}
    try:
        settings = flat_config(read_toml(config)) if config.exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config}: {error}") from error
    return Run(
        folder=file.parent,
        figures=dict(zip(_Record.model_fields, figures, strict=True)),
        validation_loss=math.nan if last is None else last,
        settings=settings,
    )


def _read_lines(path: Path, model: type[T]) -> list[T]:
    """Read a file of JSON lines. An incomplete last line, as a live run may have, is left out.
    Raises ConfigError if the file cannot be read."""
    records: list[T] = []
    line = b""
    try:
        for line in read_lines(path):
            records.append(model.model_validate_json(line))
        return records
    except ValidationError:
        if not line.endswith(b"\n") and len(line) < MAX_JSON_BYTES:  # a live run is writing it
            return records
        shown = line[:60].decode(errors="replace").rstrip()
        reason = f"line {len(records) + 1} is not the record of a step: {shown!r}"
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
    raise ConfigError(f"{path}: {reason}; name a run folder, or its metrics.jsonl.")


def equal_tokens(runs: Runs) -> NDArray[np.float64]:
    """Return the token counts at which all runs logged, in order. Raises ConfigError if none is."""
    tokens = {name: run.figures["tokens"] for name, run in runs.items()}
    equal: NDArray[np.float64] = functools.reduce(np.intersect1d, tokens.values())
    if not equal.size:
        spans = [f"{name} {counts[0]:,.0f} to {counts[-1]:,.0f}" for name, counts in tokens.items()]
        raise ConfigError(f"there is no token count at which all runs logged: {', '.join(spans)}.")
    return equal


def compare(runs: Runs, *, last: int) -> list[dict[str, Any]]:
    """Return each run's values of COLUMNS; NaN if unknown. A final loss is the mean of the `last`
    steps at equal tokens, speeds are medians without the first step."""
    equal = equal_tokens(runs)
    rows: list[dict[str, Any]] = []
    for name, run in runs.items():
        figures = run.figures
        is_equal = np.isin(figures["tokens"], equal)
        curves = {key: figures[key][is_equal] for key in ("loss", "grad_norm")}
        final_loss = np.mean(curves["loss"][-last:])
        steady = {key: figures[key][1:] for key in ("tps", "mfu")}
        tps, mfu = (np.median(x) if x.size else math.nan for x in steady.values())

        if not rows:  # the run that all are compared with
            first, first_loss, first_tps = curves, final_loss, tps
        off = {key: 100 * np.max(np.abs(curves[key] / first[key] - 1)) for key in curves}
        values = (
            name,
            figures["step"][-1],
            figures["tokens"][-1],
            final_loss,
            run.validation_loss,
            100 * (final_loss / first_loss - 1),
            off["loss"],
            off["grad_norm"],
            tps,
            tps / first_tps,
            mfu,
        )
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def format_runs(runs: Runs, *, last: int, columns: Sequence[str] = tuple(COLUMNS)) -> str:
    """Format the comparison as a Markdown table."""

    def cell(value: Any, column: str) -> str:
        return "n/a" if value != value else COLUMNS[column].format(value)  # NaN

    tokens = equal_tokens(runs)
    rows = [[cell(row[column], column) for column in columns] for row in compare(runs, last=last)]
    table = format_columns([columns, *rows], right=range(1, len(columns)), markdown=True)
    return (
        f"At {len(tokens):,} equal token counts, the last one {tokens[-1]:,.0f}; "
        f"final loss: mean of the last {min(last, len(tokens))}.\n\n{table}"
    )


def format_seeds(runs: Runs, *, last: int) -> str:
    """Format the mean final loss of the runs that differ in their seed only, as a Markdown table;
    empty if no two runs do."""
    losses: dict[str, dict[str, float]] = defaultdict(dict)  # by settings and run
    for row, (name, run) in zip(compare(runs, last=last), runs.items(), strict=True):
        settings = {key: value for key, value in _compared(run).items() if key != SEED}
        losses[show(settings) if settings else name][name] = row["final loss"]
    if len(losses) == len(runs):
        return ""

    groups = {", ".join(group): np.array([*group.values()]) for group in losses.values()}
    first = next(iter(groups.values())).mean()
    rows = [
        [
            names,
            f"{group.mean():.4f}",
            f"{group.std(ddof=1):.4f}" if len(group) > 1 else "n/a",
            f"{100 * (group.mean() / first - 1):+.2f} %",
        ]
        for names, group in groups.items()
    ]
    headings = ["runs that differ in their seed only", "mean final loss", "deviation", "to first"]
    return format_columns([headings, *rows], right=range(1, 4), markdown=True)


def format_settings(runs: Runs) -> str:
    """Format the settings that differ between runs, as a Markdown table; empty if none do."""
    settings = {name: _compared(run) for name, run in runs.items()}
    keys = dict.fromkeys(key for values in settings.values() for key in values)
    columns = {key: [show(values.get(key)) for values in settings.values()] for key in keys}
    differing = {key: column for key, column in columns.items() if len(set(column)) > 1}
    rows = zip(settings, *differing.values(), strict=True)
    return format_columns([["run", *differing], *rows], markdown=True) if differing else ""


def _compared(run: Run) -> dict[str, Any]:
    """Return the settings by which runs are compared: not where a run is, nor what it is called."""
    return {key: value for key, value in run.settings.items() if not key.startswith("[job]")}


def format_comparison(runs: Runs, *, last: int) -> str:
    """Format everything that `compare` prints: figures, seeds, settings, and how to see curves."""
    parts = [format_runs(runs, last=last), format_seeds(runs, last=last), format_settings(runs)]
    parent = os.path.commonpath([run.folder.parent for run in runs.values()])
    parts.append(f"curves: {tensorboard_command(parent)}")
    return "\n\n".join(filter(None, parts))
