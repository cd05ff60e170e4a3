"""`python -m torchtitan_lite`: the same as the command `torchtitan-lite`."""

import os
import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # Else the first one is PYTHONPATH's. The working directory may be deleted.
    first = sys.path[0] or "."
    if os.path.exists(first) and os.path.samefile(first, "."):  # noqa: PTH110, PTH121
        del sys.path[0]  # a random.py in the working directory would shadow the standard library's

import re
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of an import

from torchtitan_lite.base.logger import init_logger
from torchtitan_lite.base.terminal import open_standard_streams, run_script
from torchtitan_lite.cli import run_command

OF_A_JOB = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE))|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
)
"""Names of the variables that describe a process of a job."""


def main() -> None:
    """Run the words of the command line, and exit with the exit code."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    open_standard_streams()
    if sys.argv[1:2] != ["train"]:
        # A command is one process, also in a pod or under torchrun, which set these for a job.
        for name in filter(OF_A_JOB.fullmatch, list(os.environ)):
            del os.environ[name]
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when `head` has seen enough
        init_logger(sys.stderr)  # standard output has the answer alone
    run_script(run_command)


if __name__ == "__main__":
    main()
