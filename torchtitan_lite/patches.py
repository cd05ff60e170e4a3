"""Changes to torch at run time, one function each."""

import os

from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.launcher.api import LaunchConfig


def allow_long_saves() -> None:
    """Let stopped workers run for TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds on torch 2.11 too.

    What: the default time-out of `PContext.close`, after which the agent kills its workers.
    Why: torch 2.11 ignores the variable and kills workers 30 s after a signal, in the middle of a
    long save. Seen on 2.11.0; 2.12 and later read the variable into
    `LaunchConfig.shutdown_timeout`, and nothing is changed there.
    Remove when torch 2.11 is not supported any more; a test fails then.
    """
    if "shutdown_timeout" not in LaunchConfig.__dataclass_fields__:
        seconds = int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
        PContext.close.__defaults__ = (None, seconds)  # of the parameters death_sig and timeout
