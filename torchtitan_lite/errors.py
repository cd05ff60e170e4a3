"""What can end a run other than a fault of ours, and the exit code that each cause gets.

A message reads: `[table] key = value`, the rule, every number in it, and the fix.
"""

import sys
from collections.abc import Callable

STOPPED_EXIT_CODE = 75
"""A signal stopped the run at a step's end, saved where checkpoints are on (EX_TEMPFAIL of
sysexits.h)."""


class RunError(ValueError):
    """A cause that a user can mend, reported without a traceback. Subclasses set `exit_code`."""

    exit_code = 1
    rank: int | None = None
    """The rank that met it, where the others did not."""


class ConfigError(RunError):
    """The config, or what it asks of the model, the float8 recipe, the layout or the run folder, is
    not possible."""

    exit_code = 2


class DataError(RunError):
    """A tokenizer or training text is missing, broken or too small."""

    exit_code = 3


class CheckpointError(RunError):
    """A checkpoint asked for is missing, broken or of another model."""

    exit_code = 4


class NumericError(RunError):
    """The loss or the gradient is no longer a finite number."""

    exit_code = 5


class RankLostError(RunError):
    """A rank was killed, hangs or is out of reach, or torchrun is gone."""

    exit_code = 6


class StorageError(RunError):
    """The run folder, or a token store, cannot be written: no space left, or a broken disk."""

    exit_code = 7


def run_script(main: Callable[[list[str]], None]) -> None:
    """Call `main` with the words of the command line. A RunError is printed, and its exit code ends
    the process."""
    try:
        main(sys.argv[1:])
    except RunError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
