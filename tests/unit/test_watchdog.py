"""The watchdog of a rank, in this process; tests/distributed has ranks that are really lost."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import cast

import pytest
import torch.distributed as dist

from torchtitan_lite.base.errors import DataError, RankLostError, RunError, StorageError
from torchtitan_lite.run import watchdog
from torchtitan_lite.run.process_group import connect_store
from torchtitan_lite.run.watchdog import (
    Heartbeat,
    Watchdog,
    describe_place,
    end_silent,
)

pytestmark = pytest.mark.timeout(60)
BEAT = Heartbeat(pid=5, host="elsewhere", time=0, step=7, phase="forward", place="in all_reduce")
BUSY = replace(BEAT, place="at train.py:9 in loss")
SEEN = r"at step 7, forward, in all_reduce \(process 5 on elsewhere\)"
STOPPED = {"stop_signal": SimpleNamespace(received=signal.SIGTERM)}
ORPHAN = {"_torchrun": -1}


@pytest.fixture
def served(monkeypatch):
    """The store, alone in a list, of a job of two ranks whose rank 0 is this process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "0"}
    env |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(watchdog, "STORE_SECONDS", 30)  # on a busy machine two are too few
    monkeypatch.setattr(watchdog, "StopSignal", lambda kill: SimpleNamespace(received=0))
    return [store]


def post(beats: Sequence[Heartbeat | None], *, at: float) -> None:
    """Post the heartbeats of the ranks from 1 on."""
    store = connect_store(30)
    for rank, beat in enumerate(beats, start=1):
        if beat is not None:
            store.set(f"watchdog/heartbeat/{rank}", json.dumps(asdict(replace(beat, time=at))))


# ----- Watchdog: explain -----


MISSING = (errno.ENOENT, "No such file or directory")
GLOO = "[../gloo/transport/tcp/pair.cc:553] Connection closed by peer"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError(errno.ENOSPC, "Full"), StorageError, "Errno 28. Full; make room"),
        (
            FileNotFoundError(*MISSING, b"/runs/a/tb/events"),
            StorageError,
            "events.; check the path",
        ),
        (OSError(errno.ECONNRESET, "reset"), RunError, "^ConnectionResetError: .*reset"),
        (RuntimeError(GLOO), RankLostError, "^rank 1 has ended; .*gloo"),
        (dist.DistBackendError("NCCL error"), RankLostError, "^rank 1 has ended; NCCL error"),
        (ValueError("gloo"), RunError, "^ValueError: gloo$"),
        (RuntimeError("shapes differ"), RunError, "^RuntimeError: shapes differ$"),
        (
            RuntimeError("\n".join(map(str, range(99)))),
            RunError,
            r"^RuntimeError: 0\n(\d\n){9}\.\.\.\n89\n(\d\d\n){8}98$",
        ),
        (DataError("no text"), DataError, "^no text$"),
    ],
)
def test_disks_that_fail_and_lost_ranks_are_told_from_other_failures(
    error, kind, message, served, monkeypatch
):
    def explain_loss(dog: Watchdog, error: Exception) -> RankLostError:
        return RankLostError(f"rank 1 has ended; {error}")

    monkeypatch.setattr(Watchdog, "explain_loss", explain_loss)
    dog = Watchdog(report=print)
    known = dog.explain(error)
    dog.close()
    assert type(known) is kind and re.search(message, str(known))
    assert known.rank == (0 if kind is RunError else None)


# ----- Watchdog: explain_loss -----


@pytest.mark.parametrize(
    ("beats", "alive", "rank", "message"),
    [
        ([None], False, 1, "^rank 1 is silent; last seen never; rank 0 waited at step 0, start, "),
        ([BEAT] * 8, False, 1, rf"^(rank \d is silent; last seen {SEEN}; ){{8}}rank 0 waited"),
        ([BEAT] * 10, False, 1, rf"; rank 8 is silent; last seen {SEEN}; 2 more; rank 0 waited"),
        ([BEAT], True, None, f"^rank 1 waits too, {SEEN}; rank 0 waited .*; no eth7 in gloo$"),
        ([BEAT, BUSY], True, 2, "^rank 2 is in no collective, but at step 7, .* loss .*; rank 0 "),
    ],
)
def test_silent_ranks_or_else_those_in_no_collective_are_named(
    beats, alive, rank, message, served, monkeypatch
):
    def look(seconds: float) -> None:
        post(beats, at=2.0 if alive else 1.0)

    post(beats, at=1.0)
    monkeypatch.setattr(watchdog.time, "sleep", look)
    monkeypatch.setenv("WORLD_SIZE", str(len(beats) + 1))
    dog = Watchdog(report=print)
    try:
        raise RuntimeError("no eth7 in gloo\nframe #0")
    except RuntimeError as error:
        lost = dog.explain_loss(error)
        assert lost.rank == rank
        assert re.search(message, str(lost))
        dog.fail("no text")
        assert re.match(r"rank 0 \(process .*\): no text$", str(dog.explain_loss(error)))
    finally:
        dog.close()


