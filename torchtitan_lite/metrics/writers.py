"""Write a run's records to the console, JSON lines, TensorBoard, and Weights & Biases."""

import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from torchtitan_lite.config import MetricsConfig
from torchtitan_lite.documents import parse_toml
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.files import replace_file
from torchtitan_lite.logger import logger

from .figures import STEP_FIGURES, CastErrors, StepRecord, Summary, Writer, figure_of
from .tensorboard_writer import TensorBoardWriter

COLORS = (31, 32, 33, 34, 35, 36)
"""ANSI codes of the foreground colours from red to cyan."""
UPLOAD_TIMEOUT_S = 60.0
"""Longest wait for wandb's server at the end of a run, while devices idle. Data that is not
uploaded by then stays in the run folder."""


def build_writers(
    metrics: MetricsConfig,
    *,
    dump_folder: Path,
    rank: int,
    total_steps: int,
    resume_step: int,
    config_toml: str,
    hparams: Mapping[str, bool | float | str],
    numerics: bool,
    samples: bool,
) -> list[Writer]:
    """Open a rank's writers, to continue after `resume_step` (0: a new run).

    `hparams` are the values by which runs are compared; each run has the same names. `numerics`
    says whether casts to float8 are measured, `samples` whether texts are generated. Raises
    ConfigError if wandb cannot start, or if a writer needs a file where there is a folder, or the
    reverse."""
    lines, casts = dump_folder / "metrics.jsonl", dump_folder / "numerics.jsonl"
    tb, wandb = dump_folder / metrics.save_tb_folder, dump_folder / "wandb"
    texts = dump_folder / "samples.jsonl"
    kinds = {lines: "file", casts: "file", texts: "file"}
    kinds |= {tb: "folder"} if metrics.enable_tensorboard else {}
    kinds |= {wandb: "folder"} if metrics.enable_wandb else {}
    for path, kind in kinds.items():
        _check_kind(path, kind)

    writers: list[Writer] = []
    if rank == 0:
        color = wants_color(disabled=metrics.disable_color_printing)
        writers.append(ConsoleWriter(total_steps=total_steps, color=color))
        writers.append(JsonlWriter(lines, resume_step=resume_step))
        # An existing file is cut at the resumed step, even if this run writes nothing into it.
        if numerics or casts.exists():
            writers.append(JsonlWriter(casts, resume_step=resume_step, content="numerics"))
        if samples or texts.exists():
            writers.append(JsonlWriter(texts, resume_step=resume_step, content="samples"))

    # Curves, of each rank in a folder of its own or of rank 0 alone.
    own = f"rank_{rank}" if metrics.save_for_all_ranks else ""
    if metrics.enable_tensorboard:
        with _left_out_if_broken(TensorBoardWriter.spare):
            tensorboard = TensorBoardWriter(
                tb / own,
                resume_step=resume_step,
                config_toml=config_toml,
                hparams=hparams,
                numerics=numerics,
            )
            writers.append(tensorboard)
    if metrics.enable_wandb:
        with _left_out_if_broken(WandbWriter.spare):
            folder = wandb / own if own else dump_folder
            writers.append(WandbWriter(folder, config_toml=config_toml, hparams=hparams))
    return writers


def _check_kind(path: Path, kind: str) -> None:
    if os.path.lexists(path) and not (path.is_file() if kind == "file" else path.is_dir()):
        raise ConfigError(
            f"{path} is not a {kind}, and a run keeps one there; move it elsewhere, or name "
            "another [job] dump_folder."
        )


@contextmanager
def _left_out_if_broken(name: str) -> Iterator[None]:
    """Log an OSError instead of raising it."""
    try:
        yield
    except OSError as error:
        warn_left_out(name, error)


def warn_left_out(name: str, error: Exception) -> None:
    """Log that the run continues without a writer."""
    reason = f"{type(error).__name__}: {error}"
    logger.warning(f"{name} failed and is disabled for the rest of the run: {reason}")


# ----- Console -----


class ConsoleWriter(Writer):
    """Log one line per step. The first one says "warm-up" instead of the time left."""

    def __init__(self, *, total_steps: int, color: bool) -> None:
        self._total_steps, self._color, self._warm_up = total_steps, color, True

    def write(self, record: StepRecord) -> None:
        remaining_s = (self._total_steps - record.step) * record.step_time_s
        eta = "warm-up" if self._warm_up else f"eta {timedelta(seconds=round(remaining_s))}"
        self._warm_up = False
        figures = [figure.console(record) for figure in STEP_FIGURES.values() if figure.console]
        self._log(record.step, *figures, eta)

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

    def _log(self, step: int, *texts: str) -> None:
        """Log the step and the texts that are not empty, each in its own colour."""
        width = len(str(self._total_steps))
        texts = (f"step {step:>{width}}/{self._total_steps}", *texts)
        painted = [
            f"\033[{color}m{text}\033[0m" if self._color else text
            for color, text in zip(itertools.cycle(COLORS), texts, strict=False)
            if text
        ]
        logger.info("  ".join(painted))


