"""What an error of a run means: the RunError that names its cause and the fix."""

import errno
import os
from pathlib import Path

from torchtitan_lite.base.errors import RunError, StorageError
from torchtitan_lite.base.files import DISK_FULL, storage_fix

from .watchdog import Watchdog, is_rank_loss

DISK_ERRORS = DISK_FULL | {errno.EIO, errno.EROFS, errno.ESTALE}
CACHED_CODE = "torch._inductor.runtime.compile_tasks."
"""Prefix of the names of modules that the compiler loads from its cache."""


def explain(error: Exception, *, folder: Path, watchdog: Watchdog) -> RunError | None:
    """Return the RunError that describes `error`; None for an unexpected one.

    `folder` is the run folder: an OSError about a file in it is a storage error.
    """
    if isinstance(error, RunError):
        return error
    if (broken := explain_compiler(error)) is not None:
        return broken
    if isinstance(error, OSError) and (
        error.errno in DISK_ERRORS or is_within(folder, error.filename)
    ):
        return StorageError(
            f'[job] dump_folder = "{folder}": {error}; {storage_fix(error)}, or name a folder '
            "on another disk."
        )
    return watchdog.explain(error) if is_rank_loss(error) else None


def explain_compiler(error: Exception) -> RunError | None:
    """Return an error with the fix if a file in the compiler's cache caused `error`, else None.

    The cache outlives the run. A crash of the machine or a full disk can damage it.
    """
    while isinstance(inner := getattr(error, "inner_exception", None), Exception):
        error = inner  # the compiler wraps exceptions
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # the compiler sets it if the user has not
    if folder is None or not any(name in str(error) for name in (folder, CACHED_CODE)):
        return None
    return RunError(
        "torch.compile failed, and a broken file in its cache may be the reason: remove the folder "
        f"{folder} and start again, or set TORCHINDUCTOR_CACHE_DIR to another. It said: "
        f"{type(error).__name__}: {error}"
    )


def is_within(folder: Path, file: str | bytes | int | None) -> bool:
    """Return whether `file` is a path inside `folder`. Neither needs to exist."""
    return isinstance(file, str | bytes) and Path(os.fsdecode(file)).resolve().is_relative_to(
        folder.resolve()
    )
