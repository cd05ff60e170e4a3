"""Build the writers of a run's records; those of the console and of JSON lines."""

import itertools
import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.files import replace_file
from torchtitan_lite.base.jsonfile import read_lines, strict_json
from torchtitan_lite.base.logger import logger
from torchtitan_lite.base.terminal import clean
from torchtitan_lite.catalog.run_files import RECORDS, RecordKind
from torchtitan_lite.config import MetricsConfig

from .figures import FINAL_STEPS, STEP_FIGURES, CastErrors, StepRecord, Summary, Writer
from .tensorboard_writer import TensorBoardWriter
from .wandb_writer import WandbWriter
from .written_run import WrittenRun

COLORS = (31, 32, 33, 34, 35, 36)
"""ANSI codes of the foreground colours from red to cyan."""
PREFIX_COLUMNS = len("[rank0] 00:00:00 ")
"""Of the launcher and the logger, before each line of the console."""
DROPPED = ("data_time_pct", "memory_gib", "grad_norm", "tflops")
"""Figures that are left out, in this order, of a line that is longer than a terminal is wide."""
CURVE_WRITERS: dict[str, type[TensorBoardWriter | WandbWriter]] = {
    writer.spare: writer for writer in (TensorBoardWriter, WandbWriter)
}
"""The classes of catalog.run_files.WRITERS, by name."""


def build_writers(metrics: MetricsConfig, run: WrittenRun) -> list[Writer]:
    """Open a rank's writers. Raises ConfigError if one cannot start, or if a writer needs a file
    where there is a folder, or the reverse."""
    files: dict[RecordKind, Path] = {name: run.folder / f"{name}.jsonl" for name in RECORDS}
    for path in files.values():
        _check_kind(path, "file")
    for row in metrics.writers:
        _check_kind(run.folder / metrics.folder_of(row), "folder")

    writers: list[Writer] = []
    if run.rank == 0:
        color = wants_color(disabled=metrics.disable_color_printing)
        columns = shutil.get_terminal_size((0, 0)).columns or None if on_terminal() else None
        writers.append(ConsoleWriter(total_steps=run.total_steps, color=color, columns=columns))
        # An existing file is cut at the resumed step, even if this run writes nothing into it.
        for kind, path in files.items():
            if kind in run.records or path.exists():
                writers.append(JsonlWriter(path, resume_step=run.resume_step, kind=kind))

    # Curves, of each rank in a folder of its own or of rank 0 alone.
    own = f"rank_{run.rank}" if metrics.save_for_all_ranks else ""
    for row in metrics.writers:
        try:
            writers.append(CURVE_WRITERS[row.name](run, folder=metrics.folder_of(row), own=own))
        except OSError as error:
            warn_left_out(row.name, error)
    return writers


def check_writers_installed(metrics: MetricsConfig) -> None:
    """Raise ConfigError if a writer is turned on whose package is not installed."""
    # wandb creates a folder "wandb" where it runs, which Python finds as a namespace package.
    for row in metrics.writers:
        if row.package and getattr(find_spec(row.package), "origin", None) is None:
            raise ConfigError(
                f"[metrics] {row.key} = true needs {row.package}, which is not installed: "
                f'pip install "torchtitan-lite[{row.package}]", or set it to false.'
            )


def _check_kind(path: Path, kind: str) -> None:
    if os.path.lexists(path) and not (path.is_file() if kind == "file" else path.is_dir()):
        raise ConfigError(
            f"{path} is not a {kind}, and a run keeps one there; move it elsewhere, or name "
            "another [job] dump_folder."
        )


def warn_left_out(name: str, error: Exception) -> None:
    """Log that the run continues without a writer."""
    reason = f"{type(error).__name__}: {error}"
    logger.warning(f"{name} failed and is disabled for the rest of the run: {reason}")


# ----- Console -----


