"""Errors that a user can cause, with an exit code for each kind.

A message names `[table] key = value`, the rule, every number in it, and the fix.
"""

import errno

STOPPED_EXIT_CODE = 75
"""Exit code of a run that a signal has stopped, saved if checkpoints are on
(EX_TEMPFAIL of sysexits.h)."""


class RunError(ValueError):
    """An error that a user can fix, reported without a traceback. Subclasses set `exit_code`."""

    exit_code = 1
    rank: int | None = None
    """The rank that raised it, if only some ranks did."""
    paste = ""  # TOML that fixes the config, in status.json and the report of the run


class ConfigError(RunError):
    """The config, or what it asks of model, recipe, layout or run folder, is not possible."""

    exit_code = 2


class DataError(RunError):
    """A tokenizer or a training text is missing, broken or too small."""

    exit_code = 3


class CheckpointError(RunError):
    """The requested checkpoint is missing, broken or of another model."""

    exit_code = 4


class NumericError(RunError):
    """The loss or the gradient is no longer a finite number."""

    exit_code = 5


class RankLostError(RunError):
    """A rank was killed, hangs or cannot be reached, or torchrun has ended."""

    exit_code = 6


class StorageError(RunError):
    """The run folder, or a token store, cannot be written: no space left, or a broken disk."""

    exit_code = 7


def kind_of(error: OSError) -> type[RunError]:
    """Return ConfigError for a path that the user can fix, else StorageError: the disk is full or
    broken."""
    wrong = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP}
    return ConfigError if error.errno in {*wrong, errno.ENAMETOOLONG} else StorageError
