"""Series of a run on Weights & Biases."""

import os
from collections.abc import Mapping
from typing import Any

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.jsonfile import parse_toml
from torchtitan_lite.catalog.run_files import WANDB_FOLDER

from .base_writer import Writer, WrittenRun
from .summary import Summary


class WandbWriter(Writer):
    """The wandb run of a run folder, or of a rank's folder in it. A resumed run continues it; of a
    step that is trained again after a crash, wandb keeps the first values."""

    spare = "wandb"

    def __init__(self, run: WrittenRun, *, own: str) -> None:
        """Open a run that is named after its folders, `own` of a rank in the run folder, unless
        $WANDB_NAME and others say otherwise. Raises ConfigError without a login or network."""
        import wandb  # slow, and optional

        path = run.folder.absolute()
        name, group = (f"{path.name}/{own}", path.name) if own else (path.name, path.parent.name)
        parent = run.folder / WANDB_FOLDER / own if own else run.folder  # wandb adds its folder
        id_file = parent / "wandb" / "run_id"
        id_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "torchtitan_lite"),
                name=os.environ.get("WANDB_NAME", name),
                group=os.environ.get("WANDB_RUN_GROUP", group),
                dir=str(parent),
                id=id_file.read_text(errors="replace") if id_file.is_file() else None,
                resume="allow",
                config=parse_toml(run.config_toml.encode()),
                settings={"finish_timeout": 60.0},  # what is not uploaded stays in its folder
            )
        except wandb.Error as error:
            raise ConfigError(
                "[metrics] enable_wandb = true: wandb cannot start "
                f"({str(error).splitlines()[0]}); run wandb login, set WANDB_MODE=offline in the "
                "environment, or set it to false."
            ) from error
        id_file.write_text(self._run.id)

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self, summary: Summary | None) -> None:
        self._run.finish()
