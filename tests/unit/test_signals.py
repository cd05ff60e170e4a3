"""A request to stop, and a second one that kills, in a process whose main thread is blocked."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(30)
# A mutex that is locked twice blocks in C for ever, as a collective does for long: Python runs no
# handler meanwhile.
CODE = """
import ctypes, os, signal, sys, threading, time
from torchtitan_lite.run import signals

signals.REPEAT_SECONDS |= {signal.SIGINT: 0.1, signal.SIGTERM: float(sys.argv[1])}
signal.signal(signal.SIGHUP, signal.SIG_IGN)
for number in (signal.SIGINT, signal.SIGQUIT):  # ignored where the tests run in the background
    signal.signal(number, signal.SIG_DFL)
stop = signals.StopSignal(kill=lambda: os.kill(os.getpid(), signal.SIGKILL))
signal.signal(signal.SIGWINCH, lambda number, frame: None)
print(stop.received, flush=True)

def show() -> None:
    while not stop.received:
        time.sleep(0.01)
    print(stop.received, flush=True)

threading.Thread(target=show).start()
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)
"""


class Blocked:
    """The process. A SIGTERM within `duplicate_seconds` of the first signal repeats the
    request, and so does a SIGINT within 0.1 s."""

    def __init__(self, duplicate_seconds: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE, str(duplicate_seconds)],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.read() == 0

    def send(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            self.process.send_signal(number)

    def read(self) -> int:
        """Return the next number that it prints."""
        return int(self.process.stdout.readline())

    def lives(self) -> bool:
        """Return whether it still runs a moment later."""
        time.sleep(0.3)
        return self.process.poll() is None


# ----- StopSignal -----


@pytest.fixture
def blocked(request):
    """The process; for it, a second SIGTERM only repeats the request, unless a test says so."""
    blocked = Blocked(getattr(request, "param", 1000))
    yield blocked
    blocked.process.kill()
    blocked.process.wait()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGQUIT])
def test_the_first_signal_is_a_request_and_a_second_sigint_kills(blocked, sent):
    blocked.send(sent)
    assert blocked.read() == sent
    assert blocked.lives()
    blocked.send(signal.SIGTERM)
    assert blocked.lives()  # it came again at once
    blocked.send(signal.SIGINT)
    assert blocked.process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("blocked", [0], indirect=True)
def test_a_later_sigterm_kills(blocked):
    blocked.send(signal.SIGTERM)
    assert blocked.read() == signal.SIGTERM
    blocked.send(signal.SIGTERM)
    assert blocked.process.wait() == -signal.SIGKILL


def test_other_signals_and_those_that_nohup_ignores_are_no_request(blocked):
    blocked.send(signal.SIGWINCH, signal.SIGHUP, signal.SIGHUP, signal.SIGTERM)
    assert blocked.read() == signal.SIGTERM
    assert blocked.lives()
