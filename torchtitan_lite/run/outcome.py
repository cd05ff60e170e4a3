"""What an error of a run means: the RunError that names its cause and the fix."""

import errno

from torchtitan_lite.base.errors import RunError, StorageError
from torchtitan_lite.base.files import DISK_FULL, storage_fix

from .watchdog import Watchdog, is_rank_loss

DISK_ERRORS = DISK_FULL | {errno.EIO, errno.EROFS, errno.ESTALE}


def explain(error: Exception, *, watchdog: Watchdog) -> RunError | None:
    """Return the RunError that describes `error`; None for an unexpected one."""
    if isinstance(error, RunError):
        return error
    if isinstance(error, OSError) and (error.errno in DISK_ERRORS or error.filename is not None):
        return StorageError(f"{error}; {storage_fix(error)}.")
    return watchdog.explain(error) if is_rank_loss(error) else None
