"""Errors that a user can cause, with an exit code for each kind.

A message names `[table] key = value`, the rule, every number in it, and the fix.
"""

import errno
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout

from .files import storage_fix
from .terminal import cleaned

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


def run_script(main: Callable[[list[str]], int | None]) -> None:
    """Call `main` with the arguments of the command line, and exit with the code that it returns.

    What is printed is cleaned. A RunError, and an OSError of a file or of standard output, is one
    line. Ctrl-C exits with 130."""
    with redirect_stdout(cleaned(sys.stdout)), redirect_stderr(cleaned(sys.stderr)):
        try:
            code = main(sys.argv[1:])
            print(end="", flush=True)
        except RunError as error:
            print(error, file=sys.stderr)
            code = error.exit_code
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = 130
        except Exception as error:
            code = RunError.exit_code
            if isinstance(error, OSError) and error.errno is not None:
                code = kind_of(error).exit_code
                print(f"{error}; {storage_fix(error)}.", file=sys.stderr)
                # The interpreter flushes standard output once more at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            else:
                traceback.print_exc()
    sys.exit(code)


def open_standard_streams() -> None:
    """Open the null device for closed standard streams: a file or socket that took the number of
    one would be lost to a child, or take what that prints. Errors would go to standard output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
