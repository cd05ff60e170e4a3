import errno
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tensorboard.backend.event_processing.io_wrapper import (
    GetLogdirSubdirectories as found_by_tensorboard,
)

from torchtitan_lite.base.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    RankLostError,
    RunError,
    StorageError,
)
from torchtitan_lite.run import run_folder
from torchtitan_lite.run.run_folder import RunFolder, read_status, time_name

NAMES = ("tb", "checkpoint")
CONFIG = "steps = 1\n"
STARTED = 1795208000.5
WRITTEN = ["checkpoint", "config.toml", "metrics.jsonl", "status.json"]


def locked(path: Path) -> RunFolder:
    folder = RunFolder(path, NAMES)
    folder.lock()
    return folder


def open_folder(path: Path, *, resume: bool = False) -> RunFolder:
    folder = locked(path)
    folder.begin(resumes=resume, config=CONFIG)
    return folder


def status_on_file(path: Path) -> dict[str, Any]:
    return json.loads((path / "status.json").read_text())


def on_file(path: Path, *keys: str) -> list[Any]:
    return [status_on_file(path)[key] for key in keys]


def change_status(path: Path, **changes: Any) -> None:
    (path / "status.json").write_text(json.dumps(status_on_file(path) | changes))


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def leave_a_run(path: Path, *, started: float = STARTED) -> None:
    """Leave the files of a finished run that started at a fixed time."""
    folder = open_folder(path)
    (path / "checkpoint" / "step-00000001").mkdir(parents=True)
    (path / "metrics.jsonl").write_text("{}\n")
    folder.update(step=1, state="done", exit_code=0)
    folder.close()
    change_status(path, started=started)


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


# ----- RunFolder: update, fail, begin -----


def test_the_status_has_the_progress_and_the_outcome(tmp_path):
    folder = open_folder(tmp_path / "new" / "run")
    start = status_on_file(folder.path)
    empty = ["total_steps", "loss", "tps", "mfu", "eta_s", "last_checkpoint", "cause", "exit_code"]
    assert start == dict.fromkeys([*empty, "rank", "device", "world_size"]) | {
        "state": "running",
        "started": folder.started,
        "time": start["time"],
        "step": 0,
        "job": f"process {os.getppid()} on {socket.gethostname()}",
    }
    progress: dict[str, Any] = {"step": 7, "last_checkpoint": "step-00000005", "loss": 2.5}
    folder.update(**progress)
    folder.update(step=7, state="done", exit_code=0)
    end = status_on_file(folder.path)
    assert end["time"] >= start["time"]
    assert end == start | progress | {"state": "done", "exit_code": 0, "time": end["time"]}


def test_the_cause_ends_with_what_an_error_gives_to_paste(tmp_path):
    error = RunError("of another model")
    error.paste = "[model]\ndim = 64\n"
    open_folder(tmp_path).fail(error, step=0)
    assert on_file(tmp_path, "cause") == ["of another model\n[model]\ndim = 64"]


def test_the_first_cause_stays_whichever_rank_reports_it(tmp_path):
    folder, other_rank = open_folder(tmp_path), RunFolder(tmp_path)
    folder.update(step=2)
    other_rank.fail(RunError("not of this run yet"), step=0)
    assert on_file(tmp_path, "state") == ["running"]
    other_rank.started = folder.started
    lacking = DataError("no text")
    lacking.rank = 1
    other_rank.fail(lacking, step=0)
    first = status_on_file(tmp_path)
    keys = ("state", "step", "cause", "exit_code", "rank")
    assert on_file(tmp_path, *keys) == ["failed", 2, "no text", 3, 1]
    folder.fail(RankLostError("rank 1 was lost"), step=0)
    folder.update(step=3, state="stopped", cause="SIGTERM", exit_code=75)
    assert status_on_file(tmp_path) == first


def test_a_refused_start_changes_nothing_of_the_run_before(tmp_path):
    leave_a_run(tmp_path)
    before = contents(tmp_path), status_on_file(tmp_path)
    locked(tmp_path).fail(DataError("no text"), step=0)
    assert (contents(tmp_path), status_on_file(tmp_path)) == before


