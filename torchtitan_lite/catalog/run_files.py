"""What a run keeps in its folder."""

from typing import Literal, get_args

RecordKind = Literal["metrics", "validation", "numerics", "samples"]
"""Files of JSON lines: records of steps, losses of validations, errors of casts to float8, or texts
of the model."""
RECORDS: tuple[RecordKind, ...] = get_args(RecordKind)
WANDB_FOLDER = "wandb"
RUN_FILES = {"config.toml", "status.json", ".lock", "logs", "previous", WANDB_FOLDER}
RUN_FILES |= {f"{name}.jsonl" for name in RECORDS}
"""Names in the run folder that every run uses and that no key can choose."""
