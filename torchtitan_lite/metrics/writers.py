"""Where a run's records go: the console, JSON lines, and whatever else [metrics] asks for."""

import itertools
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from torchtitan_lite.config import MetricsConfig
from torchtitan_lite.files import replace_file
from torchtitan_lite.logger import logger

from .figures import STEP_FIGURES, CastErrors, StepRecord, Summary, Writer
from .tensorboard_writer import TensorBoardWriter
from .wandb_writer import WandbWriter

_COLORS = (31, 32, 33, 34, 35, 36)
"""ANSI codes of the foreground colours from red to cyan."""


class ConsoleWriter(Writer):
    """Log one line per step. The first is marked as warm-up, so it has no estimated end."""

    def __init__(self, *, total_steps: int, color: bool) -> None:
        self._total_steps = total_steps
        self._color = color
        self._warm_up = True

    def write(self, record: StepRecord) -> None:
        remaining_s = (self._total_steps - record.step) * record.step_time_s
        eta = "warm-up" if self._warm_up else f"eta {timedelta(seconds=round(remaining_s))}"
        self._warm_up = False
        figures = [figure.console(record) for figure in STEP_FIGURES.values() if figure.console]
        self._log(record.step, *figures, eta)

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self._log(step, *(f"{name} {value:.4f}" for name, value in scalars.items()))

    def write_numerics(self, step: int, casts: CastErrors) -> None:
        """Log which casts lost most: the lowest SQNR, the largest underflow and saturation."""
        by_cast = {
            f"{role} of {kind}": figures
            for kind, roles in casts.items()
            for role, figures in roles.items()
        }

        def worst(name: str, choose: Any) -> tuple[float, str]:
            cast = choose(by_cast, key=lambda cast: by_cast[cast][name])
            layer = by_cast[cast].get(f"{name}_layer")
            return by_cast[cast][name], cast if layer is None else f"{cast}, layer {layer}"

        sqnr_db, where = worst("sqnr_db", min)
        parts = [f"least SQNR {sqnr_db:.1f} dB ({where})"]
        for name in ("underflow", "saturation"):
            share, where = worst(name, max)
            if share:
                parts.append(f"{name} up to {share:.2%} ({where})")
        self._log(step, f"float8 casts: {', '.join(parts)}")

    def _log(self, step: int, *texts: str) -> None:
        """Log the texts that are not empty, after the step, each in a colour of its own."""
        width = len(str(self._total_steps))
        texts = (f"step {step:>{width}}/{self._total_steps}", *texts)
        painted = [
            f"\033[{color}m{text}\033[0m" if self._color else text
            for color, text in zip(itertools.cycle(_COLORS), texts, strict=False)
            if text
        ]
        logger.info("  ".join(painted))


def wants_color(*, disabled: bool) -> bool:
    """Return whether to colour the log: on a terminal or with FORCE_COLOR, not with NO_COLOR."""
    if disabled or os.environ.get("NO_COLOR"):
        return False
    return sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))


class JsonlWriter(Writer):
    """A file with one line of strict JSON per step, non-finite numbers as null.

    A line is a step's record, or with `numerics` the errors of its casts to float8.
    """

    def __init__(self, path: Path, *, resume_step: int, numerics: bool = False) -> None:
        """Open `path`, and drop lines after `resume_step` and an unfinished one. The file is
        replaced in one move, so that a crash meanwhile loses nothing."""
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        replace_file(path, "".join(f"{line}\n" for line in lines if _step_of(line) <= resume_step))
        self._file = path.open("a", buffering=1)
        self._numerics = numerics

    def write(self, record: StepRecord) -> None:
        if not self._numerics:
            self._append(record.to_json())

    def write_numerics(self, step: int, casts: CastErrors) -> None:
        if self._numerics:
            self._append({"step": step, "time": time.time(), "kinds": casts})

    def _append(self, fields: Mapping[str, Any]) -> None:
        """Append a line; the operating system has it when this returns."""
        # Python writes NaN and Infinity, which are not JSON. They are read as None.
        strict = json.loads(json.dumps(fields), parse_constant=lambda _: None)
        self._file.write(json.dumps(strict) + "\n")

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self, summary: Summary | None) -> None:
        self._file.close()


def _step_of(line: str) -> float:
    """Return the step of a line, or infinity if it is not a valid line."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError):
        return math.inf


def build_writers(
    metrics: MetricsConfig,
    *,
    dump_folder: Path,
    total_steps: int,
    resume_step: int,
    config_toml: str,
    hparams: Mapping[str, bool | float | str],
    numerics: bool,
) -> list[Writer]:
    """Open the writers of a run's main rank, to continue after `resume_step` (0: a new run).

    `hparams` are the values to compare runs by, with the same names in each run. `numerics` says
    whether casts to float8 will be measured. Raises ConfigError if wandb cannot start.
    """
    color = wants_color(disabled=metrics.disable_color_printing)
    writers: list[Writer] = [
        ConsoleWriter(total_steps=total_steps, color=color),
        JsonlWriter(dump_folder / "metrics.jsonl", resume_step=resume_step),
    ]

    # A file that an earlier process left is cut at the resumed step, also if nothing is measured.
    numerics_file = dump_folder / "numerics.jsonl"
    if numerics or numerics_file.exists():
        writers.append(JsonlWriter(numerics_file, resume_step=resume_step, numerics=True))

    if metrics.enable_tensorboard:
        folder = dump_folder / metrics.save_tb_folder
        writers.append(
            TensorBoardWriter(
                folder,
                resume_step=resume_step,
                config_toml=config_toml,
                hparams=hparams,
                numerics=numerics,
            )
        )
    if metrics.enable_wandb:
        writers.append(WandbWriter(dump_folder, config_toml=config_toml, hparams=hparams))
    return writers
