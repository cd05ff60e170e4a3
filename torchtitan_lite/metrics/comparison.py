"""Compare runs at equal tokens, from their metrics.jsonl: figures, a table and a picture.

Equal tokens are the token counts at which every run has logged a step; nothing is interpolated. T
is their number.
"""

import functools
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.tables import format_columns

Series = NDArray[np.float64]

FIGURES = ("step", "tokens", "loss", "grad_norm", "tps", "mfu")
"""The figures read of each record; null becomes NaN."""
STYLE: Any = {  # mypy knows matplotlib's keys by name only
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "lines.linewidth": 1.2,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "comparison",  # otherwise ids are random
}


@dataclass(frozen=True)
class LoggedRun:
    """The records of a run that is compared with others."""

    name: str
    """Name of the run folder, with the parent folders in which the runs differ."""
    figures: dict[str, Series]
    """For each of FIGURES its values, one per record."""
    equal_tokens: Series
    """Token counts [T] that all runs have logged, in order."""

    def at_equal_tokens(self, figure: str) -> Series:
        """Return the values [T] of `figure` at equal tokens."""
        return self.figures[figure][np.isin(self.figures["tokens"], self.equal_tokens)]

    def final_loss(self, last: int) -> float:
        """Return the mean loss of the `last` steps."""
        return float(np.mean(self.at_equal_tokens("loss")[-last:]))

    def percent_off(self, first: "LoggedRun", figure: str) -> float:
        """Return the largest distance of `figure` from the first run."""
        percent = percent_above(self.at_equal_tokens(figure), first.at_equal_tokens(figure))
        return float(np.max(np.abs(percent)))

    def median(self, figure: str) -> float:
        """Return the median of `figure` without the first step, NaN if there is no other."""
        values = self.figures[figure][1:]
        return float(np.median(values)) if values.size else math.nan


def percent_above(value: Any, reference: Any) -> Any:
    """Return by how many percent floats, or series of them, are above others."""
    return 100 * (value / reference - 1)


COLUMNS: dict[str, tuple[str, Callable[[LoggedRun, LoggedRun, int], Any]]] = {
    "run": ("{}", lambda run, first, last: run.name),
    "steps": ("{:,}", lambda run, first, last: int(run.figures["step"][-1])),
    "tokens": ("{:,}", lambda run, first, last: int(run.figures["tokens"][-1])),
    "final loss": ("{:.4f}", lambda run, first, last: run.final_loss(last)),
    "to first": (
        "{:+.2f} %",
        lambda run, first, last: percent_above(run.final_loss(last), first.final_loss(last)),
    ),
    "loss at most off": ("{:.2f} %", lambda run, first, last: run.percent_off(first, "loss")),
    "grad norm at most off": (
        "{:.2f} %",
        lambda run, first, last: run.percent_off(first, "grad_norm"),
    ),
    "tps": ("{:,.0f}", lambda run, first, last: run.median("tps")),
    "times first": ("{:.2f}", lambda run, first, last: run.median("tps") / first.median("tps")),
    "mfu": ("{:.1f} %", lambda run, first, last: run.median("mfu")),
}
"""Format of each column of a comparison, and its value from the run, the first run, and the number
of steps that a final loss is the mean of; NaN if unknown."""


def read_runs(paths: Sequence[Path]) -> list[LoggedRun]:
    """Read the runs at `paths`, run folders or their metrics.jsonl.

    Raises ConfigError if there are not two different ones, if one cannot be read, or if no token
    count is equal.
    """
    files = [(path if path.is_file() else path / "metrics.jsonl").absolute() for path in paths]
    if len(set(files)) < len(files) or len(files) < 2:
        named = " ".join(map(str, paths)) or "none"
        raise ConfigError(f"a comparison needs two different runs or more, and got: {named}.")
    parent = os.path.commonpath([file.parents[1] for file in files])
    names = [str(file.parent.relative_to(parent)) for file in files]
    runs = [_read_figures(file) for file in files]

    equal: Series = functools.reduce(np.intersect1d, [figures["tokens"] for figures in runs])
    if not equal.size:
        spans = [
            f"{name} {figures['tokens'][0]:,.0f} to {figures['tokens'][-1]:,.0f}"
            for name, figures in zip(names, runs, strict=True)
        ]
        raise ConfigError(f"there is no token count at which all runs logged: {', '.join(spans)}.")
    return [LoggedRun(name, figures, equal) for name, figures in zip(names, runs, strict=True)]


