"""What a process does when others of its job are gone: torchrun, or other ranks.

Each rank has a thread that once a second posts a heartbeat, where its main thread is, to the store
that torchrun serves and the process group uses too, and then looks around. What is detected, how
quickly, and what happens:

- torchrun is gone: its ranks' threads see it within 1 s, and end their processes with exit code 6.
- The store, on the host of rank 0, does not answer 3 times in a row: all threads see it within about 10 s, and end
  their processes with exit code 6.
- A rank was killed: in a collective, other ranks' main threads see at once that its connections are closed. A rank
  hangs, asleep or stopped: their collective times out. Either way `explain` then finds within 3 s which rank it is, and
  kills it if it is silent and on the same host: a stopped process acts on no other signal, and torchrun would wait for
  it. The caller reports the explanation and calls `fail`.
- A rank has been silent for longer than collectives take to time out, and others wait for it where they wait for long,
  as in a save: the thread of the rank before it sees that, and calls `fail`.
- A rank has called `fail`: all threads see it within 1 s. Their processes, which may hang, have 10 s to end by
  themselves, and are then ended with exit code 6.

Ticks are counted, not seconds, so that a job that is suspended as a whole goes on when it is
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

from torchtitan_lite.errors import RankLostError
from torchtitan_lite.logger import logger
from torchtitan_lite.parallel.signals import StopSignal
from torchtitan_lite.parallel.store import connect_store

TICK_SECONDS = 1.0
MAX_MISSES = 3
"""Ticks in a row without an answer of the store that end the process."""
GRACE_TICKS = 10
"""Ticks that a process has to end by itself after a rank has failed."""
EXTRA_SECONDS = 10
"""That a thread waits longer than a collective, whose failure tells more."""
LOOK_SECONDS = 3.0
"""A rank is silent if its heartbeat does not change for as long."""
START_SECONDS = 30.0
STORE_SECONDS = 2.0
"""Seconds that the store may take to answer, at first and then."""
SHOWN_RANKS = 8
"""Ranks that an explanation names at most."""
ENDED = ("the end of the process", False)
FAILURE_KEY = "watchdog/failure"


@dataclass(frozen=True)
class Heartbeat:
    """Where a rank's main thread is. `waits`: `place` is the collective that it is in, else a line
    of source code."""

    pid: int
    host: str
    time: float
    step: int
    phase: str
    place: str
    waits: bool


class Watchdog:
    """The thread that ends this process when it is left alone, and what the main thread tells and
    asks other ranks.

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
        self._torchrun = os.getppid()
        self._main_thread = threading.get_ident()
        self._position = (0, "start")
        self.timeout_s = timeout_s
        """The time-out of collectives, as it is now."""
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
        # A thread that is in C++ when the interpreter is torn down aborts the process.
        atexit.register(self.close)

    def at(self, step: int, phase: str) -> None:
        """Note what the main thread does from now on: `phase` of `step`. Costs next to nothing."""
        self._position = (step, phase)

    @property
    def step(self) -> int:
        """The step that was noted last; 0 before the first."""
        return self._position[0]

    def explain(self, error: BaseException) -> RankLostError:
        """Why the collective failed that raised `error`: the failure that another rank has told of;
        else the ranks that are silent; else those that are in no collective; the first of them is
        its `rank`. Takes LOOK_SECONDS. Kills silent processes of this host."""
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        self._failed_in = describe_place(frame.f_code.co_filename, line, frame.f_code.co_name)
        try:
            store = connect_store(STORE_SECONDS)
            before = self._read_heartbeats(store)
            time.sleep(LOOK_SECONDS)
            now = self._read_heartbeats(store)
            failure = read_failure(store)
        except RuntimeError:
            return RankLostError(
                f"torchrun's store does not answer any more, and {self._failed_in[0]} failed: {error}"
            )
        if failure:
            return RankLostError(failure)
        others = {rank: beat for rank, beat in now.items() if rank != self._rank}
        verdicts = {
            rank: f"{end_silent(beat)}; last seen"
            for rank, beat in others.items()
            if beat == before[rank]
        }
        if not verdicts:
            verdicts = {
                rank: "is in no collective, but"
                for rank, beat in others.items()
                if beat and not beat.waits
            }
        named = verdicts or dict.fromkeys(others, "waits too,")
        told = [
            f"rank {rank} {verdict} {describe(others[rank])}" for rank, verdict in named.items()
        ]
        more = [f"{len(told) - SHOWN_RANKS} more"] if len(told) > SHOWN_RANKS else []
        waited = f"rank {self._rank} waited {describe(self._heartbeat())}"
        lost = RankLostError("; ".join([*told[:SHOWN_RANKS], *more, waited]))
        lost.rank = next(iter(verdicts), None)
        return lost

    def fail(self, cause: str) -> None:
        """Tell all ranks, after reporting it, that the job has failed. The rank that tells first is
        heard."""
        told = f"rank {self._rank} (process {os.getpid()} on {socket.gethostname()}): {cause}"
        with suppress(RuntimeError):
            connect_store(STORE_SECONDS).compare_set(FAILURE_KEY, "", told)

    def close(self) -> None:
        """Watch no longer. For the end of a run that went well, after its last collective:
        torchrun's store may go before all ranks have gone. May be called again; the end of the
        interpreter calls it too."""
        self._closed.set()
        self._thread.join()

    def _watch(self, first_store: dist.Store) -> None:
        store: dist.Store | None = first_store
        failure = ""
        misses = failed_ticks = quiet_ticks = 0
        neighbour, last_beat = (self._rank + 1) % self._world_size, None
        while not self._closed.is_set():
            if os.getppid() != self._torchrun:
                self._end_unless_stopping("torchrun, which had started this process, is gone")
            try:
                store = store or connect_store(STORE_SECONDS)
                store.set(heartbeat_key(self._rank), json.dumps(asdict(self._heartbeat())))
                failure = read_failure(store)
                beat = self._read_heartbeat(store, neighbour)
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

    def _end(self, cause: str) -> None:
        """End this process with exit code 6."""
        exit_code = RankLostError.exit_code
        # The log and the run folder may be out of reach, or the main thread may hang with the log's
        # lock.
        threading.Timer(5, os._exit, (exit_code,)).start()
        try:
            logger.warning(f"error:\n{cause}")
            self._report(cause)
        finally:
            os._exit(exit_code)

    def _heartbeat(self) -> Heartbeat:
        step, phase = self._position
        frame = sys._current_frames().get(self._main_thread)
        here = (
            describe_place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            if frame
            else ENDED
        )
        place, waits = self._failed_in or here
        return Heartbeat(os.getpid(), socket.gethostname(), time.time(), step, phase, place, waits)

    def _read_heartbeats(self, store: dist.Store) -> dict[int, Heartbeat | None]:
        return {rank: self._read_heartbeat(store, rank) for rank in range(self._world_size)}

    def _read_heartbeat(self, store: dist.Store, rank: int) -> Heartbeat | None:
        """The last heartbeat of a rank; None if it has not posted any."""
        key = heartbeat_key(rank)
        return Heartbeat(**json.loads(store.get(key))) if store.check([key]) else None


