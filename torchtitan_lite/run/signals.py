"""The signals that ask a run to stop, and what a second one does."""

import os
import signal
import threading
import time
from collections.abc import Callable

REPEAT_SECONDS = {signal.SIGINT: 0.5} | dict.fromkeys(
    (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2), 3.0
)
"""The first of these signals asks the run to stop and save. A second one kills it, unless it comes
within these seconds of the first and repeats it: schedulers signal every process, and launcher and
agent pass on what they get."""


class StopSignal:
    """The request of a signal to stop, in the launcher and in each rank.

    Made once a process, on the main thread. Signals that the process ignores stay ignored, as under
    nohup. A second signal calls `kill`."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self.received = 0  # number of the first signal that asked to stop; 0 if none has
        self.repeated = False  # whether a second one has called `kill`

        # Python runs a handler between two bytecodes of the main thread, which may wait minutes for
        # a collective. The interpreter's own C handler writes each signal's number to this pipe at
        # once, and a thread reads it there.
        self._pipe, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in REPEAT_SECONDS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._read, args=(kill,), name="signals", daemon=True).start()

    def _read(self, kill: Callable[[], None]) -> None:
        received_at = 0.0
        while True:
            (number,) = os.read(self._pipe, 1)
            if number not in REPEAT_SECONDS:
                continue
            if not self.received:
                self.received, received_at = number, time.monotonic()
            elif time.monotonic() - received_at > REPEAT_SECONDS[signal.Signals(number)]:
                self.repeated = True
                kill()
