import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite import run_folder
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.run_folder import (
    NEXT,
    Outcome,
    RunFolder,
    Status,
    StorageError,
    find_outcome,
    format_outcome,
    open_run_folder,
    read_status,
    report_failure,
)

ENTRIES = ("tb", "checkpoint", "metrics.jsonl")
REPORT = """W1120 21:04:07.582000 torch/elastic/multiprocessing/api.py:1028] Sending process 4475 closing signal SIGTERM
============================================================
torchtitan_lite.train FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-20_21:04:10
  host      : localhost
  rank      : 8 (local_rank: 0)
  exitcode  : {other} (pid: {pid})
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_21:04:07
  host      : localhost
  rank      : 9 (local_rank: 1)
  exitcode  : {code} (pid: 4474)  (SIGKILL)
  error_file: <N/A>
============================================================
"""


def report(code: int, *, other: int = -15, pid: int = 4475) -> str:
    """torchrun's report where rank 9 ended first, with `code`, and then rank 8, process `pid`, with
    `other`."""
    return REPORT.format(code=code, other=other, pid=pid)


CONFIG = "steps = 1\n"


def open_folder(path: Path, *, resume: bool = False) -> RunFolder:
    folder = open_run_folder(path)
    folder.begin(resumed_config=CONFIG if resume else None, entries=ENTRIES)
    return folder


def status_on_file(path: Path) -> dict:
    return json.loads((path / "status.json").read_text())


def leave_a_run(path: Path) -> None:
    """A finished run's files, the run started at a fixed time."""
    folder = open_folder(path)
    folder.write_config(CONFIG)
    (path / "checkpoint" / "step-00000001").mkdir(parents=True)
    (path / "metrics.jsonl").write_text("{}\n")
    folder.done()
    folder.close()
    status = status_on_file(path) | {"started": 1795208000.5}
    (path / "status.json").write_text(json.dumps(status))


def test_status_tells_how_far_the_run_is_and_how_it_ended(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "new" / "run")
    start = status_on_file(folder.path)
    assert start == {
        "state": "running",
        "started": start["time"],
        "time": start["time"],
        "step": 0,
        "last_checkpoint": None,
        "cause": None,
        "exit_code": None,
        "rank": None,
        "before": None,
        "job": f"process {os.getppid()} on {socket.gethostname()}",
    }
    folder.running(step=7, last_checkpoint="step-00000005")
    folder.done()
    end = status_on_file(folder.path)
    assert end["time"] >= start["time"]
    assert end == start | {
        "state": "done",
        "step": 7,
        "last_checkpoint": "step-00000005",
        "exit_code": 0,
        "time": end["time"],
    }


def test_a_stopped_run_exits_with_75(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    folder.stopped(cause="SIGTERM after step 3")
    status = status_on_file(tmp_path)
    assert (status["state"], status["cause"], status["exit_code"]) == (
        "stopped",
        "SIGTERM after step 3",
        75,
    )


def test_the_first_cause_stays(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    folder.running(step=2, last_checkpoint=None)
    report_failure(tmp_path, cause="the text ended", exit_code=3, rank=1, step=0)
    first = status_on_file(tmp_path)
    assert (first["state"], first["step"], first["cause"]) == ("failed", 2, "the text ended")
    assert (first["exit_code"], first["rank"]) == (3, 1)
    report_failure(tmp_path, cause="rank 1 was lost", exit_code=6, rank=None, step=0)
    folder.running(step=3, last_checkpoint=None)
    folder.stopped(cause="SIGTERM")
    assert status_on_file(tmp_path) == first


def test_a_failure_without_a_status_is_written(tmp_path: Path) -> None:
    report_failure(tmp_path, cause="no space", exit_code=7, rank=None, step=0)
    assert status_on_file(tmp_path)["cause"] == "no space"


STARTED = '{"state": "running", "time": 0, "started": %s}'


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"state": "running"}',
        '{"other": 1}',
        "[" * 10**5,
        *(STARTED % s for s in ('"x"', "NaN", "1e300")),
    ],
)
def test_a_status_of_another_form_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "status.json").write_text(content)
    assert read_status(tmp_path) is None


