"""Where a run's records go: the console, a file with a line of JSON a step, and what else [metrics]
asks for."""

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from torchtitan_lite.config import MetricsConfig
from torchtitan_lite.files import replace_file
from torchtitan_lite.logger import logger

from .records import Numerics, Record, Summary, Writer, format_mfu
from .tensorboard_writer import TensorBoardWriter
from .wandb_writer import WandbWriter

_RED, _GREEN, _YELLOW, _BLUE, _MAGENTA, _CYAN = range(
    31, 37
)  # ANSI codes of the foreground colours


class ConsoleWriter:
    """One line of the log a step. The first holds compilation and warm-up, so it foretells nothing,
    and says so."""

    def __init__(self, *, total_steps: int, color: bool, approximate_mfu: bool = False) -> None:
        self._total_steps = total_steps
        self._approximate_mfu = approximate_mfu
        self._color = color
        self._warm_up = True

    def write(self, record: Record) -> None:
        """Log the step's line."""
        remaining_s = (self._total_steps - record.step) * record.step_time_s
        fields = (
            (_RED, self._step(record.step)),
            (_GREEN, f"loss {record.loss:.4f}"),
            (_YELLOW, f"grad_norm {record.grad_norm:.3g}"),
            *([(_RED, f"skipped {record.skipped_steps}")] if record.skipped_steps else []),
            (_BLUE, f"tps {record.tps:,.0f}"),
            (_CYAN, f"tflops {record.tflops:,.2f}"),
            (_MAGENTA, f"mfu {format_mfu(record.mfu, approximate=self._approximate_mfu)}"),
            (_YELLOW, f"mem {record.memory_gib:.1f}GiB"),
            (_BLUE, f"time {record.step_time_s:.3f}s (data {record.data_time_pct:.1f}%)"),
            (
                _GREEN,
                "warm-up" if self._warm_up else f"eta {timedelta(seconds=round(remaining_s))}",
            ),
        )
        self._warm_up = False
        logger.info("  ".join(self._paint(color, text) for color, text in fields))

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log a line of their own."""
        figures = "  ".join(f"{name} {value:.4f}" for name, value in scalars.items())
        logger.info(f"{self._paint(_RED, self._step(step))}  {figures}")

    def write_numerics(self, step: int, numerics: Numerics) -> None:
        """Log which casts lost most: the least SQNR, and the largest shares that became 0 or were
        cut off."""
        casts = {
            f"{role} of {kind}": figures
            for kind, roles in numerics.items()
            for role, figures in roles.items()
        }

        def worst(name: str, choose: Any) -> tuple[float, str]:
            cast = choose(casts, key=lambda cast: casts[cast][name])
            layer = casts[cast].get(f"{name}_layer")
            return casts[cast][name], cast if layer is None else f"{cast}, layer {layer}"

        sqnr_db, where = worst("sqnr_db", min)
        parts = [f"least SQNR {sqnr_db:.1f} dB ({where})"]
        for name in ("underflow", "saturation"):
            share, where = worst(name, max)
            if share:
                parts.append(f"{name} up to {share:.2%} ({where})")
        logger.info(f"{self._paint(_RED, self._step(step))}  float8 casts: {', '.join(parts)}")

    def flush(self) -> None:
        """Nothing is left to do: the log writes each line at once."""

    def close(self, summary: Summary | None) -> None:
        """As `flush`."""

    def _step(self, step: int) -> str:
        return f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"

    def _paint(self, color: int, text: str) -> str:
        return f"\033[{color}m{text}\033[0m" if self._color else text


def wants_color(*, disabled: bool) -> bool:
    """Whether the log is coloured: on a terminal or with FORCE_COLOR set, unless `disabled` or with
    NO_COLOR set."""
    if disabled or os.environ.get("NO_COLOR"):
        return False
    return sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))


class _JsonLines:
    """A file of lines of strict JSON, each with a step: a figure that is not finite is null. A
    subclass takes one sort of what writers get, and the rest is left out: every line has the same
    keys, and every step one line."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        """Open `path` to go on after step `resume_step`. Later lines of an earlier process, and one
        that it left torn, are dropped; the file is replaced in one move, so that a crash meanwhile
        loses nothing."""
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        replace_file(path, "".join(f"{line}\n" for line in lines if _step_of(line) <= resume_step))
        self._file = path.open("a", buffering=1)

    def write(self, record: Record) -> None:
        """It is left out."""

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """They are left out."""

    def write_numerics(self, step: int, numerics: Numerics) -> None:
        """They are left out."""

    def _append(self, fields: Mapping[str, Any]) -> None:
        """Add a line; it is with the operating system when this returns."""
        self._file.write(json.dumps(_finite(fields)) + "\n")

    def flush(self) -> None:
        """Have all lines on disk."""
        os.fsync(self._file.fileno())

    def close(self, summary: Summary | None) -> None:
        """Close the file."""
        self._file.close()


class JsonlWriter(_JsonLines):
    """A line for each record."""

    def write(self, record: Record) -> None:
        """Append the record's line."""
        self._append(asdict(record))


class NumericsWriter(_JsonLines):
    """A line for each step whose casts to float8 were measured."""

    def write_numerics(self, step: int, numerics: Numerics) -> None:
        """Append the step's line."""
        self._append({"step": step, "time": time.time(), "kinds": numerics})


def build_writers(
    metrics: MetricsConfig,
    *,
    dump_folder: Path,
    total_steps: int,
    resume_step: int,
    total_memory_gib: float | None,
    config_toml: str,
    hparams: Mapping[str, bool | float | str],
    numerics: bool,
    approximate_mfu: bool = False,
) -> list[Writer]:
    """The writers of a run's main rank, going on after step `resume_step` (0: a new run) in
    `dump_folder`. `hparams` are the values to compare runs by, under the same names in each; with
    `numerics` there will be such to write; `approximate_mfu` marks each mfu on the console. Raises
    ConfigError where wandb cannot start."""
    writers: list[Writer] = [
        ConsoleWriter(
            total_steps=total_steps,
            color=wants_color(disabled=metrics.disable_color_printing),
            approximate_mfu=approximate_mfu,
        ),
        JsonlWriter(dump_folder / "metrics.jsonl", resume_step=resume_step),
    ]
    numerics_file = dump_folder / "numerics.jsonl"
    if numerics or numerics_file.exists():  # one of an earlier process has to be cut
        writers.append(NumericsWriter(numerics_file, resume_step=resume_step))
    if metrics.enable_tensorboard:
        writers.append(
            TensorBoardWriter(
                dump_folder / metrics.save_tb_folder,
                resume_step=resume_step,
                total_memory_gib=total_memory_gib,
                config_toml=config_toml,
                hparams=hparams,
                numerics=numerics,
            )
        )
    if metrics.enable_wandb:
        writers.append(WandbWriter(dump_folder, config_toml=config_toml, hparams=hparams))
    return writers


def _finite(value: Any) -> Any:
    """`value` with None for every number in it that is not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: str) -> float:
    """The step of a line of the file; past every step if the line is no record."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return math.inf
