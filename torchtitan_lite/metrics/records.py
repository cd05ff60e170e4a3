"""Read the records of a run from its files of JSON lines, each of which may be missing.

A crash may leave an unfinished last line, and so does a run that is writing one; a damaged disk may
leave others. Lines that are no records are left out.
"""

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ValidationError

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.jsonfile import MAX_JSON_BYTES, Count, regular_size
from torchtitan_lite.base.logger import logger


class Line(BaseModel, strict=True, allow_inf_nan=False):
    """What is read of a line. None: it has no such figure, or the number was not finite."""

    step: Count
    tokens: Count | None = None
    loss: float | None = None
    grad_norm: float | None = None
    tps: float | None = None
    mfu: float | None = None
    mfu_bf16_peak: float | None = None
    mfu_fp8_peak: float | None = None
    memory_gib: float | None = None
    validation_loss: float | None = None


def read_records(path: Path) -> Iterator[tuple[bytes, Line]]:
    """Yield each line of a file that is a record, as bytes and as what is read of it; nothing if
    there is no file.

    Raises ConfigError for anything but a regular file, and OSError if it cannot be read."""
    if not path.exists():
        return
    try:
        regular_size(path)
    except ValueError as error:
        raise ConfigError(f"{path} {error}, and a run keeps its records there.") from error

    left_out = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_JSON_BYTES):
            try:
                record = Line.model_validate_json(line)
            except ValidationError:
                left_out += 1
            else:
                yield line, record
    if left_out:
        logger.warning(f"{path}: lines that are no records are left out: {left_out}")


def has_validation(dump_folder: Path, step: int) -> bool:
    """Return whether a run's validation.jsonl has a step's loss."""
    return any(line.step == step for _, line in read_records(dump_folder / "validation.jsonl"))
