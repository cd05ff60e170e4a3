"""Ranks lost in every way, as small jobs of real processes. This process serves the store in
torchrun's place."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import cast

import pytest
import torch.distributed as dist

from torchtitan_lite.errors import RankLostError
from torchtitan_lite.parallel import watchdog
from torchtitan_lite.parallel.distributed import connect_store
from torchtitan_lite.parallel.watchdog import Heartbeat, Watchdog, describe_place, is_rank_loss

pytestmark = pytest.mark.timeout(40)
WORKER = Path(__file__).with_name("watchdog_worker.py")
ENV = os.environ | {
    "MASTER_ADDR": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
HOST = socket.gethostname()
WAITED = rf"rank 0 waited at step 7, agreement, in all_reduce \(process \d+ on {HOST}\)"


class Job:
    """Ranks that each run a command of the worker, and the store where they meet."""

    def __init__(self, *commands: str) -> None:
        self.store: dist.TCPStore | None = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self.store.set("attempt-0/watchdog/failure", "rank 1: of an earlier attempt")
        env = ENV | {"MASTER_PORT": str(self.store.port), "WORLD_SIZE": str(len(commands))}
        self.ranks = [
            start(command, env=env | {"RANK": str(rank)}) for rank, command in enumerate(commands)
        ]

    def wait_ready(self) -> None:
        for rank in self.ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"

    def end(self, *, kill: int | None = None) -> tuple[list[int], list[str]]:
        """Return the exit code and the output of each rank. Rank `kill` is killed after rank 0 has
        ended."""
        if kill is not None:
            self.ranks[0].wait()
            self.ranks[kill].kill()
        outputs = [rank.communicate()[0] for rank in self.ranks]
        return [rank.returncode for rank in self.ranks], outputs


def start(*commands: str, env: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, WORKER, *commands]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def explained(output: str) -> str:
    (line,) = re.findall(r"^explained: (.*)$", output, re.MULTILINE)
    return line


def test_a_rank_asleep_is_named_and_ended() -> None:
    (waiting, asleep), outputs = Job("join", "sleep").end()
    cause = explained(outputs[0])
    place = rf"at step 7, forward, at watchdog_worker.py:\d+ in work \(process \d+ on {HOST}\)"
    assert re.fullmatch(rf"rank 1 is in no collective, but {place}; {WAITED}", cause)
    assert (waiting, asleep) == (6, 6)
    assert "rank: 1\n" in outputs[0]
    assert re.search(
        rf"^report: rank 0 \(process \d+ on {HOST}\): {re.escape(cause)}$", outputs[1], re.MULTILINE
    )


@pytest.mark.parametrize(
    ("command", "verdict"), [("freeze", "was stopped and is killed now"), ("die", "has ended")]
)
def test_a_silent_rank_is_named_and_does_not_outlive_the_job(command: str, verdict: str) -> None:
    codes, outputs = Job("join", command).end()
    assert codes == [6, -signal.SIGKILL]
    assert re.fullmatch(
        rf"rank 1 {verdict}; last seen at step \d, .*; {WAITED}", explained(outputs[0])
    )


def test_a_silent_rank_is_found_where_the_others_would_wait_for_long() -> None:
    codes, outputs = Job("wait", "freeze").end()
    assert codes == [6, -signal.SIGKILL]
    assert "rank 1 was stopped and is killed now; last seen at" in explained(
        outputs[0]
    )  # it failed by the kill


def test_the_failure_of_another_rank_is_the_cause() -> None:
    codes, outputs = Job("join", "fail").end()
    assert codes == [6, 3]
    assert re.fullmatch(rf"rank 1 \(process \d+ on {HOST}\): the text ended", explained(outputs[0]))


def test_ranks_end_when_the_store_is_gone_but_not_once_they_have_closed() -> None:
    job = Job("outlast", "close and outlast")
    job.wait_ready()
    job.store = None
    codes, outputs = job.end()
    assert codes == [6, 0]
    assert (
        "report: torchrun's store, on the host of rank 0, does not answer any more\n" in outputs[0]
    )


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    process = start("outlast", "stop on SIGTERM and outlast", env=ENV)
    yield process
    process.kill()


def test_orphans_end_but_not_while_they_stop_on_a_signal(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    assert [parent.stdout.readline() for _ in range(2)] == ["ready\n", "ready\n"]
    parent.kill()
    lines = parent.stdout.read().splitlines()  # until both ranks, which share it, have ended
    assert "report: torchrun, which had started this process, is gone" in lines
    assert lines.count("outlasted") == 1


def test_a_stop_before_the_ranks_have_joined_ends_a_rank_that_waits_for_another() -> None:
    codes, outputs = Job("stop and join", "sleep first").end(kill=1)
    assert codes[0] == 75
    assert "report: stopped by a signal before the ranks joined\n" in outputs[0]


def test_a_job_of_one_rank_that_serves_the_store_itself() -> None:
    env = ENV | {
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "MASTER_PORT": "0",
        "WORLD_SIZE": "1",
        "RANK": "0",
    }
    with socket.create_server(("127.0.0.1", 0)) as server:
        env["MASTER_PORT"] = str(server.getsockname()[1])
    assert start("join", env=env).wait() == 0


def test_without_a_store_there_is_no_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**ENV, "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(watchdog, "START_SECONDS", 1)
    monkeypatch.setattr(watchdog, "StopSignal", lambda: SimpleNamespace(received=0))
    with pytest.raises(RankLostError, match="torchrun's store does not answer: .*127.0.0.1"):
        Watchdog(report=print)


def explain_here(
    monkeypatch: pytest.MonkeyPatch, beats: Sequence[Heartbeat | None], *, alive: bool
) -> RankLostError:
    """Return the explanation of rank 0, this process, where the other ranks have posted `beats`."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        **ENV,
        "MASTER_PORT": str(store.port),
        "RANK": "0",
        "WORLD_SIZE": str(len(beats) + 1),
    }.items():
        monkeypatch.setenv(name, value)

    def post(time: float) -> None:
        for rank, beat in enumerate(beats, start=1):
            if beat is not None:
                connect_store(30).set(
                    f"watchdog/heartbeat/{rank}", json.dumps(asdict(replace(beat, time=time)))
                )

    post(1.0)
    monkeypatch.setattr(watchdog, "STORE_SECONDS", 30)  # on a busy machine two are too few
    monkeypatch.setattr(watchdog.time, "sleep", lambda seconds: post(2.0 if alive else 1.0))
    monkeypatch.setattr(watchdog, "StopSignal", lambda: SimpleNamespace(received=0))
    dog = Watchdog(report=print)
    try:
        raise RuntimeError("gloo")
    except RuntimeError as error:
        return dog.explain(error)
    finally:
        dog.close()


