"""A worker process that the agent forks, with the modules that it has imported already."""

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from subprocess import TimeoutExpired
from typing import NoReturn, TextIO

from .signals import REPEAT_SECONDS

MODULE = "torchtitan_lite.train"


class ForkedWorker:
    """A child process, with those methods of `subprocess.Popen` that torch's agent calls.

    It becomes what `python -u -m torchtitan_lite.train` would be as a new program: in its own
    session, with its own output and environment, the default signal handlers, and none of the
    agent's sockets. Threads of the agent, such as its store's, do not exist in it."""

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str], stdout: TextIO, stderr: TextIO
    ) -> None:
        """Start a worker with the command line `words`."""
        # A signal that comes between must not run the agent's handler in the worker.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, REPEAT_SECONDS)
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            become_worker(words, env, stdout=stdout.fileno(), stderr=stderr.fileno())
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def poll(self) -> int | None:
        """Return the exit code, or the negative number of the signal that ended the process; None
        while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return what `poll` does, at the end. Raises TimeoutExpired after `timeout` seconds."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise TimeoutExpired(MODULE, timeout)
            time.sleep(0.05)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def become_worker(
    words: Sequence[str], env: Mapping[str, str], *, stdout: int, stderr: int
) -> NoReturn:
    """Run the worker's module in this forked process, and end the process with its exit code."""
    exit_code = 1
    try:
        os.setsid()
        for number in REPEAT_SECONDS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, REPEAT_SECONDS)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in enumerate((null, stdout, stderr)):
            os.dup2(source, target)
        for descriptor in os.listdir("/proc/self/fd"):
            if int(descriptor) > 2:
                with suppress(OSError):  # the list's own
                    os.close(int(descriptor))
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        os.environ.update(env)
        sys.argv = [MODULE, *words]
        name_process("python", "-u", "-m", *sys.argv)
        gc.freeze()  # later collections scan only objects made after the imports
        gc.enable()
        import_module(MODULE).main()
        exit_code = 0
    except SystemExit as ended:
        exit_code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(exit_code)


def name_process(*words: str) -> None:
    """Show `words` as the command line of this process in ps and top, as far as there is room:
    write over those that it was started with."""
    with suppress(OSError, ValueError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
        line = "\0".join(words).encode()[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, line, len(line))