def test_a_refused_start_in_a_new_folder_is_reported(tmp_path):
    locked(tmp_path).fail(DataError("no text"), step=0)
    assert on_file(tmp_path, "state", "cause", "exit_code") == ["failed", "no text", 3]


def test_a_restarted_attempt_that_is_refused_is_reported(tmp_path, monkeypatch):
    folder = open_folder(tmp_path)
    folder.fail(RankLostError("rank 1 was lost"), step=4)
    folder.close()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    locked(tmp_path).fail(CheckpointError("damaged"), step=0)
    assert on_file(tmp_path, "state", "cause", "exit_code") == ["failed", "damaged", 4]


def test_a_stop_before_the_first_step_is_no_failure(tmp_path):
    stopped = RankLostError("stopped by SIGINT before the first step")
    stopped.exit_code = 75
    open_folder(tmp_path).fail(stopped, step=0)
    assert on_file(tmp_path, "state", "exit_code") == ["stopped", 75]


@pytest.mark.parametrize("how", ["moved", "deleted", "taken"])
def test_a_run_notices_that_its_folder_has_gone(tmp_path, how):
    path = tmp_path / "run"
    folder = open_folder(path)
    folder.update(step=1)
    if how == "moved":
        path.rename(tmp_path / "elsewhere")
    elif how == "deleted":
        shutil.rmtree(path)
    else:
        (path / ".lock").unlink()
        open_folder(path)
    before = contents(path)
    with pytest.raises(StorageError, match="moved or deleted, or another run .* at step 2"):
        folder.update(step=2)
    folder.fail(RunError("another run's folder"), step=3)
    assert path.exists() == (how == "taken") and contents(path) == before


def test_begin_replaces_the_config_whole(tmp_path, monkeypatch):
    open_folder(tmp_path).close()
    folder = locked(tmp_path)
    monkeypatch.setattr(run_folder, "write_status", lambda *_: None)
    monkeypatch.setattr(os, "fsync", no_space)
    message = r'\[job\] dump_folder = ".*" cannot be written: .*No space left on device'
    with pytest.raises(StorageError, match=message):
        folder.begin(resumes=True, config="steps = 2\n")
    assert (tmp_path / "config.toml").read_text() == CONFIG


def test_on_a_full_disk_an_end_that_fits_is_written_over_the_old_status(tmp_path, monkeypatch):
    folder, file = open_folder(tmp_path), tmp_path / "status.json"
    before = file.read_text()
    monkeypatch.setattr(run_folder, "replace_file", no_space)
    with pytest.raises(StorageError, match="No space left on device"):
        folder.update(step=3)
    assert file.read_text() == before  # the progress can wait
    folder.fail(StorageError("満杯" * 2000), step=4)
    assert on_file(tmp_path, "state", "exit_code", "step") == ["failed", 7, 4]
    assert status_on_file(tmp_path)["cause"].startswith("満杯")
    assert 1500 < file.stat().st_size <= 4096


# ----- read_status -----

STATUS = '{"state": "running", "time": 0, "started": %s}'


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"state": "running"}',
        "[" * 10**5,
        *(STATUS % text for text in ('"x"', "NaN", "1e300", "1" + "0" * 400, "1" * 5000)),
        *(STATUS % f'0, "{name}": [3]' for name in ("step", "loss", "cause")),
        *(STATUS % f'0, "{name}": 1{"0" * 400}' for name in ("step", "total_steps", "exit_code")),
        STATUS % "0" + " " * (1 << 20),
        STATUS % ('0, "before": ' + "[" * 400 + "]" * 400),
        None,  # reading a pipe would block
    ],
)
def test_a_status_of_another_form_is_none(tmp_path, content):
    file = tmp_path / "status.json"
    os.mkfifo(file) if content is None else file.write_text(content)
    assert read_status(tmp_path) is None


def test_a_status_of_a_later_version_is_read(tmp_path):
    open_folder(tmp_path).close()
    change_status(tmp_path, field=1)
    assert read_status(tmp_path).state == "running"


# ----- RunFolder: begin -----