BEAT = Heartbeat(pid=5, host="elsewhere", time=0, step=7, phase="forward", place="in all_reduce")


def test_of_many_silent_ranks_some_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = explain_here(monkeypatch, [None, *[BEAT] * 9], alive=False)
    parts = str(lost).split("; ")
    assert lost.rank == 1
    assert parts[:4] == [
        "rank 1 is silent",
        "last seen never",
        "rank 2 is silent",
        "last seen at step 7, forward, in all_reduce (process 5 on elsewhere)",
    ]
    assert parts[-3] == "last seen at step 7, forward, in all_reduce (process 5 on elsewhere)"
    assert parts[-2] == "2 more"
    assert parts[-1].startswith("rank 0 waited at step 0, start, at test_watchdog.py:")


def test_a_rank_of_a_pipeline_is_named_with_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = explain_here(monkeypatch, [replace(BEAT, stages=(1, 3))], alive=False)
    assert str(lost).startswith(
        "rank 1 is silent; last seen at step 7, stage 1, stage 3, forward, in all_reduce "
        "(process 5 on elsewhere); rank 0 waited at step 0, start, "
    )


def test_where_all_ranks_wait_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = explain_here(monkeypatch, [BEAT], alive=True)
    assert lost.rank is None
    assert str(lost).startswith(
        "rank 1 waits too, at step 7, forward, in all_reduce (process 5 on elsewhere); rank 0 "
    )


def test_places_in_collectives_and_in_code() -> None:
    def code(file: str, function: str) -> CodeType:
        return cast(CodeType, SimpleNamespace(co_filename=file, co_name=function))

    collective = code(f"{Path(dist.__file__).parent}/distributed_c10d.py", "all_reduce")
    assert describe_place(collective, 9) == "in all_reduce"
    assert describe_place(code("/home/me/train.py", "loss"), 9) == "at train.py:9 in loss"


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (
            RuntimeError(
                "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:19127."
            ),
            True,
        ),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo"), False),
    ],
)
def test_errors_that_mean_a_lost_rank(error: Exception, verdict: bool) -> None:
    assert is_rank_loss(error) is verdict