class ConsoleWriter(Writer):
    """Log one line per step. The first one says "warm-up" instead of the time left."""

    def __init__(self, *, total_steps: int, color: bool, columns: int | None = None) -> None:
        """`columns` is the width of the terminal, if there is one, which a step's line fits."""
        self._total_steps, self._color, self._warm_up = total_steps, color, True
        self._columns = math.inf if columns is None else columns - PREFIX_COLUMNS

    def write(self, record: StepRecord) -> None:
        remaining_s = (self._total_steps - record.step) * record.step_time_s
        eta = "warm-up" if self._warm_up else f"eta {timedelta(seconds=round(remaining_s))}"
        self._warm_up = False
        figures = {
            name: figure.console(record) for name, figure in STEP_FIGURES.items() if figure.console
        }
        for name in DROPPED:
            shown = filter(None, (self._head(record.step), *figures.values(), eta))
            if len("  ".join(shown)) > self._columns:
                figures[name] = ""
        self._log(record.step, *figures.values(), eta)

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self._log(step, *(f"{name} {value:.4f}" for name, value in scalars.items()))

    def write_numerics(self, step: int, casts: CastErrors) -> None:
        """Log the worst casts: the lowest SQNR, the largest underflow and saturation."""
        by_cast = [
            (figures, f"{role} of {kind}")
            for kind, roles in casts.items()
            for role, figures in roles.items()
        ]

        def worst(name: str, choose: Any) -> tuple[float, str]:
            figures, cast = choose(by_cast, key=lambda row: row[0][name])
            layer = figures.get(f"{name}_layer")
            return figures[name], cast if layer is None else f"{cast}, layer {layer}"

        sqnr_db, where = worst("sqnr_db", min)
        parts = [f"least SQNR {sqnr_db:.1f} dB ({where})"]
        for name in ("underflow", "saturation"):
            share, where = worst(name, max)
            if share:
                parts.append(f"{name} up to {share:.2%} ({where})")
        self._log(step, f"float8 casts: {', '.join(parts)}")

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log the beginning of each text."""
        for sample in samples:
            self._log(step, f"sample {sample['prompt'][:20]!r}: {sample['text'][:40]!r}")

    def _head(self, step: int) -> str:
        width = len(str(self._total_steps))
        return f"step {step:>{width}}/{self._total_steps}"

    def _log(self, step: int, *texts: str) -> None:
        """Log the step and the texts that are not empty, each in its own colour."""
        painted = [
            f"\033[{color}m{clean(text)}\033[0m" if self._color else text
            for color, text in zip(
                itertools.cycle(COLORS), (self._head(step), *texts), strict=False
            )
            if text
        ]
        logger.info("  ".join(painted), extra={"clean": True} if self._color else None)


def on_terminal() -> bool:
    """Return whether a terminal shows the log: directly, or as the launcher says by FORCE_COLOR."""
    return sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))


def wants_color(*, disabled: bool) -> bool:
    """Return whether to colour the log: on a terminal, not with NO_COLOR."""
    return on_terminal() and not disabled and not os.environ.get("NO_COLOR")


# ----- JSON lines -----


class JsonlWriter(Writer):
    """A file with lines of strict JSON."""

    def __init__(self, path: Path, *, resume_step: int, kind: RecordKind = "metrics") -> None:
        """Open `path`, and drop unfinished lines and lines after `resume_step`. The file is
        replaced atomically, so that a crash loses nothing."""
        lines = read_lines(path) if path.exists() else ()
        schema = _LossLine if kind == "metrics" else _Line
        kept = [line.rstrip() + b"\n" for line in lines if _step_of(line, schema) <= resume_step]
        replace_file(path, b"".join(kept))
        self._file = path.open("a", buffering=1)
        self._kind = kind

    def write(self, record: StepRecord) -> None:
        if self._kind == "metrics":
            self._append(record.to_json())

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._kind == "validation" and "validation_loss" in scalars:
            loss = scalars["validation_loss"]
            self._append({"step": step, "time": time.time(), "validation_loss": loss})

    def write_numerics(self, step: int, casts: CastErrors) -> None:
        if self._kind == "numerics":
            self._append({"step": step, "time": time.time(), "kinds": casts})

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        for sample in samples if self._kind == "samples" else ():
            self._append({"step": step, "time": time.time(), **sample})

    def _append(self, fields: Mapping[str, Any]) -> None:
        """Append a line, and pass it to the operating system."""
        self._file.write(strict_json(fields) + "\n")

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self, summary: Summary | None) -> None:
        self._file.close()


class _Line(BaseModel):
    step: int


class _LossLine(_Line):
    loss: float | None


def last_losses(dump_folder: Path) -> list[float]:
    """Return the losses of the last FINAL_STEPS steps in a run's metrics.jsonl, which a writer has
    opened; NaN for those that are not finite."""
    lines = deque(read_lines(dump_folder / "metrics.jsonl"), maxlen=FINAL_STEPS)
    losses = (_LossLine.model_validate_json(line).loss for line in lines)
    return [math.nan if loss is None else loss for loss in losses]


def has_validation(dump_folder: Path, step: int) -> bool:
    """Return whether a run's validation.jsonl, which a writer has opened, has a step's loss."""
    lines = read_lines(dump_folder / "validation.jsonl")
    return any(_step_of(line, _Line) == step for line in lines)


def _step_of(line: bytes, schema: type[_Line]) -> float:
    """Return the step of a line, or infinity if it is not valid."""
    try:
        return schema.model_validate_json(line, strict=True).step
    except ValidationError:
        return math.inf
