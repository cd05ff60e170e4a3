"""Build the writers of a run's records; those of the console and of JSON lines."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.files import replace_file
from torchtitan_lite.base.jsonfile import strict_json
from torchtitan_lite.base.logger import logger
from torchtitan_lite.base.outside import check_outside, load_object
from torchtitan_lite.catalog.run_files import RECORDS, RecordKind
from torchtitan_lite.config import MetricsConfig

from .base_writer import Writer, WrittenRun
from .figures import CastErrors, StepRecord
from .records import read_records
from .summary import Summary
from .tensorboard_writer import TensorBoardWriter
from .wandb_writer import WandbWriter


def build_writers(metrics: MetricsConfig, run: WrittenRun) -> list[Writer]:
    """Open a rank's writers; none but rank 0's without [metrics] save_for_all_ranks. Raises
    ConfigError if one cannot start."""
    writers: list[Writer] = []
    if run.rank == 0:
        writers.append(ConsoleWriter(total_steps=run.total_steps))
        writers.append(JsonlWriter(run.folder, resume_step=run.resume_step))
    elif not metrics.save_for_all_ranks:
        return []

    # Curves, of each rank in a folder of its own or of rank 0 alone. A run continues without those
    # whose files cannot be opened.
    own = f"rank_{run.rank}" if metrics.save_for_all_ranks else ""
    if metrics.enable_tensorboard:
        folder = run.folder / metrics.save_tb_folder / own
        writers.append(TensorBoardWriter(run, folder=folder))
    try:
        if metrics.enable_wandb:
            writers.append(WandbWriter(run, own=own))
    except OSError as error:
        warn_left_out(WandbWriter.spare, error)
    for name in metrics.writers:
        writer = load_object("[metrics] writers", name)(run)
        fits = isinstance(writer, Writer)
        check_outside("[metrics] writers", name, fits, "must be a subclass of Writer")
        writers.append(writer)
    return writers


def check_writers_installed(metrics: MetricsConfig) -> None:
    """Raise ConfigError if a writer is turned on whose package is not installed."""
    # wandb creates a folder "wandb" where it runs, which Python finds as a namespace package.
    if metrics.enable_wandb and getattr(find_spec("wandb"), "origin", None) is None:
        raise ConfigError(
            "[metrics] enable_wandb = true needs wandb, which is not installed: "
            'pip install "torchtitan-lite[wandb]", or set it to false.'
        )


def warn_left_out(name: str, error: Exception) -> None:
    """Log that the run continues without a writer."""
    reason = f"{type(error).__name__}: {error}"
    logger.warning(f"{name} failed and is disabled for the rest of the run: {reason}")


# ----- Console -----


class ConsoleWriter(Writer):
    """Log one line per step. The first one says "warm-up" instead of the time left."""

    def __init__(self, *, total_steps: int) -> None:
        self._total_steps, self._warm_up = total_steps, True

    def write(self, record: StepRecord) -> None:
        remaining_s = (self._total_steps - record.step) * record.step_time_s
        eta = "warm-up" if self._warm_up else f"eta {timedelta(seconds=round(remaining_s))}"
        self._warm_up = False
        self._log(record.step, *_describe(record), eta)

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self._log(step, *(f"{name} {value:.4f}" for name, value in scalars.items()))

    def write_numerics(self, step: int, casts: CastErrors) -> None:
        """Log the cast with the lowest SQNR."""
        sqnr_db, cast, layer = min(
            (figures["sqnr_db"], f"{role} of {kind}", figures.get("sqnr_db_layer"))
            for kind, roles in casts.items()
            for role, figures in roles.items()
        )
        where = cast if layer is None else f"{cast}, layer {layer}"
        self._log(step, f"float8 casts: least SQNR {sqnr_db:.1f} dB ({where})")

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log the beginning of each text."""
        for sample in samples:
            self._log(step, f"sample {sample['prompt'][:20]!r}: {sample['text'][:40]!r}")

    def _log(self, step: int, *texts: str) -> None:
        head = f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"
        logger.info("  ".join((head, *texts)))


def _describe(record: StepRecord) -> Iterator[str]:
    """Yield the figures of a step's line."""
    yield f"loss {record.loss:.4f}"
    yield f"grad_norm {record.grad_norm:.3g}"
    if record.skipped_steps:
        yield f"skipped {record.skipped_steps}"
    yield f"tps {record.tps:,.0f}"
    yield f"tflops {float(f'{record.tflops:.3g}'):,g}"  # three digits, without an exponent

    mfu = f"mfu {record.format_mfu(record.mfu)}"
    if record.mfu_documents is not None:
        mfu += f" (documents {record.format_mfu(record.mfu_documents)})"
    yield mfu
    if record.bubble_pct is not None:
        yield f"bubble {record.bubble_pct:.1f}%"

    if record.memory_max_gib is None:
        yield f"mem {record.memory_gib:.1f}GiB"
    else:
        yield f"mem {record.memory_max_gib:.1f}GiB (rank {record.memory_max_rank})"
    yield f"time {record.step_time_s:.3f}s (data {record.data_time_pct:.1f}%)"


# ----- JSON lines -----


class JsonlWriter(Writer):
    """The files of a run that hold lines of strict JSON. Each is made with its first line."""

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        """Drop lines that are unfinished or after `resume_step` from the files in `folder`, each of
        which is replaced atomically."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[RecordKind, TextIO] = {}
        for kind in RECORDS:
            path = folder / f"{kind}.jsonl"
            lines = read_records(path)
            kept = [line.rstrip() + b"\n" for line, record in lines if record.step <= resume_step]
            if path.exists():
                replace_file(path, b"".join(kept))

    def write(self, record: StepRecord) -> None:
        self._append("metrics", record.to_json())

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        if "validation_loss" in scalars:
            loss = scalars["validation_loss"]
            self._append("validation", {"step": step, "time": time.time(), "validation_loss": loss})

    def write_numerics(self, step: int, casts: CastErrors) -> None:
        self._append("numerics", {"step": step, "time": time.time(), "kinds": casts})

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        for sample in samples:
            self._append("samples", {"step": step, "time": time.time(), **sample})

    def _append(self, kind: RecordKind, fields: Mapping[str, Any]) -> None:
        """Append a line to a file, and pass it to the operating system."""
        if kind not in self._files:
            self._files[kind] = (self._folder / f"{kind}.jsonl").open("a", buffering=1)
        self._files[kind].write(strict_json(fields) + "\n")

    def flush(self) -> None:
        for file in self._files.values():
            os.fsync(file.fileno())

    def close(self, summary: Summary | None) -> None:
        for file in self._files.values():
            file.close()
