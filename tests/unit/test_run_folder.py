import dataclasses
import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_lite import run_folder
from torchtitan_lite.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    RankLostError,
    RunError,
    StorageError,
)
from torchtitan_lite.run_folder import RunFolder, Status, make_log_folder, read_end, read_status

ENTRIES = ("tb", "checkpoint", "metrics.jsonl")
CONFIG = "steps = 1\n"


def locked(path: Path) -> RunFolder:
    folder = RunFolder(path)
    folder.lock()
    return folder


def open_folder(path: Path, *, resume: bool = False) -> RunFolder:
    folder = locked(path)
    folder.begin(resumed_config=CONFIG if resume else None, entries=ENTRIES)
    return folder


def status_on_file(path: Path) -> dict:
    return json.loads((path / "status.json").read_text())


def leave_a_run(path: Path) -> None:
    """Leave the files of a finished run that started at a fixed time."""
    folder = open_folder(path)
    folder.write_config(CONFIG)
    (path / "checkpoint" / "step-00000001").mkdir(parents=True)
    (path / "metrics.jsonl").write_text("{}\n")
    folder.update(step=1, state="done", exit_code=0)
    folder.close()
    status = status_on_file(path) | {"started": 1795208000.5}
    (path / "status.json").write_text(json.dumps(status))


def test_status_tells_how_far_the_run_is_and_how_it_ended(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "new" / "run")
    start = status_on_file(folder.path)
    assert start == {
        "state": "running",
        "started": folder.started,
        "time": start["time"],
        "step": 0,
        "total_steps": None,
        "loss": None,
        "tps": None,
        "mfu": None,
        "eta_s": None,
        "last_checkpoint": None,
        "cause": None,
        "exit_code": None,
        "rank": None,
        "job": f"process {os.getppid()} on {socket.gethostname()}",
    }
    folder.update(step=7, last_checkpoint="step-00000005", loss=2.5)
    folder.update(step=7, state="done", exit_code=0)
    end = status_on_file(folder.path)
    assert end["time"] >= start["time"]
    assert end == start | {
        "state": "done",
        "step": 7,
        "loss": 2.5,
        "last_checkpoint": "step-00000005",
        "exit_code": 0,
        "time": end["time"],
    }


def test_the_first_cause_stays(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    folder.update(step=2)
    lacking = DataError("the text ended")
    lacking.rank = 1
    folder.fail(lacking, step=0)
    first = status_on_file(tmp_path)
    assert (first["state"], first["step"], first["cause"]) == ("failed", 2, "the text ended")
    assert (first["exit_code"], first["rank"]) == (3, 1)
    folder.fail(RankLostError("rank 1 was lost"), step=0)
    folder.update(step=3, state="stopped", cause="SIGTERM", exit_code=75)
    assert status_on_file(tmp_path) == first


def test_a_failure_without_a_status_is_written(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    (tmp_path / "status.json").unlink()
    folder.fail(StorageError("no space"), step=0)
    assert status_on_file(tmp_path)["cause"] == "no space"


def test_a_failure_is_written_only_while_this_run_has_the_folder(tmp_path: Path) -> None:
    folder, other_rank = open_folder(tmp_path), RunFolder(tmp_path)
    other_rank.fail(RunError("too early"), step=0)
    assert status_on_file(tmp_path)["state"] == "running"

    other_rank.join()
    (tmp_path / ".lock").rename(tmp_path / "old")
    other_rank.fail(RunError("another run's folder"), step=3)
    assert status_on_file(tmp_path)["state"] == "running"

    (tmp_path / "old").rename(tmp_path / ".lock")
    other_rank.fail(DataError("the text is gone"), step=3)
    status = status_on_file(tmp_path)
    found = (status["state"], status["cause"], status["exit_code"], status["step"])
    assert found == ("failed", "the text is gone", 3, 3)
    folder.close()


def test_a_status_of_a_later_version_is_read(tmp_path: Path) -> None:
    open_folder(tmp_path).close()
    status = status_on_file(tmp_path) | {"field": 1}
    (tmp_path / "status.json").write_text(json.dumps(status))
    read = read_status(tmp_path)
    assert read is not None and read.state == "running"


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
        *(STARTED % s for s in ('"x"', "NaN", "1e300", "1" + "0" * 400, "1" * 5000)),
        *(STARTED % f'0, "{name}": [3]' for name in ("step", "loss", "tps", "cause", "exit_code")),
        STARTED % ('0, "before": ' + "[" * 400 + "]" * 400),
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
    """Return the names in a folder and behind its links, with the text of files."""
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
    """Begin a run, which must be refused and must change nothing."""
    before = contents(path)
    folder = locked(path)
    with pytest.raises(ConfigError, match=match) as caught:
        folder.begin(resumed_config=CONFIG if resume else None, entries=ENTRIES)
    folder.fail(caught.value, step=0)
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
            rf'dump_folder = ".*" holds {entry}, but no status\.json of a run',
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

        folder = locked(path)
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
    folder.update(step=7, last_checkpoint="step-00000005")
    folder.close()
    open_folder(tmp_path, resume=True).fail(DataError("other data"), step=0)
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
    folder.update(step=4)
    with pytest.raises(
        ConfigError,
        match=rf'dump_folder = ".*" belongs to a live run: process {os.getpid()} on .* since 20',
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
    folder.update(step=20, last_checkpoint="step-00000020", state="done", exit_code=0)
    folder.close()
    locked(tmp_path).fail(CheckpointError("all are broken"), step=0)
    status = read_status(tmp_path)
    assert status is not None
    assert (status.state, status.step, status.last_checkpoint) == ("failed", 20, "step-00000020")
    assert (status.cause, status.exit_code) == ("all are broken", 4)


def test_an_attempt_knows_what_the_one_before_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with pytest.raises(RunError, match="the text ended") as final:
        starts_again(DataError("the text ended"))
    assert final.value.exit_code == 3
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(os, "getppid", lambda: 7)
    assert not RunFolder(tmp_path).lock()  # of another torchrun


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from torchtitan_lite.run_folder import RunFolder\n"
        "folder = RunFolder(Path(sys.argv[1])); folder.lock()\n"
        "folder.begin(resumed_config=None, entries=()); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path]).returncode == -9
    assert status_on_file(tmp_path)["state"] == "running"
    open_folder(tmp_path).close()


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_place_that_cannot_be_a_folder_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r'\[job\] dump_folder = ".*" cannot be written: .*; make room or fix'
    ):
        open_folder(tmp_path / place)


def test_on_a_full_disk_the_end_is_written_over_the_old_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(tmp_path)
    before = (tmp_path / "status.json").read_text()

    def full(path: Path, content: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "replace_file", full)
    with pytest.raises(StorageError, match="No space left on device"):
        folder.update(step=3)
    assert (tmp_path / "status.json").read_text() == before  # how far it is can wait
    folder.fail(StorageError("full 満杯" * 2000), step=4)
    status = status_on_file(tmp_path)
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 7, 4)
    assert status["cause"].startswith("full 満杯full")
    assert 2000 < (tmp_path / "status.json").stat().st_size <= 4096


def test_on_a_full_disk_a_status_that_does_not_fit_leaves_the_old_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(tmp_path)
    folder.update(step=3, last_checkpoint="x" * 5000)
    before = (tmp_path / "status.json").read_text()

    def full(path: Path, content: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "replace_file", full)
    with pytest.raises(StorageError, match="No space left on device"):
        folder.update(step=4, state="failed", cause="full", exit_code=7)
    assert (tmp_path / "status.json").read_text() == before


@pytest.mark.parametrize("name", [".lock", "status.json", "config.toml"])
@pytest.mark.timeout(20)
def test_a_pipe_under_a_name_of_the_run_is_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=rf"holds (a file )?{re.escape(name)}"):
        open_folder(tmp_path, resume=True)
    assert (tmp_path / name).is_fifo()


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
        RunFolder(folder).lock()
    assert thesis.read_text() == "years of work"


