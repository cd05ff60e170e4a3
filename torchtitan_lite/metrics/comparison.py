"""Runs held against each other at equal tokens, from their metrics.jsonl: figures, a table and a
picture.

Equal tokens are the token counts that every run has logged; nothing is interpolated. T is their
number.
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

Series = NDArray[np.float64]

FIGURES = ("step", "tokens", "loss", "grad_norm", "tps", "mfu")
"""What is read of each record; a figure that is null there is NaN here."""
PICTURE_TYPES = (".png", ".svg")
COLUMNS: dict[str, Callable[["Comparison"], str]] = {
    "run": lambda row: row.name,
    "steps": lambda row: f"{row.steps:,}",
    "tokens": lambda row: f"{row.tokens:,}",
    "final loss": lambda row: _show(row.final_loss, ".4f"),
    "to first": lambda row: _show(row.final_loss_pct, "+.2f", " %"),
    "loss at most off": lambda row: _show(row.largest_loss_pct, ".2f", " %"),
    "grad norm at most off": lambda row: _show(row.largest_grad_norm_pct, ".2f", " %"),
    "tps": lambda row: _show(row.tps, ",.0f"),
    "times first": lambda row: _show(row.tps_ratio, ".2f"),
    "mfu": lambda row: _show(row.mfu, ".1f", " %"),
}
"""Of the table: heading, and what stands under it."""
STYLE: Any = {  # matplotlib names each key
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "lines.linewidth": 1.2,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "comparison",  # or ids are random
}


@dataclass(frozen=True)
class Run:
    """What a run has logged: for each of FIGURES its values, one a record."""

    name: str
    """The run folder's, and of those above it what tells it from the others."""
    figures: dict[str, Series]

    @property
    def tokens(self) -> Series:
        """Trained on by the end of each step logged."""
        return self.figures["tokens"]

    def at(self, tokens: Series, figure: str) -> Series:
        """[T] the values of `figure` at some of the run's token counts."""
        return self.figures[figure][np.isin(self.tokens, tokens)]


