"""What an error of a run means: the RunError that names its cause and the fix."""

import errno
import os
from pathlib import Path

from torchtitan_lite.base.errors import RunError, StorageError
from torchtitan_lite.base.files import DISK_FULL, storage_fix

from .watchdog import Watchdog, is_rank_loss

DISK_ERRORS = DISK_FULL | {errno.EIO, errno.EROFS, errno.ESTALE}


def explain(error: Exception, *, folder: Path, watchdog: Watchdog) -> RunError | None:
    """Return the RunError that describes `error`; None for an unexpected one.

    `folder` is the run folder: an OSError about a file in it is a storage error.
    """
    if isinstance(error, RunError):
        return error
    if isinstance(error, OSError) and (
        error.errno in DISK_ERRORS or is_within(folder, error.filename)
    ):
        return StorageError(
            f'[job] dump_folder = "{folder}": {error}; {storage_fix(error)}, or name a folder '
            "on another disk."
        )
    return watchdog.explain(error) if is_rank_loss(error) else None


def is_within(folder: Path, file: str | bytes | int | None) -> bool:
    """Return whether `file` is a path inside `folder`. Neither needs to exist."""
    return isinstance(file, str | bytes) and Path(os.fsdecode(file)).resolve().is_relative_to(
        folder.resolve()
    )
