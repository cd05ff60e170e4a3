"""The signals that ask a run to stop, and how a rank hears them."""

import os
import signal
import threading
import time

DUPLICATE_SECONDS = {
    signal.SIGINT: 0.5,
    signal.SIGTERM: 3.0,
    signal.SIGHUP: 3.0,
    signal.SIGQUIT: 3.0,
    signal.SIGUSR1: 3.0,
    signal.SIGUSR2: 3.0,
}
"""All of them mean the same. A second one this soon after the first repeats the request: schedulers
signal every process, and the agent passes on the signals that it gets."""


class StopSignal:
    """The request of a signal to stop the run before its next forward pass.

    Made once a process, on the main thread. A second signal that is no duplicate kills this process
    at once by SIGKILL.
    """

    def __init__(self) -> None:
        self.received = 0
        """Number of the first signal that asked to stop; 0 if none has."""

        # Python runs a handler between two bytecodes of the main thread, which may wait minutes for
        # a collective. The interpreter's own C handler writes each signal's number to this pipe at
        # once, and a thread reads it there.
        self._pipe, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in DUPLICATE_SECONDS:
            # nohup's SIGHUP stays ignored. Shells make background jobs ignore SIGINT and SIGQUIT,
            # but a rank gets these from somebody who names the process.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._read, name="signals", daemon=True).start()

    def _read(self) -> None:
        received_at = 0.0
        while True:
            (number,) = os.read(self._pipe, 1)
            if number not in DUPLICATE_SECONDS:
                continue
            if not self.received:
                self.received, received_at = number, time.monotonic()
            elif time.monotonic() - received_at > DUPLICATE_SECONDS[signal.Signals(number)]:
                os.kill(os.getpid(), signal.SIGKILL)