def test_config_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_folder(tmp_path)
    folder.write_config("a = 1\n")

    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(
        StorageError,
        match=r'\[job\] dump_folder = ".*" cannot be written: .*No space left on device',
    ):
        folder.write_config("a = 2\n")
    assert (tmp_path / "config.toml").read_text() == "a = 1\n"


def test_an_earlier_run_moves_aside_and_other_files_stay(tmp_path: Path) -> None:
    leave_a_run(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "logs").mkdir()
    open_folder(tmp_path)
    previous = tmp_path / "previous" / run_folder._time_name(1795208000.5)
    assert sorted(path.name for path in previous.iterdir()) == [
        "checkpoint",
        "config.toml",
        "metrics.jsonl",
        "status.json",
    ]
    assert (previous / "checkpoint" / "step-00000001").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "logs",
        "notes.txt",
        "previous",
        "status.json",
    ]


def test_runs_with_the_same_start_time_get_numbers(tmp_path: Path) -> None:
    name = run_folder._time_name(1795208000.5)
    for names in ([], [name], [name, f"{name}-2"]):
        leave_a_run(tmp_path)
        assert sorted(path.name for path in tmp_path.glob("previous/*")) == names


def contents(path: Path) -> dict[str, str | None]:
    """What is in a folder and behind its links, with the text of files."""
    found = (
        Path(folder) / name
        for folder, *names in os.walk(path, followlinks=True)
        for name in sum(names, [])
    )
    files = {
        str(each.relative_to(path)): each.read_text() if each.is_file() else None for each in found
    }
    files.pop(".lock", None)  # which says who held it last
    return files


def refuse(path: Path, match: str, *, resume: bool = False) -> None:
    """Begin a run, which is refused, and leaves all as it was."""
    before = contents(path)
    folder = open_run_folder(path)
    with pytest.raises(ConfigError, match=match) as caught:
        folder.begin(resumed_config=CONFIG if resume else None, entries=ENTRIES)
    folder.refuse(cause=str(caught.value), exit_code=2)
    folder.close()
    assert contents(path) | {"status.json": ""} == before | {"status.json": ""}
    assert ("status.json" in before) or not (path / "status.json").exists()