def is_rank_loss(error: BaseException) -> bool:
    """Whether `error` is that of a collective that failed or timed out, as when another rank is
    killed or hangs: any of gloo, which names its source files in its messages (also "Connection
    closed by peer", "Timed out waiting"), of NCCL or of the store."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )


def heartbeat_key(rank: int) -> str:
    """The store's key of a rank's heartbeat."""
    return f"watchdog/heartbeat/{rank}"


def read_failure(store: dist.Store) -> str:
    """What the first rank told that failed; "" if none has."""
    return store.get(FAILURE_KEY).decode() if store.check([FAILURE_KEY]) else ""


def describe_place(file: str, line: int, function: str) -> tuple[str, bool]:
    """Where a thread is whose innermost Python frame is in `function`, and whether that is a
    collective. What waits for others waits within torch.distributed, in C."""
    if Path(file).is_relative_to(Path(dist.__file__).parent):
        return function, True
    return f"{Path(file).name}:{line} in {function}", False


def describe(beat: Heartbeat | None) -> str:
    """At which step and where in it a rank is."""
    if beat is None:
        return "never"
    where = f"{'in' if beat.waits else 'at'} {beat.place}"
    return f"at step {beat.step}, {beat.phase}, {where} (process {beat.pid} on {beat.host})"


def end_silent(beat: Heartbeat | None) -> str:
    """What became of a silent process. One that torchrun started on this host is killed."""
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