@pytest.fixture
def child(monkeypatch):
    """A process that seems to have the same parent as this one."""
    monkeypatch.setattr(os, "getppid", os.getpid)
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("sent", "state", "verdict"),
    [
        (signal.SIGCONT, "SR", "was silent and is killed now"),
        (signal.SIGSTOP, "T", "was stopped and is killed now"),
        (signal.SIGKILL, "Z", "has ended"),
    ],
)
def test_end_silent_kills_a_process_of_this_host(sent, state, verdict, child, monkeypatch):
    beat = replace(BEAT, pid=child.pid, host=socket.gethostname())
    assert end_silent(None) == end_silent(replace(beat, host="elsewhere")) == "is silent"
    with monkeypatch.context() as patch:
        patch.setattr(os, "getppid", lambda: -1)
        assert end_silent(beat) == "has ended"  # another process has its number
    child.send_signal(sent)
    while Path(f"/proc/{child.pid}/stat").read_text().split(") ")[1][0] not in state:
        time.sleep(0.01)
    assert end_silent(beat) == verdict
    assert child.wait() == -signal.SIGKILL
    assert end_silent(beat) == "has ended"


def test_describe_place_in_collectives_and_in_code():
    def code(file: str, function: str) -> CodeType:
        return cast(CodeType, SimpleNamespace(co_filename=file, co_name=function))

    collective = code(f"{Path(dist.__file__).parent}/distributed_c10d.py", "all_reduce")
    assert describe_place(collective, 9) == "in all_reduce"
    assert describe_place(code("/home/me/train.py", "loss"), 9) == "at train.py:9 in loss"


# ----- Watchdog: the thread -----


@pytest.fixture
def ended(monkeypatch):
    """Exit code and cause with which a watchdog, which ticks fast, ends this process."""
    ended: list[str] = []

    def end(self: Watchdog, cause: str, exit_code: int = 6) -> None:
        ended.append(f"{exit_code} {cause}")
        self._closed.set()

    monkeypatch.setattr(Watchdog, "_end", end)
    monkeypatch.setattr(watchdog, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "MAX_SILENT_TICKS", 3000)
    monkeypatch.setattr(watchdog, "EXTRA_SECONDS", 0)
    return ended


@pytest.mark.parametrize(
    ("own", "step", "end"),
    [
        ({}, 0, None),
        (STOPPED, 0, "75 stopped by SIGTERM before the first step$"),
        (STOPPED | ORPHAN, 1, None),  # the ranks save
        (ORPHAN, 0, "6 torchrun, .*, is gone$"),
        ({"timeout_s": 0.1}, 1, f"6 rank 0 .*: rank 1 is silent; last seen {SEEN}$"),
    ],
)
def test_a_process_ends_when_torchrun_or_another_rank_is_gone(own, step, end, served, ended):
    post([BEAT], at=1.0)
    dog = Watchdog(report=print)
    dog.at(step, "data")
    vars(dog).update(own)
    dog._judging.join(0.3 if end is None else 40)
    dog.close()
    assert len(ended) == (end is not None)
    assert end is None or re.match(end, ended[0])


@pytest.mark.parametrize("agent", ["-1", ""])
def test_a_process_ends_while_it_connects(agent, served, ended, monkeypatch):
    monkeypatch.setenv("TORCHTITAN_LITE_AGENT", agent)
    monkeypatch.setattr(watchdog, "MAX_SILENT_TICKS", 30)
    monkeypatch.setattr(watchdog, "STORE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:  # it accepts, and never answers
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        dog = Watchdog(report=print)
        dog._judging.join(40)
    dog.close()
    assert re.match("6 torchrun, .* is gone" if agent else "6 torchrun's store, .* answer", *ended)
