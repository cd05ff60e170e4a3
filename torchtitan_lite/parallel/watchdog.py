"""What a process does when others of its job are gone: its parent, or other ranks.

Its parent is torchrun, or the agent of torchtitan_lite.launch; both are called torchrun here. Each
rank has a thread that once a second posts a heartbeat to the store of torchrun's job and then looks
around. The heartbeat says where the main thread is. What is detected, how fast, and what happens:

- Torchrun is gone: the threads of its ranks see it within 1 s and end their processes with exit
  code 6.
- The store, on the host of rank 0, does not answer 3 times in a row: all threads see it within
  about 10 s and end their processes with exit code 6.
- A rank was killed: the main threads of ranks in a collective with it see at once that its
  connections are closed. A rank hangs, asleep or stopped: their collective times out. In both cases
  `explain` finds out within 3 s which rank it is, and kills it if it is silent and on the same
  host: a stopped process acts on no other signal, and torchrun would wait for it. The caller
  reports the explanation and calls `fail`.
- A rank is silent for longer than a collective may take, while others wait for it outside of
  collectives, as in a save: the thread of the rank before it sees that and calls `fail`.
- A rank has called `fail`: all threads see it within 1 s. Their processes, which may hang, have
  10 s to end by themselves; then the threads end them with exit code 6.
- A signal asks this process to stop before the ranks have joined: the same signal may have killed
  the rank that it waits for, and there is nothing to save. The thread ends it with exit code 75.

The thread counts ticks, not seconds, so that a job that is suspended as a whole goes on when it is
continued. Once a stop was asked for, the loss of torchrun or of its store ends nothing: the same
signals may have ended torchrun, and the ranks save without it, or fail in a collective.
"""

import atexit
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
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from torchtitan_lite.errors import STOPPED_EXIT_CODE, RankLostError
from torchtitan_lite.logger import logger

from .signals import StopSignal
from .store import connect_store

TICK_SECONDS = 1.0
MAX_MISSES = 3  # ticks in a row without an answer of the store that end the process
GRACE_TICKS = 10  # for a process to end by itself after a rank has failed
EXTRA_SECONDS = 10  # longer than a collective may take: its failure says more than the thread's
LOOK_SECONDS = 3.0  # a rank is silent if its heartbeat does not change for this long
START_SECONDS = 30.0  # for the store to answer at first
STORE_SECONDS = 2.0  # for it to answer later
SHOWN_RANKS = 8
FAILURE_KEY, HEARTBEAT_KEY = "watchdog/failure", "watchdog/heartbeat/{}"


@dataclass(frozen=True)
class Heartbeat:
    """Where a rank's main thread is. If it `waits`, `place` is the collective that it is in, else a
    line of source code."""

    pid: int
    host: str
    time: float
    step: int
    phase: str
    place: str
    waits: bool


