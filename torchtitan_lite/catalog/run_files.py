"""What a run keeps in its folder: its records, and the curves of its writers."""

from typing import Literal, NamedTuple, get_args

RecordKind = Literal["metrics", "validation", "numerics", "samples"]
"""Files of JSON lines: records of steps, losses of validations, errors of casts to float8, or texts
of the model."""
RECORDS: tuple[RecordKind, ...] = get_args(RecordKind)


class CurveWriter(NamedTuple):
    """A writer that [metrics] can turn on. `metrics.writers` has its class, by its name."""

    name: str
    key: str
    """Of [metrics], that turns it on."""
    folder: str
    """In the run folder."""
    folder_key: str | None = None
    """Of [metrics], that names another folder."""
    package: str | None = None
    """What has to be installed: a package, and the extra of the same name."""


WRITERS = (
    CurveWriter("TensorBoard", "enable_tensorboard", "tb", folder_key="save_tb_folder"),
    CurveWriter("wandb", "enable_wandb", "wandb", package="wandb"),
)
RUN_FILES = {"config.toml", "status.json", ".lock", "logs", "previous"}
RUN_FILES |= {f"{name}.jsonl" for name in RECORDS}
RUN_FILES |= {writer.folder for writer in WRITERS if writer.folder_key is None}
"""Names in the run folder that every run uses and that no key can choose."""