@dataclass(frozen=True)
class Comparison:
    """A run beside the first of those compared. A figure that is not known is NaN."""

    name: str
    steps: int
    """The last one logged, and below its tokens."""
    tokens: int
    final_loss: float
    """Mean over the last steps at equal tokens, nat."""
    final_loss_pct: float
    """Percent that it is above the first run's."""
    largest_loss_pct: float
    """Largest distance to the first run's loss at equal tokens, in percent of that."""
    largest_grad_norm_pct: float
    """The same of the gradient norm."""
    tps: float
    """Median without the first step."""
    tps_ratio: float
    """To the first run's."""
    mfu: float
    """Median percent without the first step."""


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs of `paths`, run folders or their metrics.jsonl. Raises ConfigError if there are not
    two different ones, or if one of them cannot be read."""
    files = [(path if path.is_file() else path / "metrics.jsonl").absolute() for path in paths]
    if len(set(files)) < len(files) or len(files) < 2:
        named = " ".join(map(str, paths))
        raise ConfigError(
            f"a comparison is of two different runs or more, and these were named: {named or 'none'}."
        )
    above = os.path.commonpath([file.parents[1] for file in files])
    return [Run(str(file.parent.relative_to(above)), _read_figures(file)) for file in files]


def _read_figures(path: Path) -> dict[str, Series]:
    """The figures of a metrics.jsonl; a last line that is torn, as a live run's may be, is left
    out. Raises ConfigError if it cannot be read, or has no step."""
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
            rows.append(
                [
                    math.nan if record[figure] is None else float(record[figure])
                    for figure in FIGURES
                ]
            )
        except (ValueError, TypeError, KeyError) as error:
            if number < len(lines):
                raise ConfigError(
                    f"{path}: line {number} is no record of a step: {line[:60]!r}"
                ) from error
    if not rows:
        raise ConfigError(f"{path}: no step has been logged yet.")
    return dict(zip(FIGURES, np.array(rows).T, strict=True))


def equal_tokens(runs: Sequence[Run]) -> Series:
    """[T] the token counts that all `runs` have logged, in order. Raises ConfigError if there are
    none."""
    shared: Series = functools.reduce(np.intersect1d, (run.tokens for run in runs))
    if not shared.size:
        spans = (f"{run.name} {run.tokens[0]:,.0f} to {run.tokens[-1]:,.0f}" for run in runs)
        raise ConfigError(f"at no count of tokens have all runs logged a step: {', '.join(spans)}.")
    return shared


def compare(runs: Sequence[Run], *, last: int) -> list[Comparison]:
    """Each of `runs` beside the first; a final loss is the mean over the `last` steps at equal
    tokens. Raises ConfigError if no tokens are equal."""
    tokens = equal_tokens(runs)
    first = runs[0]

    def final_loss(run: Run) -> float:
        return float(np.mean(run.at(tokens[-last:], "loss")))

    def largest_pct(run: Run, figure: str) -> float:
        return float(
            np.max(np.abs(_percent_above(run.at(tokens, figure), first.at(tokens, figure))))
        )

    return [
        Comparison(
            name=run.name,
            steps=int(run.figures["step"][-1]),
            tokens=int(run.tokens[-1]),
            final_loss=final_loss(run),
            final_loss_pct=_percent_above(final_loss(run), final_loss(first)),
            largest_loss_pct=largest_pct(run, "loss"),
            largest_grad_norm_pct=largest_pct(run, "grad_norm"),
            tps=_median(run, "tps"),
            tps_ratio=_median(run, "tps") / _median(first, "tps"),
            mfu=_median(run, "mfu"),
        )
        for run in runs
    ]


def format_runs(runs: Sequence[Run], *, last: int, columns: Sequence[str] = tuple(COLUMNS)) -> str:
    """The comparison as a table in Markdown, some of COLUMNS, under a line about its tokens. Raises
    ConfigError if none are equal."""
    tokens = equal_tokens(runs)
    rows = [[COLUMNS[column](row) for column in columns] for row in compare(runs, last=last)]
    return (
        f"At {len(tokens):,} equal token counts, the last one {tokens[-1]:,.0f}; "
        f"final loss: mean of the last {min(last, len(tokens))}.\n\n{format_table(columns, rows)}"
    )


def format_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown whose columns are aligned also as plain text: the first to the left,
    numbers to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    aligns = ["<", *[">"] * (len(widths) - 1)]
    lines = [
        " | ".join(
            f"{cell:{align}{width}}"
            for cell, align, width in zip(cells, aligns, widths, strict=True)
        )
        for cells in (headings, *rows)
    ]
    rule = "|".join(
        "-" * (width + 1) + ("-" if align == "<" else ":")
        for align, width in zip(aligns, widths, strict=True)
    )
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])


def draw(runs: Sequence[Run], path: Path, *, last: int) -> None:
    """Write curves over tokens to `path`, a PNG or SVG: loss, the distance of its mean over `last`
    steps to the first run's, gradient norm, tps and mfu. Raises ConfigError for another kind of
    file, a missing folder, no matplotlib or no equal tokens."""
    if path.suffix not in PICTURE_TYPES:
        raise ConfigError(f"{path}: the picture's name must end in {' or '.join(PICTURE_TYPES)}.")
    if not path.parent.is_dir():
        raise ConfigError(
            f"{path}: there is no folder {path.parent} to write the picture to; make it first."
        )
    try:  # optional, and slow to import
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError('this needs matplotlib: pip install "torchtitan-lite[plots]"') from error

    shared = equal_tokens(runs)
    window = min(last, len(shared))
    smooth = {
        run.name: np.convolve(run.at(shared, "loss"), np.ones(window) / window, "valid")
        for run in runs
    }
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 13), dpi=110, facecolor="white", layout="constrained")
        figure.suptitle(f"{len(runs)} runs, the first of them {runs[0].name}")
        loss, difference, grad_norm, tps, mfu = figure.subplots(
            5, sharex=True, height_ratios=(3, 3, 2, 2, 2)
        )
        for run in runs:
            loss.plot(run.tokens, run.figures["loss"], label=run.name)
            difference.plot(
                shared[window - 1 :], _percent_above(smooth[run.name], smooth[runs[0].name])
            )
            grad_norm.plot(run.tokens, run.figures["grad_norm"])
            for axes, name in ((tps, "tps"), (mfu, "mfu")):
                axes.plot(run.tokens[1:], run.figures[name][1:])  # the first step is warm-up
        loss.set(title="Loss", ylabel="nat")
        difference.set(
            title=f"Loss, mean of {window} steps, above {runs[0].name}'s at equal tokens",
            ylabel="percent",
        )
        grad_norm.set(title="Norm of the gradient", yscale="log")
        tps.set(title="Tokens per second per device", ylabel="tokens/s", ylim=(0, None))
        mfu.xaxis.set_major_formatter("{x:,.0f}")
        mfu.set(title="MFU", ylabel="percent", ylim=(0, None), xlabel="tokens trained on")
        if all(np.isnan(run.figures["mfu"]).all() for run in runs):
            mfu.text(0.5, 0.5, "n/a", transform=mfu.transAxes)
        figure.legend(loc="outside lower center", ncols=3)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _percent_above(value: Any, reference: Any) -> Any:
    """Percent by which floats, or series of them, are above others."""
    return 100 * (value / reference - 1)


def _median(run: Run, figure: str) -> float:
    """Of the figure's values without the first, NaN if that is the only one."""
    values = run.figures[figure][1:]
    return float(np.median(values)) if values.size else math.nan


def _show(value: float, form: str, unit: str = "") -> str:
    return "n/a" if math.isnan(value) else f"{value:{form}}{unit}"
