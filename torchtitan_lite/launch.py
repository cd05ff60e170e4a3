"""torchrun as run_train.sh starts it, with torchrun's own arguments: `python -m
torchtitan_lite.launch ...`.

It differs in two ways. A stopped run may save for TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds on every
torch, and the exit code is the failed worker's, so that a full disk, on which no report can be
written, does not hide it.
"""

import os
import sys
from contextlib import suppress

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig

from torchtitan_lite.errors import RankLostError

SHUTDOWN_SECONDS = "600"


def allow_long_saves() -> None:
    """Let workers that were told to stop run on for TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds.

    torch 2.11 does not know the variable and kills workers after 30 s. To be removed once torch
    2.11 is not supported any more; a test fails then."""
    seconds = os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)
    if "shutdown_timeout" not in LaunchConfig.__dataclass_fields__:
        PContext.close.__defaults__ = (None, int(seconds))  # of death_sig and timeout


def main() -> None:
    """Run the workers. Exits with the exit code of the first that failed, with 6 if a signal killed
    it."""
    allow_long_saves()
    try:
        run.main()
    except ChildFailedError as error:
        with suppress(OSError):
            print(error, file=sys.stderr, flush=True)
        _, failure = error.get_first_failure()
        sys.exit(failure.exitcode if failure.exitcode > 0 else RankLostError.exit_code)


if __name__ == "__main__":
    main()