class Watchdog:
    """The thread that ends this process when it is left alone, and the main thread's way to ask
    about other ranks and to report to them.

    Made once a process, on the main thread, before or after the process group is joined. Before the
    thread ends the process it calls `report` with the cause. Raises RankLostError if torchrun's
    store does not answer.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        stop_signal: StopSignal,
        report: Callable[[str], None],
        timeout_s: float = math.inf,
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self.stop_signal, self._report = stop_signal, report
        self.timeout_s = timeout_s  # current time-out of collectives
        self._torchrun = os.getppid()
        self._main_thread = threading.get_ident()
        self._position = (0, "start")
        self._failed_in: tuple[str, bool] | None = None
        try:
            store = connect_store(START_SECONDS)
            store.set_timeout(timedelta(seconds=STORE_SECONDS))
        except RuntimeError as error:
            raise RankLostError(f"torchrun's store does not answer: {error}") from error

        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, args=(store,), name="watchdog", daemon=True
        )
        self._thread.start()
        # A thread that is in C++ while the interpreter is torn down aborts the process.
        atexit.register(self.close)

    def at(self, step: int, phase: str) -> None:
        """Note that the main thread now does `phase` of `step`. Costs next to nothing."""
        self._position = (step, phase)

    @property
    def step(self) -> int:
        """The step that was noted last; 0 before the first."""
        return self._position[0]

    def explain(self, error: BaseException) -> RankLostError:
        """Return why the collective failed that raised `error`: the failure that another rank has
        reported; else the silent ranks; else the ranks in no collective. The first of these is the
        error's `rank`. Takes LOOK_SECONDS. Kills silent processes of this host."""
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        self._failed_in = describe_place(frame.f_code.co_filename, line, frame.f_code.co_name)
        try:
            store = connect_store(STORE_SECONDS)
            before = self._read_others(store)
            time.sleep(LOOK_SECONDS)
            others = self._read_others(store)
            failure = read_failure(store)
        except RuntimeError:
            return RankLostError(
                f"torchrun's store does not answer any more, and {self._failed_in[0]} failed: "
                f"{error}"
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
            busy = [rank for rank, beat in others.items() if beat and not beat.waits]
            verdicts = dict.fromkeys(busy, "is in no collective, but")
        named = verdicts or dict.fromkeys(others, "waits too,")

        lines = [
            f"rank {rank} {verdict} {describe(others[rank])}" for rank, verdict in named.items()
        ]
        if len(lines) > SHOWN_RANKS:
            lines[SHOWN_RANKS:] = [f"{len(lines) - SHOWN_RANKS} more"]
        lines.append(f"rank {self._rank} waited {describe(self._heartbeat())}")
        lost = RankLostError("; ".join(lines))
        lost.rank = next(iter(verdicts), None)
        return lost

    def fail(self, cause: str) -> None:
        """Report to all ranks that the job has failed. The first report counts."""
        line = f"rank {self._rank} (process {os.getpid()} on {socket.gethostname()}): {cause}"
        with suppress(RuntimeError):
            connect_store(STORE_SECONDS).compare_set(FAILURE_KEY, "", line)

    def close(self) -> None:
        """Stop watching, at the end of a successful run after its last collective: torchrun's store
        may go before all ranks have gone. Can be called again; the interpreter's end calls it."""
        self._closed.set()
        self._thread.join()

    def _watch(self, first_store: dist.Store) -> None:
        store: dist.Store | None = first_store
        failure = ""
        misses = failed_ticks = quiet_ticks = 0
        neighbour, last_beat = (self._rank + 1) % self._world_size, None
        while not self._closed.is_set():
            # The parent may be gone, or a stop asked for before the ranks have joined.
            if os.getppid() != self._torchrun:
                self._end_unless_stopping("torchrun, which had started this process, is gone")
            if self.stop_signal.received and not dist.is_initialized():
                self._end("stopped by a signal before the ranks joined", STOPPED_EXIT_CODE)

            # The store may not answer, any rank may have failed, and the next one may be silent.
            try:
                store = store or connect_store(STORE_SECONDS)
                store.set(HEARTBEAT_KEY.format(self._rank), json.dumps(asdict(self._heartbeat())))
                failure = read_failure(store)
                beat = read_heartbeat(store, neighbour)
                quiet_ticks = quiet_ticks + 1 if beat is not None and beat == last_beat else 0
                last_beat = beat
                if quiet_ticks * TICK_SECONDS > self.timeout_s + EXTRA_SECONDS:
                    self.fail(f"rank {neighbour} {end_silent(beat)}; last seen {describe(beat)}")
                misses = 0
            except RuntimeError:
                store, misses = None, misses + 1
            if misses >= MAX_MISSES:
                self._end_unless_stopping(
                    "torchrun's store, on the host of rank 0, does not answer any more"
                )

            failed_ticks += bool(failure)
            if failed_ticks > GRACE_TICKS:
                self._end(failure)
            self._closed.wait(TICK_SECONDS)

    def _end_unless_stopping(self, cause: str) -> None:
        if not self.stop_signal.received:
            self._end(cause)

    def _end(self, cause: str, exit_code: int = RankLostError.exit_code) -> None:
        """End this process, after a report that may hang: the log and the run folder may be out of
        reach, and the main thread may hang while it holds the log's lock."""
        threading.Timer(5, os._exit, (exit_code,)).start()
        try:
            logger.warning(f"error:\n{cause}")
            self._report(cause)
        finally:
            os._exit(exit_code)

    def _heartbeat(self) -> Heartbeat:
        place, waits = "the end of the process", False
        if frame := sys._current_frames().get(self._main_thread):
            code = frame.f_code
            place, waits = describe_place(code.co_filename, frame.f_lineno, code.co_name)
        place, waits = self._failed_in or (place, waits)
        pid, host = os.getpid(), socket.gethostname()
        return Heartbeat(pid, host, time.time(), *self._position, place, waits)

    def _read_others(self, store: dist.Store) -> dict[int, Heartbeat | None]:
        others = {*range(self._world_size)} - {self._rank}
        return {rank: read_heartbeat(store, rank) for rank in sorted(others)}


def is_rank_loss(error: BaseException) -> bool:
    """Return whether a collective failed or timed out, as when another rank is killed or hangs.

    The error comes from NCCL, from the store, or from gloo, which names its source files in its
    messages (also in "Connection closed by peer" and "Timed out waiting")."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )


def read_heartbeat(store: dist.Store, rank: int) -> Heartbeat | None:
    """Return the last heartbeat of a rank; None if it has not posted any."""
    key = HEARTBEAT_KEY.format(rank)
    return Heartbeat(**json.loads(store.get(key))) if store.check([key]) else None


def read_failure(store: dist.Store) -> str:
    """Return what the first failed rank reported; "" if none has."""
    return store.get(FAILURE_KEY).decode() if store.check([FAILURE_KEY]) else ""


def describe_place(file: str, line: int, function: str) -> tuple[str, bool]:
    """Return where a thread is whose innermost Python frame is in `function`, and whether that is a
    collective: code that waits for other ranks waits within torch.distributed, in C++."""
    if Path(file).is_relative_to(Path(dist.__file__).parent):
        return function, True
    return f"{Path(file).name}:{line} in {function}", False


def describe(beat: Heartbeat | None) -> str:
    """Return the step of a rank and its place in that step."""
    if beat is None:
        return "never"
    where = f"{'in' if beat.waits else 'at'} {beat.place}"
    return f"at step {beat.step}, {beat.phase}, {where} (process {beat.pid} on {beat.host})"


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