@pytest.mark.parametrize(
    "name", ["config.toml", "status.json", "metrics.jsonl", "checkpoint/weights", "tb/x", "tb"]
)
def test_what_no_run_has_left_is_not_moved(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    entry = name.split("/")[0]
    for _ in range(2):  # a refused start is no run either
        refuse(
            tmp_path,
            rf'dump_folder = ".*" holds {entry}, but no status\.json of a run, so no run may have written that',
        )


def test_all_that_is_in_the_way_is_named(tmp_path: Path) -> None:
    for name in ("config.toml", "metrics.jsonl", "notes.txt"):
        (tmp_path / name).write_text("mine")
    refuse(tmp_path, r"holds metrics\.jsonl, config\.toml, but no status\.json")


def test_a_run_whose_status_was_deleted_is_not_moved(tmp_path: Path) -> None:
    leave_a_run(tmp_path)
    (tmp_path / "status.json").unlink()
    refuse(tmp_path, r"holds checkpoint, metrics\.jsonl, config\.toml, but no status\.json")
    open_folder(tmp_path, resume=True).write_config(
        "steps = 2\n"
    )  # its checkpoint shows that it is a run's
    assert (tmp_path / "config.toml").read_text() == "steps = 2\n"


@pytest.mark.parametrize("name", ["config.toml", "status.json"])
def test_a_run_that_resumes_a_copied_checkpoint_replaces_nothing_of_the_user(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "checkpoint" / "step-00000001").mkdir(parents=True)
    (tmp_path / name).write_text("mine")
    refuse(tmp_path, rf"holds {name}, but no status\.json of a run", resume=True)
    (tmp_path / name).unlink()
    open_folder(tmp_path, resume=True).close()
    assert (tmp_path / "checkpoint" / "step-00000001").is_dir()


@pytest.mark.parametrize("owned", [False, True])
def test_an_empty_folder_and_a_link_to_one_are_used_as_they_are(
    tmp_path: Path, owned: bool
) -> None:
    path, disk = tmp_path / "run", tmp_path / "disk"
    disk.mkdir()
    if owned:
        open_folder(path).close()
    (path / "tb").mkdir(parents=True)
    (path / "checkpoint").symlink_to(disk)
    open_folder(path)
    assert (path / "checkpoint").readlink() == disk
    assert (path / "tb").is_dir()


@pytest.mark.parametrize("target", ["disk", "missing", "file"])
@pytest.mark.parametrize("owned", [False, True])
def test_a_link_is_never_moved(tmp_path: Path, owned: bool, target: str) -> None:
    path = tmp_path / "run"
    (tmp_path / "disk" / "step-00000001").mkdir(parents=True)
    (tmp_path / "file").touch()
    if owned:
        leave_a_run(path)
        (path / "checkpoint" / "step-00000001").rmdir()
        (path / "checkpoint").rmdir()
    path.mkdir(exist_ok=True)
    (path / "checkpoint").symlink_to(tmp_path / target)
    owned_match = (
        rf"holds checkpoint, a link to .*/{target}, which is not empty; .*: link an empty folder"
    )
    refuse(path, owned_match if owned else "holds checkpoint, but no status")
    assert (path / "checkpoint").is_symlink() and not (path / "previous").exists()
    assert len(list(tmp_path.glob("disk/*"))) == 1


def test_a_kill_at_any_first_write_leaves_a_folder_that_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    for after in range(100):
        path, left = tmp_path / str(after), after
        leave_a_run(path)

        def change(original: Any) -> Any:
            def counted(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    raise Killed
                return original(*args, **kwargs)

            return counted

        folder = open_run_folder(path)
        with monkeypatch.context() as patch:
            for name in ("rename", "mkdir", "replace"):
                patch.setattr(Path, name, change(getattr(Path, name)))
            patch.setattr(os, "fsync", change(os.fsync))
            with suppress(Killed):
                folder.begin(resumed_config=None, entries=ENTRIES)
                folder.write_config(CONFIG)
        folder.close()
        open_folder(path).close()
        moved = [each.relative_to(each.parents[1]).parts[1] for each in path.glob("previous/*/*")]
        assert {"checkpoint", "metrics.jsonl", "config.toml", "status.json"} <= set(moved)
        if left >= 0:
            break
    assert after > 8


def test_a_resumed_run_keeps_its_files(tmp_path: Path) -> None:
    leave_a_run(tmp_path)
    open_folder(tmp_path, resume=True)
    assert not (tmp_path / "previous").exists()
    assert (tmp_path / "checkpoint" / "step-00000001").is_dir()
    assert status_on_file(tmp_path)["state"] == "running"


def test_a_run_that_resumes_keeps_step_and_last_checkpoint_should_it_fail_before_its_first_step(
    tmp_path: Path,
) -> None:
    folder = open_folder(tmp_path)
    folder.running(step=7, last_checkpoint="step-00000005")
    folder.close()
    open_folder(tmp_path, resume=True)
    report_failure(tmp_path, cause="other data", exit_code=3, rank=None, step=0)
    status = status_on_file(tmp_path)
    assert (status["step"], status["last_checkpoint"], status["cause"]) == (
        7,
        "step-00000005",
        "other data",
    )


def test_a_folder_without_a_run_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    open_folder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "notes.txt", "status.json"]


def test_a_live_run_keeps_others_out_until_it_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0)
    folder = open_folder(tmp_path)
    folder.running(step=4, last_checkpoint=None)
    with pytest.raises(
        ConfigError,
        match=rf'\[job\] dump_folder = ".*" belongs to a live run: process {os.getpid()} on .* since 20',
    ):
        open_folder(tmp_path)
    assert status_on_file(tmp_path)["step"] == 4
    folder.close()
    open_folder(tmp_path).close()