def test_an_earlier_run_moves_aside_and_other_files_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "logs").mkdir()
    for started in (STARTED, STARTED + 60):
        leave_a_run(tmp_path, started=started)
    open_folder(tmp_path)
    kept = ["logs", "notes.txt", "previous"]
    assert names(tmp_path) == [".lock", "config.toml", *kept, "status.json"]
    assert names(tmp_path / "previous") == [time_name(STARTED), time_name(STARTED + 60)]
    for earlier in (tmp_path / "previous").iterdir():
        assert names(earlier) == WRITTEN
        assert (earlier / "checkpoint/step-00000001").is_dir()


def test_a_resumed_run_keeps_files_and_progress(tmp_path):
    leave_a_run(tmp_path)
    change_status(tmp_path, step=7, last_checkpoint="step-00000005")
    folder = open_folder(tmp_path, resume=True)
    assert names(tmp_path) == [".lock", *WRITTEN]
    assert status_on_file(tmp_path)["state"] == "running"
    folder.fail(DataError("other data"), step=0)  # before its first step
    found = on_file(tmp_path, "step", "last_checkpoint", "cause")
    assert found == [7, "step-00000005", "other data"]


def contents(path: Path) -> dict[str, str | None]:
    """Return the names in a folder and behind its links, with the text of files, except for the
    lock, which says who held it last, and status.json."""
    files: dict[str, str | None] = {}
    for folder, *inner in os.walk(path, followlinks=True):
        for each in (Path(folder) / name for name in sum(inner, [])):
            files[str(each.relative_to(path))] = each.read_text() if each.is_file() else None
    return {name: text for name, text in files.items() if name not in (".lock", "status.json")}


def refuse(path: Path, match: str, *, resume: bool = False) -> None:
    """Begin a run, which must be refused and must change nothing."""
    before, had_status = contents(path), (path / "status.json").exists()
    folder = RunFolder(path, NAMES)
    with pytest.raises(ConfigError, match=match) as caught:
        folder.lock()
        folder.begin(resumes=resume, config=CONFIG)
    folder.fail(caught.value, step=0)
    if read_status(path) is not None:
        folder.close()
    assert contents(path) == before
    assert (path / "status.json").exists() == had_status


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["status.json"], "status.json"),
        (["tb"], "tb"),
        (["checkpoint/step-00000001/weights"], "checkpoint"),
        (["config.toml", "metrics.jsonl", "notes.txt"], "config.toml, metrics.jsonl"),
    ],
)
def test_files_without_a_runs_status_are_not_moved_or_replaced(tmp_path, files, named, resume):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("mine")
    message = rf'dump_folder = ".*" holds {named}, and no valid status\.json of a run'
    for _ in range(2):  # a refused start is no run either
        refuse(tmp_path, message, resume=resume)


@pytest.mark.parametrize("owned", [False, True])
def test_empty_folders_and_links_to_them_stay(tmp_path, owned):
    path, disk = tmp_path / "run", tmp_path / "disk"
    disk.mkdir()
    if owned:
        open_folder(path).close()
    (path / "tb").mkdir(parents=True)
    (path / "checkpoint").symlink_to(disk)
    open_folder(path)
    assert (path / "checkpoint").readlink() == disk
    assert (path / "tb").is_dir()


def test_tensorboard_finds_no_earlier_run(tmp_path):
    leave_a_run(tmp_path)
    curves = tmp_path / "tb" / "rank_0"
    curves.mkdir(parents=True)
    (curves / "events.out.tfevents.1.host").touch()
    assert [*found_by_tensorboard(str(tmp_path))] == [str(curves)]
    open_folder(tmp_path)
    assert [*found_by_tensorboard(str(tmp_path))] == []
    (moved,) = tmp_path.glob("previous/*/tb/rank_0/*")
    assert moved.name == "events.out.previous.1.host"


@pytest.mark.parametrize("target", ["disk", "missing", "file"])
@pytest.mark.parametrize("owned", [False, True])
def test_a_link_is_never_moved(tmp_path, owned, target):
    path = tmp_path / "run"
    (tmp_path / "disk" / "step-00000001").mkdir(parents=True)
    (tmp_path / "file").touch()
    if owned:
        leave_a_run(path)
        shutil.rmtree(path / "checkpoint")
    path.mkdir(exist_ok=True)
    (path / "checkpoint").symlink_to(tmp_path / target)
    link = "holds checkpoint, and files behind a link cannot move to previous"
    refuse(path, link if owned else "holds checkpoint, and no valid status")
    assert (path / "checkpoint").is_symlink() and not (path / "previous").exists()
    assert names(tmp_path / "disk") == ["step-00000001"]


