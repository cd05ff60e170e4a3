"""Where a run's records go: the console, JSON lines, TensorBoard, Weights & Biases."""

import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tomli

from torchtitan_lite.config import MetricsConfig
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.files import replace_file
from torchtitan_lite.logger import logger

from .figures import (
    CAST_CHARTS,
    CHARTS,
    FIGURES,
    STEP_FIGURES,
    CastErrors,
    StepRecord,
    Summary,
    Writer,
    figure_of,
)

COLORS = (31, 32, 33, 34, 35, 36)
"""ANSI codes of the foreground colours from red to cyan."""
FINAL_LOSS, MEDIAN_TPS = "final/loss", "final/median_tps"
"""TensorBoard's tags of the outcome, by which the HParams tab compares runs."""
EVENT_FILES = "events.out.tfevents.*"
UPLOAD_TIMEOUT_S = 60.0
"""How long a run may wait for wandb's server at its end, while devices idle. Data that arrives
later stays in the run folder."""


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
        tensorboard = TensorBoardWriter(
            dump_folder / metrics.save_tb_folder,
            resume_step=resume_step,
            config_toml=config_toml,
            hparams=hparams,
            numerics=numerics,
        )
        writers.append(tensorboard)
    if metrics.enable_wandb:
        writers.append(WandbWriter(dump_folder, config_toml=config_toml, hparams=hparams))
    return writers


# ----- Console -----


class ConsoleWriter(Writer):
    """Log one line per step. The first is marked as warm-up, so it has no estimated end."""

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
        """Log which casts lost most: the lowest SQNR, the largest underflow and saturation."""
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

    def _log(self, step: int, *texts: str) -> None:
        """Log the texts that are not empty, after the step, each in a colour of its own."""
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


# ----- TensorBoard -----


class TensorBoardWriter(Writer):
    """A run's TensorBoard folder. An unknown figure leaves no point.

    Pages, config and hparams are written once, when the run begins; a resumed run adds only points.
    """

    def __init__(
        self,
        folder: Path,
        *,
        resume_step: int,
        config_toml: str,
        hparams: Mapping[str, bool | float | str],
        numerics: bool,
    ) -> None:
        # Slow to import, and needed only on the rank that writes.
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams as hparam_summaries

        # An earlier process may have trained past `resume_step`: TensorBoard drops those points.
        is_resumed = any(folder.glob(EVENT_FILES))
        self._events = SummaryWriter(str(folder), purge_step=resume_step + 1)
        self._file = self._events._get_file_writer()

        # torch would write a bool as 0 or 1.
        shown = {
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in hparams.items()
        }
        *start, self._session_end = hparam_summaries(shown, dict.fromkeys((FINAL_LOSS, MEDIAN_TPS)))
        if is_resumed:
            return
        self._events.add_custom_scalars(_layout(numerics=numerics))
        self._events.add_text("config", f"```toml\n{config_toml}\n```", 0)
        for summary in start:
            self._file.add_summary(summary)
        self._events.flush()

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        # Loaded with SummaryWriter.
        from tensorboard.compat.proto.summary_pb2 import Summary as Points

        # One event for all points takes a fifth of the time of an event for each.
        points = [
            Points.Value(tag=tag, simple_value=value)
            for name, value in scalars.items()
            for tag in _tags(name)
        ]
        self._file.add_summary(Points(value=points), step)
        self._events.flush()

    def flush(self) -> None:
        for path in Path(self._events.log_dir).glob(EVENT_FILES):
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def close(self, summary: Summary | None) -> None:
        if summary is not None:
            step = summary.last.step
            self._events.add_scalar(FINAL_LOSS, summary.last.loss, step)
            if summary.tps is not None:
                self._events.add_scalar(MEDIAN_TPS, summary.tps, step)
            self._file.add_summary(self._session_end)
        self._events.close()


def _tags(name: str) -> list[str]:
    """Return the tags of a figure, last the one that charts use; none if it has no curve.

    The Custom Scalars tab calls a curve "tag (run)", and takes everything after the first
    parenthesis for the run. So a tag with a parenthesis would draw no curve there.
    """
    _, slash, suffix = name.partition("/")
    tag = figure_of(name).tag
    tags = [tag, f"pages/{name}"] if "(" in tag else [tag + slash + suffix]
    return tags if tag else []


def _layout(*, numerics: bool) -> dict[str, dict[str, list]]:
    """Return the pages in torch's format: per chart a regular expression for each curve."""
    layout: dict[str, dict[str, list]] = {}
    for chart, (page, title) in CHARTS.items():
        names = [name for name, figure in FIGURES.items() if chart in figure.charts]
        patterns = [f"^{re.escape(_tags(name)[-1])}$" for name in names]
        layout.setdefault(page, {})[title] = ["Multiline", patterns]

    for prefix, (page, title) in CAST_CHARTS.items() if numerics else ():
        pattern = f"^{re.escape(_tags(prefix)[-1])}"
        layout.setdefault(page, {})[title] = ["Multiline", [pattern]]
    return layout


# ----- Weights & Biases -----


def check_wandb_installed(metrics: MetricsConfig) -> None:
    """Raise ConfigError if wandb is enabled and not installed."""
    # wandb leaves a folder of its own name where it ran: Python finds it as a package without code.
    if metrics.enable_wandb and getattr(find_spec("wandb"), "origin", None) is None:
        raise ConfigError(
            "[metrics] enable_wandb = true needs wandb, which is not installed: "
            'pip install "torchtitan-lite[wandb]", or set it to false.'
        )


class WandbWriter(Writer):
    """The wandb run of a run folder, continued by a resumed run.

    Its series have the names of metrics.jsonl's keys. wandb drops steps that are trained again
    after a crash, and keeps their first values.
    """

    spare = "wandb"

    def __init__(
        self, dump_folder: Path, *, config_toml: str, hparams: Mapping[str, bool | float | str]
    ) -> None:
        """Open the run in project $WANDB_PROJECT. Raises ConfigError without a login or network."""
        import wandb  # slow, and optional

        id_file = dump_folder / "wandb" / "run_id"
        id_file.parent.mkdir(exist_ok=True)
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "torchtitan_lite"),
                dir=str(dump_folder),
                id=id_file.read_text() if id_file.exists() else None,
                resume="allow",
                config=tomli.loads(config_toml) | {"hparams": dict(hparams)},
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