def test_a_lock_that_is_freed_soon_is_waited_for(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    threading.Timer(0.5, folder.close).start()
    open_folder(tmp_path).close()


def test_a_run_that_is_refused_is_as_far_as_the_one_before(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    folder.running(step=20, last_checkpoint="step-00000020")
    folder.done()
    folder.refuse(cause="all are broken", exit_code=4)
    status = read_status(tmp_path)
    assert status is not None
    assert (status.state, status.step, status.last_checkpoint) == ("failed", 20, "step-00000020")
    assert (status.cause, status.exit_code) == ("all are broken", 4)


def test_an_attempt_knows_what_the_one_before_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(tmp_path)
    report_failure(tmp_path, cause="rank 1 was lost", exit_code=6, rank=1, step=0)
    assert folder.earlier_attempt() is None  # torchrun has not started it again
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    earlier = folder.earlier_attempt()
    assert earlier is not None and (earlier.cause, earlier.exit_code) == ("rank 1 was lost", 6)
    monkeypatch.setattr(os, "getppid", lambda: 7)
    assert folder.earlier_attempt() is None  # of another torchrun


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from torchtitan_lite.run_folder import open_run_folder\n"
        "folder = open_run_folder(Path(sys.argv[1]))\n"
        "folder.begin(resumed_config=None, entries=()); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path]).returncode == -9
    assert status_on_file(tmp_path)["state"] == "running"
    open_folder(tmp_path).close()


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_place_that_cannot_be_a_folder_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r'\[job\] dump_folder = ".*" cannot be written: .*; make room or mend'
    ):
        open_folder(tmp_path / place)


LOST = Status("failed", 0, 0, cause="rank 9 hangs", exit_code=6)


@pytest.mark.parametrize(
    ("status", "report", "signalled", "outcome"),
    [
        (
            Status("failed", 0, 0, cause="bad text", exit_code=3),
            report(2),
            False,
            Outcome("bad text", 3),
        ),
        (Status("stopped", 0, 0, cause="SIGTERM", exit_code=75), "", True, Outcome("SIGTERM", 75)),
        (Status("done", 0, 0, exit_code=0), "", True, Outcome("done", 0)),
        (Status("running", 0, 0), report(-9), False, Outcome("rank 9 was killed by SIGKILL", 6, 9)),
        (
            Status("failed", 0, 0, cause="x", exit_code=1),
            report(-11),
            False,
            Outcome("rank 9 was killed by SIGSEGV", 6, 9),
        ),
        (LOST, report(-9), False, Outcome("rank 9 hangs (rank 9 was killed by SIGKILL)", 6, 9)),
        (
            replace(LOST, rank=4),
            report(-9),
            False,
            Outcome("rank 9 hangs (rank 9 was killed by SIGKILL)", 6, 4),
        ),
        (
            Status("running", 0, 0),
            report(1, other=-9, pid=1),
            False,
            Outcome("rank 8 was killed by SIGKILL", 6, 8),
        ),
        (
            Status("running", 0, 0),
            "",
            True,
            Outcome("killed before it could stop at a step's end", 6),
        ),
        (None, report(2), False, Outcome("rank 9 ended with exit code 2", 2, 9)),
        (None, "", True, Outcome("stopped by a signal before the first step", 75)),
        (None, "", False, Outcome("torchrun failed", 1)),
    ],
)
def test_outcome(status: Status | None, report: str, signalled: bool, outcome: Outcome) -> None:
    assert find_outcome(status, report=report, torchrun=1, signalled=signalled) == outcome


def test_a_killed_torchrun_is_told_of_where_no_rank_has_told_yet() -> None:
    running = Status("running", 0, 0)
    killed = Outcome("torchrun was killed by SIGKILL", 6)
    assert find_outcome(running, report="", torchrun=137, signalled=False) == killed
    assert find_outcome(LOST, report="", torchrun=137, signalled=False) == Outcome(
        "rank 9 hangs", 6
    )


def test_a_workers_exit_code_tells_the_cause_that_no_file_could_hold() -> None:
    cause = Outcome("a rank ended with exit code 7, and neither it nor torchrun could write why", 7)
    for status in (None, Status("running", 0, 0)):
        assert find_outcome(status, report="", torchrun=7, signalled=False) == cause
    assert find_outcome(LOST, report="", torchrun=7, signalled=False) == Outcome("rank 9 hangs", 6)


def test_on_a_full_disk_the_end_is_written_over_the_old_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(tmp_path)
    before = (tmp_path / "status.json").read_text()

    def full(path: Path, content: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "replace_file", full)
    with pytest.raises(StorageError, match="No space left on device"):
        folder.running(step=3, last_checkpoint=None)
    assert (tmp_path / "status.json").read_text() == before  # how far it is can wait
    report_failure(tmp_path, cause="full 満杯" * 2000, exit_code=7, rank=None, step=4)
    status = status_on_file(tmp_path)
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 7, 4)
    assert status["cause"].startswith("full 満杯full")
    assert 2000 < (tmp_path / "status.json").stat().st_size <= 4096


