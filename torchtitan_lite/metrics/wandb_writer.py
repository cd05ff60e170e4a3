"""Weights & Biases as one more place for a run's records. wandb is optional: it is imported only
where it is used."""

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tomli

from torchtitan_lite.config import MetricsConfig
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.logger import logger

from .records import Numerics, Record, Summary, numerics_scalars

UPLOAD_TIMEOUT_S = 60.0
"""How long the end of a run may wait for wandb's server while devices idle. What is late stays in
the run folder."""


def check_wandb_installed(metrics: MetricsConfig) -> None:
    """Raise ConfigError if wandb is asked for and not installed."""
    if not metrics.enable_wandb:
        return
    spec = find_spec("wandb")
    if (
        spec is None or spec.origin is None
    ):  # a mere folder of that name, as wandb leaves one where it ran
        raise ConfigError(
            '[metrics] enable_wandb = true needs wandb, which is not installed; pip install "torchtitan-lite[wandb]", '
            "or set it to false."
        )


class WandbWriter:
    """The wandb run of a run folder, the same one after a resume. Its series have the names of
    metrics.jsonl's keys.

    Steps that are trained once more after a crash are dropped by wandb: there the first values
    stand. A failure of wandb after its start is logged as a warning and ends this writer, never the
    training: metrics.jsonl has it all."""

    def __init__(
        self, dump_folder: Path, *, config_toml: str, hparams: Mapping[str, bool | float | str]
    ) -> None:
        """Open the run. Raises ConfigError if there is no login or no network. Its project is
        $WANDB_PROJECT's."""
        import wandb  # optional, and slow to import

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
                f"[metrics] enable_wandb = true: wandb cannot start ({str(error).splitlines()[0]}); run wandb login, "
                "or set WANDB_MODE=offline in the environment, or set it to false."
            ) from error
        id_file.write_text(self._run.id)

    def write(self, record: Record) -> None:
        """Log the record's known figures."""
        figures = record.figures()
        self.write_scalars(
            record.step, {name: value for name, value in figures.items() if name != "step"}
        )

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the figures beside those of the step's record."""
        self._attempt(lambda run: run.log(dict(scalars), step=step))

    def write_numerics(self, step: int, numerics: Numerics) -> None:
        """Log the figures beside those of the step's record."""
        self.write_scalars(step, numerics_scalars(numerics))

    def flush(self) -> None:
        """Nothing is left to do: wandb keeps its own log."""

    def close(self, summary: Summary | None) -> None:
        """Add the outcome to the run's summary, and wait for the upload, UPLOAD_TIMEOUT_S at
        most."""
        if summary is not None:
            outcome = {
                "final_loss": summary.loss,
                "median_tps": summary.tps,
                "median_mfu": summary.mfu,
            }
            self._attempt(lambda run: run.summary.update(outcome))
        self._attempt(lambda run: run.finish())

    def _attempt(self, action: Callable[[Any], object]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except (
            Exception
        ) as error:  # whatever it is: wandb's own errors, and its service's broken connection
            self._run = None
            logger.warning(
                f"wandb failed, and gets nothing more of this run: {type(error).__name__}: {error}"
            )