def wants_color(*, disabled: bool) -> bool:
    """Return whether to colour the log: on a terminal or with FORCE_COLOR, not with NO_COLOR."""
    if disabled or os.environ.get("NO_COLOR"):
        return False
    return sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))


# ----- JSON lines -----


class JsonlWriter(Writer):
    """A file with one line of strict JSON per step, in which non-finite numbers are null.

    By its `content`, a line is a step's record, the errors of its casts to float8, or a sample.
    """

    def __init__(
        self,
        path: Path,
        *,
        resume_step: int,
        content: Literal["records", "numerics", "samples"] = "records",
    ) -> None:
        """Open `path`, and drop unfinished lines and lines after `resume_step`. The file is
        replaced atomically, so that a crash loses nothing."""
        lines = path.read_bytes().splitlines() if path.exists() else []
        kept = [line + b"\n" for line in lines if _step_of(line) <= resume_step]
        replace_file(path, b"".join(kept))
        self._file = path.open("a", buffering=1)
        self._content = content

    def write(self, record: StepRecord) -> None:
        if self._content == "records":
            self._append(record.to_json())

    def write_numerics(self, step: int, casts: CastErrors) -> None:
        if self._content == "numerics":
            self._append({"step": step, "time": time.time(), "kinds": casts})

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        for sample in samples if self._content == "samples" else ():
            self._append({"step": step, "time": time.time(), **sample})

    def _append(self, fields: Mapping[str, Any]) -> None:
        """Append a line, and pass it to the operating system."""
        # Python writes NaN and Infinity, which are not valid JSON. Replace them by null.
        strict = json.loads(json.dumps(fields), parse_constant=lambda _: None)
        self._file.write(json.dumps(strict) + "\n")

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self, summary: Summary | None) -> None:
        self._file.close()


class _Line(BaseModel):
    step: int


def _step_of(line: bytes) -> float:
    """Return the step of a line, or infinity if it is not a valid line."""
    try:
        return _Line.model_validate_json(line, strict=True).step
    except ValidationError:
        return math.inf


# ----- Weights & Biases -----


def check_wandb_installed(metrics: MetricsConfig) -> None:
    """Raise ConfigError if wandb is enabled and not installed."""
    # wandb creates a folder "wandb" where it runs, which Python finds as a namespace package.
    if metrics.enable_wandb and getattr(find_spec("wandb"), "origin", None) is None:
        raise ConfigError(
            "[metrics] enable_wandb = true needs wandb, which is not installed: "
            'pip install "torchtitan-lite[wandb]", or set it to false.'
        )


class WandbWriter(Writer):
    """The wandb run of a run folder, or of a rank's folder in it. A resumed run continues it.

    Metrics have the same names as in metrics.jsonl. If steps are trained again after a crash, wandb
    keeps the first values and drops the new ones.
    """

    spare = "wandb"

    def __init__(
        self, dump_folder: Path, *, config_toml: str, hparams: Mapping[str, bool | float | str]
    ) -> None:
        """Open the run in project $WANDB_PROJECT. Raises ConfigError without a login or network."""
        import wandb  # slow, and optional

        id_file = dump_folder / "wandb" / "run_id"
        id_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "torchtitan_lite"),
                dir=str(dump_folder),
                id=id_file.read_text(errors="replace") if id_file.is_file() else None,
                resume="allow",
                config=parse_toml(config_toml.encode()) | {"hparams": dict(hparams)},
                settings={"finish_timeout": UPLOAD_TIMEOUT_S},
            )
        except wandb.Error as error:
            raise ConfigError(
                "[metrics] enable_wandb = true: wandb cannot start "
                f"({str(error).splitlines()[0]}); run wandb login, set WANDB_MODE=offline in the "
                "environment, or set it to false."
            ) from error
        id_file.write_text(self._run.id)

    def write(self, record: StepRecord) -> None:
        figures = record.known().items()
        logged = {name: value for name, value in figures if figure_of(name).in_json}
        del logged["step"]
        self.write_scalars(record.step, logged)

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self, summary: Summary | None) -> None:
        if summary is not None:
            outcome = {"final_loss": summary.last.loss, "median_tps": summary.tps}
            self._run.summary.update(outcome | {"median_mfu": summary.mfu})
        self._run.finish()
