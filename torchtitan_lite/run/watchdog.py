"""The threads that end this process when torchrun, its store or other ranks are gone.

"Torchrun" is the parent: torchrun itself, or the agent of torchtitan_lite.run.launch. Once a second
a thread of each rank posts a heartbeat, which says where the main thread is, to torchrun's store,
and looks at the others. The store may never answer, so another thread decides:

| lost | what ends this process |
| --- | --- |
| torchrun, or its store for 30 s | the thread, with exit code 6 |
| a rank, in a collective | the collective fails, at once or by its time-out: `explain_loss` |
| a rank, while others wait outside of collectives | the rank before it calls `fail` |
| a rank that has called `fail` | this process has 10 s to end by itself; then as for torchrun |
| a signal asks to stop before the first step of this start | the thread, with exit code 75 |

`explain_loss` kills a silent rank on the same host: a stopped process acts on no other signal, and
torchrun would wait for it. The threads count ticks, not seconds, so that a job that is suspended as
a whole goes on when it is continued. Once a stop was asked for, the loss of torchrun or of its
store ends nothing: the same signals may have ended torchrun, and the ranks save without it.
"""

import atexit
import errno
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType

import torch.distributed as dist

from torchtitan_lite.base.errors import STOPPED_EXIT_CODE, RankLostError, RunError, StorageError
from torchtitan_lite.base.files import DISK_FULL, storage_fix
from torchtitan_lite.base.logger import logger

from .process_group import connect_store, read_rank
from .signals import StopSignal

TICK_SECONDS = 1.0
MAX_SILENT_TICKS = 30  # without an answer of the store, which end the process
GRACE_TICKS = 10  # for a process to end by itself after a rank has failed
EXTRA_SECONDS = 10  # longer than a collective may take: its failure says more than the thread's
LOOK_SECONDS = 3.0  # a rank is silent if its heartbeat does not change for this long
STORE_SECONDS = 2.0  # for the store to answer
SHOWN_RANKS, SHOWN_LINES = 8, 20
DISK_ERRORS = DISK_FULL | {errno.EIO, errno.EROFS, errno.ESTALE}
FAILURE_KEY, HEARTBEAT_KEY = "watchdog/failure", "watchdog/heartbeat/{}"


@dataclass(frozen=True)
class Heartbeat:
    """Where a rank's main thread is."""

    pid: int
    host: str
    time: float
    step: int
    phase: str
    place: str  # "in COLLECTIVE", or "at FILE:LINE in FUNCTION"

    def __str__(self) -> str:
        where = f"at step {self.step}, {self.phase}, {self.place}"
        return f"{where} (process {self.pid} on {self.host})"


