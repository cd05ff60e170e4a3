"""Weights & Biases as one more place for a run's records. wandb is an optional dependency."""

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tomli

from torchtitan_lite.config import MetricsConfig
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.logger import logger

from .figures import StepRecord, Summary, Writer, figure_of

UPLOAD_TIMEOUT_S = 60.0
"""How long a run may wait for wandb's server at its end, while devices idle. Data that arrives
later stays in the run folder."""


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
    after a crash, and keeps their first values. If wandb fails after its start, it is left out for
    the rest of the run, with a warning.
    """

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
        self._attempt(lambda run: run.log(dict(scalars), step=step))

    def close(self, summary: Summary | None) -> None:
        if summary is not None:
            outcome = {"final_loss": summary.last.loss, "median_tps": summary.tps}
            outcome["median_mfu"] = summary.mfu
            self._attempt(lambda run: run.summary.update(outcome))
        self._attempt(lambda run: run.finish())

    def _attempt(self, action: Callable[[Any], object]) -> None:
        """Call wandb, unless it failed before. No failure of wandb may end the training."""
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:
            self._run = None
            reason = f"{type(error).__name__}: {error}"
            logger.warning(f"wandb failed and is left out for the rest of the run: {reason}")