@pytest.mark.parametrize("how", ["moved", "deleted", "taken"])
def test_a_run_notices_that_its_folder_has_gone(tmp_path: Path, how: str) -> None:
    path = tmp_path / "run"
    folder = open_folder(path)
    folder.update(step=1)
    if how == "moved":
        path.rename(tmp_path / "elsewhere")
    elif how == "deleted":
        shutil.rmtree(path)
    else:
        (path / ".lock").unlink()
        locked(path)
    with pytest.raises(
        StorageError, match="was moved or deleted, or another run has it; this one ends at step 2"
    ):
        folder.update(step=2)
    assert path.exists() == (how == "taken")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
FIELDS = [field.name for field in dataclasses.fields(Status)]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3), st.integers(0, 200))
@settings(max_examples=100, deadline=None)
def test_a_status_has_the_types_that_it_says_or_is_none(changes: dict, cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        good = dataclasses.asdict(Status("running", started=1.0, time=2.0, step=3, tps=4.0))
        (Path(folder) / "status.json").write_text(json.dumps(good | changes)[: 200 + cut])
        status = read_status(Path(folder))
    if status is not None:
        assert status.state in ("running", "done", "stopped", "failed")
        assert isinstance(status.step, int) and isinstance(status.started, float)
        assert all(
            value is None or isinstance(value, float)
            for value in (status.loss, status.tps, status.eta_s)
        )


def test_a_pipe_in_place_of_the_status_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "status.json")
    assert read_status(tmp_path) is None


def test_the_end_of_a_run_whose_folder_another_one_has_taken_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = os.getppid()
    monkeypatch.setattr(os, "getppid", lambda: 7)
    folder = open_folder(tmp_path)
    folder.update(step=7, state="done", exit_code=0)
    on_file, own = read_end(tmp_path, since=0, agent=first, owner=True)
    assert on_file is not None and (on_file.step, own) == (7, None)
    assert read_end(tmp_path, since=0, agent=first, owner=False)[1] == on_file  # of rank 0's node


def test_an_earlier_runs_end_is_on_file_only(tmp_path: Path) -> None:
    assert read_end(tmp_path / "gone", since=0, agent=1, owner=True) == (None, None)
    folder = open_folder(tmp_path)
    folder.update(step=7)
    since = status_on_file(tmp_path)["started"] + 1
    on_file, own = read_end(tmp_path, since=since, agent=os.getppid(), owner=True)
    assert on_file is not None and (on_file.step, own) == (7, None)


def test_the_end_is_awaited_of_workers_that_outlive_their_agent(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)

    def end() -> None:
        folder.fail(RankLostError("the agent is gone"), step=0)
        folder.close()

    threading.Timer(1.0, end).start()
    _, own = read_end(tmp_path, since=0, agent=os.getppid(), owner=True)
    assert own is not None and own.cause == "the agent is gone"


def test_a_log_folder_that_cannot_be_made_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (make_log_folder(tmp_path / "run") / "torchrun.log").is_file()
    assert make_log_folder(tmp_path / "run") != make_log_folder(tmp_path / "run")
    with pytest.raises(ConfigError, match='dump_folder = "/dev/null" cannot be written: .*Not a'):
        make_log_folder(Path("/dev/null"))

    def full(path: Path, parents: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(StorageError, match="cannot be written: .*No space left on device"):
        make_log_folder(tmp_path)