class Watchdog:
    """The threads, and the main thread's way to ask about other ranks and to report to them.

    Made once a process, on the main thread. Before a thread ends the process it calls `report` with
    the cause and the step."""

    def __init__(self, *, report: Callable[[RankLostError, int], None]) -> None:
        self._rank, self._world_size = read_rank()
        self._report = report
        self.timeout_s = math.inf  # current time-out of collectives
        self.stop_signal = StopSignal(kill=lambda: os.kill(os.getpid(), signal.SIGKILL))
        self.step, self._phase = 0, "start"
        self._torchrun = int(os.environ.get("TORCHTITAN_LITE_AGENT") or os.getppid())
        self._main_thread = threading.get_ident()
        self._failed_in = ""  # place of the collective that has failed
        self._failure = ""  # that a rank has reported
        self._silent_ticks = 0

        self._closed = threading.Event()
        self._judging = threading.Thread(target=self._judge, daemon=True)
        self._talking = threading.Thread(target=self._talk, daemon=True)
        self._judging.start()
        self._talking.start()
        # A thread that is in C++ while the interpreter is torn down aborts the process.
        atexit.register(self.close)

    def at(self, step: int, phase: str) -> None:
        """Note that the main thread now does `phase` of `step`."""
        self.step, self._phase = step, phase

    def explain(self, error: Exception) -> RunError:
        """Return the RunError that names the cause of `error` and the fix; a plain RunError for an
        unexpected error of this rank."""
        if isinstance(error, RunError):
            return error
        if isinstance(error, OSError) and (error.errno in DISK_ERRORS or error.filename):
            return StorageError(f"{error}; {storage_fix(error)}.")

        # When a rank is killed or hangs, a collective raises an error of NCCL, of the store, or of
        # gloo, which names its source files in its messages.
        in_gloo = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
        if isinstance(error, dist.DistError) or in_gloo:
            return self.explain_loss(error)
        lines = f"{type(error).__name__}: {error}".splitlines()
        if len(lines) > SHOWN_LINES:  # a compiler's; the rank's log has all
            lines[SHOWN_LINES // 2 : -SHOWN_LINES // 2] = ["..."]
        unexpected = RunError("\n".join(lines))
        unexpected.rank = self._rank
        return unexpected

    def explain_loss(self, error: Exception) -> RankLostError:
        """Return why the collective failed that raised `error`: the failure that another rank has
        reported; else the silent ranks; else the ranks in no collective. The first of these ranks
        is the error's `rank`. Takes LOOK_SECONDS. Kills silent processes of this host."""
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        self._failed_in = describe_place(frame.f_code, line)
        said = str(error).partition("\n")[0]  # C++ frames may follow
        other_ranks = [rank for rank in range(self._world_size) if rank != self._rank]
        try:
            store = connect_store(STORE_SECONDS)
            before = {rank: read_heartbeat(store, rank) for rank in other_ranks}
            time.sleep(LOOK_SECONDS)
            others = {rank: read_heartbeat(store, rank) for rank in other_ranks}
            failure = read(store, FAILURE_KEY)
        except RuntimeError:
            return RankLostError(
                f"torchrun's store does not answer any more, {self._failed_in}: {said}"
            )
        if failure:
            return RankLostError(failure)

        # Suspect the silent ranks, else those that never entered the collective, else all.
        verdicts = {
            rank: f"{end_silent(beat)}; last seen"
            for rank, beat in others.items()
            if beat == before[rank]
        }
        if not verdicts:
            busy = [rank for rank, beat in others.items() if beat and beat.place.startswith("at ")]
            verdicts = dict.fromkeys(busy, "is in no collective, but")
        named = verdicts or dict.fromkeys(others, "waits too,")

        lines = [f"rank {rank} {text} {others[rank] or 'never'}" for rank, text in named.items()]
        if len(lines) > SHOWN_RANKS:
            lines[SHOWN_RANKS:] = [f"{len(lines) - SHOWN_RANKS} more"]
        lines += [f"rank {self._rank} waited {self._heartbeat()}", said]
        lost = RankLostError("; ".join(lines))
        lost.rank = next(iter(verdicts), None)
        return lost

    def fail(self, cause: str) -> None:
        """Report to all ranks that the job has failed. The first report counts."""
        line = f"rank {self._rank} (process {os.getpid()} on {socket.gethostname()}): {cause}"
        with suppress(RuntimeError):
            connect_store(STORE_SECONDS).compare_set(FAILURE_KEY, "", line)

    def close(self) -> None:
        """Stop watching, after the last collective: torchrun's store may go before all ranks."""
        self._closed.set()
        self._judging.join()
        self._talking.join(STORE_SECONDS)  # unless the store keeps it waiting

    def _judge(self) -> None:
        """End this process once it cannot go on. Never waits for the store."""
        failed_ticks = 0
        while not self._closed.is_set():
            if number := self.stop_signal.received:
                if self.step == 0:  # nothing to save: text may be tokenized for hours
                    name = signal.Signals(number).name
                    self._end(f"stopped by {name} before the first step", STOPPED_EXIT_CODE)
            elif os.getppid() != self._torchrun:
                self._end("torchrun, which had started this process, is gone")
            elif self._silent_ticks > MAX_SILENT_TICKS:
                self._end("torchrun's store, on the host of rank 0, does not answer")

            self._silent_ticks += 1
            if self._failure:
                failed_ticks += 1
            if failed_ticks > GRACE_TICKS:
                self._end(self._failure)
            self._closed.wait(TICK_SECONDS)

    def _talk(self) -> None:
        """Tell the store about this rank, and read what it has about others."""
        store: dist.Store | None = None
        neighbour, last_beat, quiet_ticks = (self._rank + 1) % self._world_size, None, 0
        while not self._closed.is_set():
            try:
                store = store or connect_store(STORE_SECONDS)
                store.set(HEARTBEAT_KEY.format(self._rank), json.dumps(asdict(self._heartbeat())))
                self._failure = read(store, FAILURE_KEY)
                beat = read_heartbeat(store, neighbour)
                self._silent_ticks = 0

                # The next rank may be silent.
                quiet_ticks = quiet_ticks + 1 if beat is not None and beat == last_beat else 0
                last_beat = beat
                if quiet_ticks * TICK_SECONDS > self.timeout_s + EXTRA_SECONDS:
                    self.fail(f"rank {neighbour} {end_silent(beat)}; last seen {beat}")
            except RuntimeError:
                store = None
            self._closed.wait(TICK_SECONDS)

    def _end(self, cause: str, exit_code: int = RankLostError.exit_code) -> None:
        """End this process, after a report that may hang: the log and the run folder may be out of
        reach, and the main thread may hang while it holds the log's lock."""
        threading.Timer(5, os._exit, (exit_code,)).start()
        try:
            logger.warning(f"error:\n{cause}")
            error = RankLostError(cause)
            error.exit_code = exit_code
            self._report(error, self.step)
        finally:
            os._exit(exit_code)

    def _heartbeat(self) -> Heartbeat:
        place = "at the end of the process"
        if frame := sys._current_frames().get(self._main_thread):
            place = self._failed_in or describe_place(frame.f_code, frame.f_lineno)
        host = socket.gethostname()
        return Heartbeat(os.getpid(), host, time.time(), self.step, self._phase, place)


def read(store: dist.Store, key: str) -> str:
    """Return the value of `key`; "" if no rank has set it."""
    return store.get(key).decode() if store.check([key]) else ""


def read_heartbeat(store: dist.Store, rank: int) -> Heartbeat | None:
    """Return the last heartbeat of a rank; None if it has not posted any."""
    beat = read(store, HEARTBEAT_KEY.format(rank))
    return Heartbeat(**json.loads(beat)) if beat else None


def describe_place(code: CodeType, line: int) -> str:
    """Return the place of a thread whose innermost Python frame is in `code`. Code that waits for
    other ranks does so within torch.distributed, in C++."""
    if Path(code.co_filename).is_relative_to(Path(dist.__file__).parent):
        return f"in {code.co_name}"
    return f"at {Path(code.co_filename).name}:{line} in {code.co_name}"


def end_silent(beat: Heartbeat | None) -> str:
    """Kill a silent process if torchrun started it on this host, and return what became of it."""
    if beat is None or beat.host != socket.gethostname():
        return "is silent"
    try:
        state, parent = Path(f"/proc/{beat.pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "has ended"
    if state == "Z" or int(parent) != os.getppid():
        return "has ended"
    with suppress(ProcessLookupError):
        os.kill(beat.pid, signal.SIGKILL)
    return f"was {'stopped' if state == 'T' else 'silent'} and is killed now"