def test_on_a_full_disk_a_status_that_does_not_fit_leaves_the_old_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(tmp_path)
    folder.running(step=3, last_checkpoint="x" * 5000)
    before = (tmp_path / "status.json").read_text()

    def full(path: Path, content: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "replace_file", full)
    with pytest.raises(StorageError, match="No space left on device"):
        report_failure(tmp_path, cause="full", exit_code=7, rank=None, step=4)
    assert (tmp_path / "status.json").read_text() == before


@pytest.mark.parametrize("kind", ["text", "link"])
def test_a_lock_file_of_somebody_else_is_not_written_to(tmp_path: Path, kind: str) -> None:
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("years of work")
    folder = tmp_path / "run"
    folder.mkdir()
    if kind == "link":
        (folder / ".lock").symlink_to(thesis)
    else:
        thesis = thesis.rename(folder / ".lock")
    match = (
        "cannot be written: .*symbolic links"
        if kind == "link"
        else r"holds a file \.lock that no run has left"
    )
    with pytest.raises(ConfigError, match=match):
        open_run_folder(folder)
    assert thesis.read_text() == "years of work"


@pytest.mark.parametrize("how", ["moved", "deleted", "taken"])
def test_a_run_notices_that_its_folder_has_gone(tmp_path: Path, how: str) -> None:
    path = tmp_path / "run"
    folder = open_folder(path)
    folder.running(step=1, last_checkpoint=None)
    if how == "moved":
        path.rename(tmp_path / "elsewhere")
    elif how == "deleted":
        shutil.rmtree(path)
    else:
        (path / ".lock").unlink()
        open_run_folder(path)
    with pytest.raises(
        StorageError, match="was moved or deleted, or another run has it; this one ends at step 2"
    ):
        folder.running(step=2, last_checkpoint=None)
    assert path.exists() == (how == "taken")


def test_a_pipe_in_place_of_the_status_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "status.json")
    assert read_status(tmp_path) is None


def run_main(
    path: Path, *, since: float, text: str | None, first_rank: int = 8
) -> subprocess.CompletedProcess:
    if text is not None:
        (path / "torchrun.log").write_text(text)
    command = [
        sys.executable,
        "-m",
        "torchtitan_lite.run_folder",
        path,
        "--log-dir",
        path,
        "--since",
        str(since),
    ]
    torchrun = [
        "--torchrun",
        "1",
        "--torchrun-pid",
        str(os.getppid()),
        "--first-rank",
        str(first_rank),
    ]
    return subprocess.run(
        [*command, *torchrun, "--command", "./again"], capture_output=True, text=True
    )


