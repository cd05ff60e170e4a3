"""Turn an exception of the main job into the error that a user can act on, and report it."""

import contextlib
import errno
import os
from pathlib import Path

from torchtitan_lite.errors import RankLostError, RunError, StorageError
from torchtitan_lite.files import DISK_FULL
from torchtitan_lite.parallel.watchdog import Watchdog, is_rank_loss
from torchtitan_lite.run_folder import lock_inode, report_failure

DISK_ERRORS = DISK_FULL | {errno.EIO, errno.EROFS, errno.ESTALE}
CACHED_CODE = "torch._inductor.runtime.compile_tasks."
"""Prefix of the names of modules that the compiler loads from its cache."""


class FailureReport:
    """Write the run's first failure into status.json, once this run has locked its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: int | None = None

    def begin(self) -> None:
        """Remember the lock of the run folder. Before that, status.json is another run's."""
        self._lock = lock_inode(self.folder)

    def write(
        self,
        cause: str,
        *,
        step: int,
        exit_code: int = RankLostError.exit_code,
        rank: int | None = None,
    ) -> None:
        """Report a failure in `step`. `rank` is the rank that the cause is about, if any."""
        if self._lock is not None and self._lock == lock_inode(self.folder):
            with contextlib.suppress(RunError):  # a full disk: the reported error matters more
                report_failure(self.folder, cause=cause, exit_code=exit_code, rank=rank, step=step)


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
            f'[job] dump_folder = "{folder}": {error}; make room, or name a folder on another disk.'
        )
    return watchdog.explain(error) if is_rank_loss(error) else None


def explain_compiler(error: Exception) -> RunError | None:
    """Return how to repair the compiler's cache if `error` is about a file in it, else None.

    The cache outlives the run, and breaks when a machine crashes or a disk is full.
    """
    while isinstance(inner := getattr(error, "inner_exception", None), Exception):
        error = inner  # the compiler wraps the exceptions it meets
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