def test_a_kill_at_any_first_write_leaves_a_folder_that_starts_again(tmp_path, monkeypatch):
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

        folder = locked(path)
        with monkeypatch.context() as patch:
            for name in ("rename", "mkdir", "replace"):
                patch.setattr(Path, name, change(getattr(Path, name)))
            patch.setattr(os, "fsync", change(os.fsync))
            with suppress(Killed):
                folder.begin(resumes=False, config=CONFIG)
        folder.close()
        open_folder(path).close()
        moved = [each.relative_to(each.parents[1]).parts[1] for each in path.glob("previous/*/*")]
        assert {*WRITTEN} <= {*moved}
        if left >= 0:
            break
    assert after > 8


# ----- RunFolder: lock -----


def test_a_live_run_keeps_others_out_until_it_closes(tmp_path, monkeypatch):
    folder = open_folder(tmp_path)
    folder.update(step=4)
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "LOCK_SECONDS", 0)
        match = rf'dump_folder = ".*" belongs to a live run, process {os.getppid()} on '
        with pytest.raises(ConfigError, match=match):
            open_folder(tmp_path)
    assert status_on_file(tmp_path)["step"] == 4
    threading.Timer(0.3, folder.close).start()
    open_folder(tmp_path).close()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_and_taken(tmp_path, monkeypatch, notices, code):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(code, os.strerror(code))))
    folder = open_folder(tmp_path)
    folder.update(step=4)
    folder.close()
    assert status_on_file(tmp_path)["step"] == 4
    (message,) = notices.messages
    assert f'dump_folder = "{tmp_path}"' in message and "without locks (flock)" in message


def test_the_lock_goes_with_its_process(tmp_path):
    code = (
        "import os, sys; from pathlib import Path\n"
        "from torchtitan_lite.run.run_folder import RunFolder\n"
        "folder = RunFolder(Path(sys.argv[1])); folder.lock()\n"
        "folder.begin(resumes=False, config=''); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path]).returncode == -9
    assert status_on_file(tmp_path)["state"] == "running"
    open_folder(tmp_path).close()


def test_lock_returns_whether_the_attempt_before_can_be_repeated(tmp_path, monkeypatch):
    def starts_again(error: RunError) -> bool:
        folder = open_folder(tmp_path)
        folder.fail(error, step=0)
        folder.close()
        with monkeypatch.context() as patch:
            patch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
            attempt = RunFolder(tmp_path)
            again = attempt.lock()
        assert attempt.started == folder.started
        attempt.close()
        assert not folder.lock()  # torchrun has not started it again
        folder.close()
        return again

    assert starts_again(RankLostError("rank 1 was lost"))
    with pytest.raises(RunError, match="no text") as final:
        starts_again(DataError("no text"))
    assert final.value.exit_code == 3
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(os, "getppid", lambda: 7)
    assert not RunFolder(tmp_path).lock()  # of another torchrun


@pytest.mark.parametrize("place", ["file", "file/run", "n" * 300])
def test_a_place_that_cannot_be_a_folder_is_refused(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r'\[job\] dump_folder = ".*" cannot be written: .*; '):
        open_folder(tmp_path / place)


@pytest.mark.parametrize("name", ["status.json", "config.toml"])
@pytest.mark.timeout(20)
def test_a_pipe_under_a_name_of_the_run_is_refused_at_once(tmp_path, name):
    os.mkfifo(tmp_path / name)
    refuse(tmp_path, rf"holds {name}", resume=True)


@pytest.mark.timeout(20)
def test_the_lock_file_is_never_read_or_written(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/.lock").symlink_to(tmp_path / "thesis.txt")
    (tmp_path / "piped").mkdir()
    os.mkfifo(tmp_path / "piped/.lock")
    for path in (tmp_path / "linked", tmp_path / "piped"):
        open_folder(path).close()
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