@pytest.mark.parametrize("resume", [False, True])
def test_main_tells_how_a_run_ended_whose_folder_another_one_has_taken(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(tmp_path)
    folder.running(step=7, last_checkpoint="a/step-00000007")
    folder.stopped(cause="stopped by SIGTERM after step 7")
    folder.close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getppid", lambda: 7)
        second = open_folder(tmp_path, resume=resume)
        second.done()
        second.close()
    theirs = status_on_file(tmp_path)
    result = run_main(tmp_path, since=0, text="", first_rank=0)
    assert result.returncode == 75
    assert result.stderr.startswith("exit code 75: stopped by SIGTERM after step 7\nstep: 7\n")
    assert status_on_file(tmp_path) == theirs
    with monkeypatch.context() as patch:
        patch.setattr(os, "getppid", lambda: 8)
        open_folder(tmp_path, resume=resume).close()
    assert (
        run_main(tmp_path, since=0, text="", first_rank=0).returncode == 1
    )  # two runs later, nothing is known


def test_main_says_how_a_run_ended_whose_disk_is_gone(tmp_path: Path) -> None:
    result = run_main(tmp_path / "gone", since=0, text=None)
    assert result.returncode == 1
    assert result.stderr.lstrip().startswith("exit code 1: torchrun failed\n")


def test_main_reports_a_killed_rank_and_ends_the_status(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    folder.running(step=7, last_checkpoint="a/step-00000005")
    report_failure(tmp_path, cause="connection reset", exit_code=1, rank=None, step=0)
    folder.close()
    for attempt in (2, 10):
        (tmp_path / f"none_x/attempt_{attempt}/1").mkdir(parents=True)
    result = run_main(tmp_path, since=0, text=report(-9))
    assert result.returncode == 6
    assert result.stderr == (
        "exit code 6: rank 9 was killed by SIGKILL\nrank: 9\nstep: 7\nlast checkpoint: a/step-00000005\n"
        f"run folder: {tmp_path}\nlogs: {tmp_path}/none_x/attempt_10/1/{{stdout,stderr}}.log\n"
        "next: look at the logs and at the host of that rank; this goes on from the last checkpoint: ./again\n"
    )
    status = status_on_file(tmp_path)
    assert (status["state"], status["cause"], status["exit_code"]) == (
        "failed",
        "rank 9 was killed by SIGKILL",
        6,
    )
    assert (status["step"], status["rank"]) == (7, 9)


def test_main_leaves_the_status_of_an_earlier_run_and_tells_its_checkpoint(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    folder.running(step=7, last_checkpoint="a/step-00000005")
    before = status_on_file(tmp_path)
    result = run_main(tmp_path, since=before["started"] + 1, text="No module named torch\n")
    assert result.returncode == 1
    assert result.stderr == (
        "No module named torch\nexit code 1: torchrun failed\nstep: 7\nlast checkpoint: a/step-00000005\n"
        f"run folder: {tmp_path}\nlogs: {tmp_path}\n"
        "next: look at the logs; this goes on from the last checkpoint: ./again\n"
    )
    assert status_on_file(tmp_path) == before


def test_main_waits_for_ranks_that_outlive_torchrun(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)

    def end() -> None:
        report_failure(tmp_path, cause="torchrun is gone", exit_code=6, rank=None, step=0)
        folder.close()

    threading.Timer(1.5, end).start()
    result = run_main(tmp_path, since=0, text="")
    assert result.returncode == 6
    assert result.stderr.startswith("exit code 6: torchrun is gone\n")


@pytest.mark.parametrize("exit_code", [1, 2, 3, 4, 5, 6, 7, 75])
def test_each_exit_code_has_its_advice(exit_code: int, tmp_path: Path) -> None:
    text = format_outcome(
        Outcome("x", exit_code), None, path=tmp_path, logs="here", command="./again"
    )
    assert text.startswith(f"exit code {exit_code}: x\nstep: 0\nlast checkpoint: none\n")
    assert text.endswith("; this starts anew: ./again")
    assert f"next: {NEXT[exit_code].format(path=tmp_path)};" in text
