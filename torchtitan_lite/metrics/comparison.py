"""Compare runs at equal tokens, from their metrics.jsonl.

Equal tokens are the token counts at which every run has logged a step; nothing is interpolated.
"""

import errno
import functools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.tables import format_columns

COLUMNS = {
    "run": "{}",
    "steps": "{:,.0f}",
    "tokens": "{:,.0f}",
    "final loss": "{:.4f}",
    "to first": "{:+.2f} %",
    "loss at most off": "{:.2f} %",
    "grad norm at most off": "{:.2f} %",
    "tps": "{:,.0f}",
    "times first": "{:.2f}",
    "mfu": "{:.1f} %",
}
"""Format of each column of a comparison."""


class _Record(BaseModel, strict=True, allow_inf_nan=False):
    """The figures read of a line of metrics.jsonl."""

    step: float
    tokens: float
    loss: float | None
    grad_norm: float | None
    tps: float
    mfu: float | None


Runs = Mapping[str, Mapping[str, NDArray[np.float64]]]
"""For each run the values of each figure of a _Record, one per step; NaN if unknown."""


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
    return {str(file.parent.relative_to(parent)): _read_records(file) for file in files}


def _read_records(path: Path) -> dict[str, NDArray[np.float64]]:
    """Read a metrics.jsonl. An incomplete last line, as a live run may have, is left out. Raises
    ConfigError if the file cannot be read or has no step."""
    try:
        if path.stat() and not path.is_file():  # reading a pipe would block
            raise OSError(errno.EINVAL, "is not a file")
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        reason = error.strerror
        raise ConfigError(f"{path}: {reason}; name a run folder, or its metrics.jsonl.") from error

    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(list(_Record.model_validate_json(line).model_dump().values()))
        except ValidationError as error:
            if line.endswith(b"\n"):  # not the line that a live run is writing
                shown = line[:60].decode(errors="replace").rstrip()
                raise ConfigError(
                    f"{path}: line {number} is not the record of a step: {shown!r}"
                ) from error
    if not records:
        raise ConfigError(f"{path}: no step has been logged yet.")
    return dict(zip(_Record.model_fields, np.array(records, dtype=float).T, strict=True))


def equal_tokens(runs: Runs) -> NDArray[np.float64]:
    """Return the token counts at which all runs logged, in order. Raises ConfigError if none is."""
    tokens = {name: figures["tokens"] for name, figures in runs.items()}
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
    for name, figures in runs.items():
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