def _read_figures(path: Path) -> dict[str, Series]:
    """Read FIGURES from a metrics.jsonl. An incomplete last line, as a live run may have, is left
    out. Raises ConfigError if the file cannot be read or has no step."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; name a run folder, or its metrics.jsonl."
        ) from error

    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            record: dict[str, Any] = json.loads(line)
            values = [record[figure] for figure in FIGURES]
            rows.append([math.nan if value is None else float(value) for value in values])
        except (ValueError, TypeError, KeyError) as error:
            if number < len(lines):  # not the line that a live run is writing
                raise ConfigError(
                    f"{path}: line {number} is not the record of a step: {line[:60]!r}"
                ) from error
    if not rows:
        raise ConfigError(f"{path}: no step has been logged yet.")
    return dict(zip(FIGURES, np.array(rows).T, strict=True))


def compare(runs: Sequence[LoggedRun], *, last: int) -> list[dict[str, Any]]:
    """Return each run's values of COLUMNS."""
    return [{name: of(run, runs[0], last) for name, (_, of) in COLUMNS.items()} for run in runs]


def format_runs(
    runs: Sequence[LoggedRun], *, last: int, columns: Sequence[str] = tuple(COLUMNS)
) -> str:
    """Format the comparison as a Markdown table."""

    def cell(value: Any, column: str) -> str:
        unknown = isinstance(value, float) and math.isnan(value)
        return "n/a" if unknown else COLUMNS[column][0].format(value)

    tokens = runs[0].equal_tokens
    rows = [[cell(row[column], column) for column in columns] for row in compare(runs, last=last)]
    table = format_columns([columns, *rows], right=range(1, len(columns)), markdown=True)
    return (
        f"At {len(tokens):,} equal token counts, the last one {tokens[-1]:,.0f}; "
        f"final loss: mean of the last {min(last, len(tokens))}.\n\n{table}"
    )


def draw(runs: Sequence[LoggedRun], path: Path, *, last: int) -> None:
    """Write curves over tokens to `path`; losses are compared by their means over `last` steps.
    Raises ConfigError for another file type, a missing folder, and without matplotlib."""
    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"{path}: the picture's name must end in .png or .svg.")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}; make it first.")
    # Slow to import, and optional.
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError('this needs matplotlib: pip install "torchtitan-lite[plots]"') from error

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 13), dpi=110, facecolor="white", layout="constrained")
        figure.suptitle(f"{len(runs)} runs, the first of them {runs[0].name}")
        panels = figure.subplots(5, sharex=True, height_ratios=(3, 3, 2, 2, 2))
        _draw_curves(panels, runs, window=min(last, len(runs[0].equal_tokens)))
        figure.legend(loc="outside lower center", ncols=3)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_curves(panels: Any, runs: Sequence[LoggedRun], *, window: int) -> None:
    """Draw all runs into the five panels. Differences are between means over `window` steps."""
    loss, difference, grad_norm, tps, mfu = panels
    weights = np.ones(window) / window
    smooth = [np.convolve(run.at_equal_tokens("loss"), weights, "valid") for run in runs]

    for run, means in zip(runs, smooth, strict=True):
        figures, tokens = run.figures, run.figures["tokens"]
        loss.plot(tokens, figures["loss"], label=run.name)
        difference.plot(run.equal_tokens[window - 1 :], percent_above(means, smooth[0]))
        grad_norm.plot(tokens, figures["grad_norm"])
        # The first step is warm-up.
        tps.plot(tokens[1:], figures["tps"][1:])
        mfu.plot(tokens[1:], figures["mfu"][1:])

    loss.set(title="Loss", ylabel="nat")
    title = f"Loss, mean of {window} steps, above {runs[0].name}'s at equal tokens"
    difference.set(title=title, ylabel="percent")
    grad_norm.set(title="Norm of the gradient", yscale="log")
    tps.set(title="Tokens per second per device", ylabel="tokens/s", ylim=(0, None))
    mfu.set(title="MFU", ylabel="percent", ylim=(0, None), xlabel="tokens trained on")
    mfu.xaxis.set_major_formatter("{x:,.0f}")
    if all(np.isnan(run.figures["mfu"]).all() for run in runs):
        mfu.text(0.5, 0.5, "n/a", transform=mfu.transAxes)
