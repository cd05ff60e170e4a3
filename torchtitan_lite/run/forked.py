"""Processes that are forked, so that they have what was imported before: the launcher forks the
agent, and the agent the workers."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired
from typing import NoReturn

from .signals import REPEAT_SECONDS


class ForkedProcess:
    """A child in its own session, with the methods of `subprocess.Popen` that torch's agent calls.

    It starts with the default signal handlers. Threads of this process do not exist in it, and what
    they have locked stays locked: the agent's are Python's, and its store's, which waits. The
    interpreter is not torn down, which takes half a second, and waits for threads for ever."""

    def __init__(self, run: Callable[[], None]) -> None:
        """Start a process that calls `run`, and ends by `os._exit` with the code that this exits
        with: 0 if it returns, 1 after an error, whose traceback it prints."""
        # A signal must not run a handler of this process in the child.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, REPEAT_SECONDS)
        self._polling = threading.Lock()  # the end of a process can be asked for once
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _run_to_the_end(run)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def poll(self) -> int | None:
        """Return the exit code, or the negative number of the signal that ended the process; None
        while it runs."""
        with self._polling:
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
                raise TimeoutExpired("a forked process", timeout)
            time.sleep(0.05)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _run_to_the_end(run: Callable[[], None]) -> NoReturn:
    exit_code = 1
    try:
        os.setsid()
        for number in REPEAT_SECONDS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, REPEAT_SECONDS)
        run()
        exit_code = 0
    except SystemExit as ended:
        exit_code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(exit_code)


def set_streams(stdout: int, stderr: int) -> None:
    """Make two file descriptors the standard output and error, as of `python -u`, and the null
    device standard input."""
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate((null, stdout, stderr)):
        os.dup2(source, target)
    os.close(null)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering=1, closefd=False, errors="backslashreplace")
        for number in (1, 2)
    )


def close_all_but_standard_streams() -> None:
    """Close the files and sockets of the process from which this one was forked. No object of it
    may be collected afterwards: it would close what has the same number by then."""
    for descriptor in list(Path("/proc/self/fd").iterdir()):
        if int(descriptor.name) > 2:
            with suppress(OSError):  # that of the folder itself is closed already
                os.close(int(descriptor.name))
