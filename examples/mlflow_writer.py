"""Write a run's figures to MLflow.

pip install mlflow-skinny
torchtitan-lite train --job.config_file debug_model --metrics.writers mlflow_writer:MLflowWriter
"""

from collections.abc import Mapping
from typing import Any

import mlflow

from torchtitan_lite import Writer, WrittenRun


class MLflowWriter(Writer):
    """An MLflow run, on the server that MLFLOW_TRACKING_URI names, such as http://localhost:5000. A
    resumed run continues it."""

    spare = "MLflow"  # a run goes on without it, with a warning, once it fails

    def __init__(self, run: WrittenRun) -> None:
        """`run` has the folder and the config, `config_toml`. An error here ends the run."""
        id_file = run.folder / "mlflow_run_id"
        known = id_file.read_text() if id_file.exists() else None
        self._run_id = mlflow.start_run(run_id=known, run_name=run.folder.name).info.run_id
        id_file.write_text(self._run_id)
        if known is None:
            mlflow.log_text(run.config_toml, "config.toml")

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the figures of a step's record, or others such as validation_loss."""
        mlflow.log_metrics(dict(scalars), step=step)

    def close(self, summary: Any) -> None:
        """End the run. `summary` is None if no step was trained."""
        if summary is not None:
            mlflow.log_metric("final_loss", summary.final_loss)
        mlflow.end_run()
