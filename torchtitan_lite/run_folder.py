"""The run folder: one live run at a time, earlier runs moved aside, and status.json, how it ended.

A run writes its status.json before any file that a later run could move, and a later run moves
status.json last. So a status.json proves that the other files with a run's names come from a run.
Without one, nothing in the folder is moved or replaced.
"""

import dataclasses
import errno
import fcntl
import itertools
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from torchtitan_lite.errors import STOPPED_EXIT_CODE, ConfigError, RunError, StorageError
from torchtitan_lite.files import DISK_FULL, replace_file
from torchtitan_lite.logger import logger

CONFIG_FILE = "config.toml"
STATUS_FILE = "status.json"
BLOCK_BYTES = 4096  # of most file systems; a full disk still takes a file of one block in place
LOCK_FILE = ".lock"
OWN_LOCK = re.compile(r"(process \d+ on .*)?\Z")  # the last run that held it, or nothing yet
LOCK_SECONDS = 10.0  # for a new run to wait: the workers of a killed agent need seconds to end


@dataclass(frozen=True)
class Status:
    """Content of status.json. Times are Unix seconds."""

    state: Literal["running", "done", "stopped", "failed"]
    started: float
    time: float  # last change
    step: int = 0  # last finished step; of a failed run, the step that failed
    total_steps: int | None = None
    loss: float | None = None  # of the last logged step, like tps
    tps: float | None = None  # tokens per second per device
    eta_s: float | None = None  # from the last logged step to the end
    last_checkpoint: str | None = None
    cause: str | None = None
    exit_code: int | None = None
    rank: int | None = None  # the rank that the cause is about, if any
    job: str | None = None  # the agent that started the run, and may start its processes again
    before: dict[str, Any] | None = None  # the run before; its launcher may not have read it yet


@dataclass(frozen=True)
class RunFolder:
    """A run folder that this process, rank 0, holds locked until `close` or its own end."""

    path: Path
    _lock: int

    def earlier_attempt(self) -> Status | None:
        """Return the status that this job's attempt before left; None in the first attempt."""
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            return None
        status = read_status(self.path)
        return status if status is not None and status.job == job_name(os.getppid()) else None

    def begin(self, *, resumed_config: str | None, entries: Iterable[str]) -> None:
        """Set the status to "running". `resumed_config` is the resumed checkpoint's, else None.

        A new run moves an earlier run's `entries` (names within the folder), config.toml and
        status.json to previous/<its start time>/. Other files, empty folders and links to empty
        folders stay. A resumed run moves nothing, and keeps step and last checkpoint in the status
        until its first step. Raises ConfigError if it would move or replace what no run wrote,
        StorageError if the disk fails."""
        before = read_status(self.path)
        names = [*entries, CONFIG_FILE, STATUS_FILE]
        with _explained(self.path):
            if before is None:
                _check_nothing_foreign(self.path, names, resumed_config=resumed_config)
            elif resumed_config is None:
                _move_to_previous(self.path, names, started=before.started)
        self._begin(before, state="running", keeps_progress=resumed_config is not None)

    def refuse(self, *, cause: str, exit_code: int) -> None:
        """Write into status.json why the run did not begin; step and last checkpoint stay the
        earlier run's. Without an earlier run write nothing: a status.json would mark foreign files
        as a run's."""
        if (before := read_status(self.path)) is not None:
            ended = {"state": "failed", "cause": cause, "exit_code": exit_code}
            self._begin(before, keeps_progress=True, **ended)

    def _begin(self, before: Status | None, *, keeps_progress: bool, **fields: Any) -> None:
        now = time.time()
        if before is not None:
            if keeps_progress:
                fields |= {"step": before.step, "last_checkpoint": before.last_checkpoint}
            fields["before"] = dataclasses.asdict(dataclasses.replace(before, before=None))
        job = job_name(os.getppid())
        _write_status(self.path, Status(started=now, time=now, job=job, **fields))

    def write_config(self, text: str) -> None:
        """Replace config.toml by `text`."""
        with _explained(self.path):
            replace_file(self.path / CONFIG_FILE, text)

    def check_is_ours(self, *, step: int) -> None:
        """Raise StorageError unless the folder is still the one that this process locked."""
        if lock_inode(self.path) != os.fstat(self._lock).st_ino:
            raise StorageError(
                f'[job] dump_folder = "{self.path}" was moved or deleted, or another run has it; '
                f"this one ends at step {step}. Leave the folder and its {LOCK_FILE} alone until a "
                "run has ended."
            )

    def running(self, *, step: int, **progress: Any) -> None:
        """Write the progress, other fields of Status, into status.json. Raises StorageError if the
        folder is not ours."""
        self.check_is_ours(step=step)
        _update_status(self.path, step=step, **progress)

    def done(self) -> None:
        """Write into status.json that the run reached its last step."""
        _update_status(self.path, state="done", exit_code=0)

    def stopped(self, *, cause: str) -> None:
        """Write into status.json that a signal ended the run at a step's end."""
        _update_status(self.path, state="stopped", cause=cause, exit_code=STOPPED_EXIT_CODE)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)


def open_run_folder(path: Path) -> RunFolder:
    """Create the folder if it is missing, and lock it. Raises ConfigError if it cannot be a run
    folder, or if a live run still holds it after LOCK_SECONDS; StorageError if the disk fails."""
    with _explained(path):
        path.mkdir(parents=True, exist_ok=True)
        return RunFolder(path, _take_lock(path))


def make_log_folder(path: Path) -> Path:
    """Create a folder for the logs of a run that starts now. Raises ConfigError, StorageError."""
    folder = path / "logs" / f"{_time_name(time.time())}-{socket.gethostname()}"
    with _explained(path):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "torchrun.log").touch()
    return folder


def lock_inode(path: Path) -> int | None:
    """Return the inode of the lock file, which identifies the run that holds it; None without."""
    try:
        return (path / LOCK_FILE).stat().st_ino
    except OSError:
        return None


def job_name(agent: int) -> str:
    """Return the name of the job whose workers are children of process `agent` on this host."""
    return f"process {agent} on {socket.gethostname()}"


def read_status(path: Path) -> Status | None:
    """Return the status on file in the run folder; None without a valid one."""
    file = path / STATUS_FILE
    if not file.is_file():  # reading a pipe would block
        return None
    try:
        status = TypeAdapter(Status).validate_json(file.read_bytes())
        _time_name(status.started)
    except (OSError, ValueError, ArithmeticError):
        return None
    return status


def read_end(
    path: Path, *, since: float, agent: int, owner: bool
) -> tuple[Status | None, Status | None]:
    """Return two statuses after a run has ended: the one on file, and the run's own, None if it
    never began.

    `since` is a time before the run's start, and `agent` the process that started its workers on
    this node. `owner`: rank 0 is one of them. Workers that outlive a killed agent write how they
    ended and then release the lock, so this waits for it."""
    status = read_status(path)
    if status is not None and status.state == "running" and status.started >= since:
        with suppress(RunError, OSError):
            os.close(_take_lock(path))
        status = read_status(path)
    if status is None or status.started < since:
        return status, None

    # Another run may have begun since. It keeps this run's status in `before`.
    own = job_name(agent)
    if owner and status.job not in (None, own):
        before = status.before
        status = Status(**before) if before is not None and before["job"] == own else None
    return status, status


def report_failure(path: Path, *, cause: str, exit_code: int, rank: int | None, step: int) -> None:
    """Write into status.json that the run failed in `step` (0: before the first one), unless it
    already says how the run ended: the first cause stays.

    For any rank, once rank 0 has opened the folder. Before that, the status is another run's."""
    ended: dict[str, Any] = {"cause": cause, "exit_code": exit_code, "rank": rank}
    _update_status(path, state="failed", **ended, **({"step": step} if step else {}))


def overrule_status(path: Path, status: Status, **ended: Any) -> None:
    """Replace the run's own `status` by how it failed according to its launcher.

    A full disk is no error, because the launcher prints the same.
    """
    with suppress(RunError):
        failed = dataclasses.replace(status, state="failed", time=time.time(), **ended)
        _write_status(path, failed)


def _update_status(path: Path, **changes: Any) -> None:
    """Change status.json, unless it already says how the run ended. One process does at a time."""
    with _explained(path):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            now = time.time()
            status = read_status(path) or Status("running", started=now, time=now)
            if status.state == "running":
                _write_status(path, dataclasses.replace(status, **changes, time=now))
        finally:
            os.close(folder)


def _write_status(path: Path, status: Status) -> None:
    """Replace status.json. On a full disk, write the end of a run over the old status: a file of at
    most one block needs no new space."""
    file = path / STATUS_FILE
    with _explained(path):
        try:
            replace_file(file, _to_json(status))
        except OSError as error:
            if error.errno not in DISK_FULL or status.exit_code is None:
                raise
            short = dataclasses.replace(status, before=None)
            while len(_to_json(short)) > BLOCK_BYTES:
                if not short.cause:
                    raise
                short = dataclasses.replace(short, cause=short.cause[: len(short.cause) // 2])
            with file.open("r+b") as stream:
                stream.write(_to_json(short))
                stream.truncate()


def _to_json(status: Status) -> bytes:
    return (json.dumps(dataclasses.asdict(status), indent=1) + "\n").encode()


def _take_lock(path: Path) -> int:
    """Lock the folder's lock file and return its descriptor. The kernel releases the lock when the
    process ends. Raises ConfigError for a file of that name that no run has written."""
    file = path / LOCK_FILE
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    if not OWN_LOCK.match(os.read(lock, 100).decode(errors="replace")):
        os.close(lock)
        raise ConfigError(
            f'[job] dump_folder = "{path}" holds a file {LOCK_FILE} that no run has left; move it '
            "elsewhere, or name another folder."
        )

    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(lock)
                raise ConfigError(
                    f'[job] dump_folder = "{path}" belongs to a live run: {file.read_text()}; '
                    "wait for it or stop it, or name another folder."
                ) from None
        time.sleep(0.2)

    os.truncate(lock, 0)
    os.pwrite(lock, f"{job_name(os.getpid())} since {_time_name(time.time())}".encode(), 0)
    return lock


def _not_free(path: Path, entries: list[str]) -> list[str]:
    """Return those `entries` that exist and are neither an empty folder nor a link to one."""
    there = [entry for entry in entries if os.path.lexists(path / entry)]
    return [
        entry for entry in there if not (path / entry).is_dir() or any((path / entry).iterdir())
    ]


def _check_nothing_foreign(path: Path, entries: list[str], *, resumed_config: str | None) -> None:
    """Raise ConfigError if a run would move or replace anything in the folder, which has no
    status.json.

    A checkpoint to resume from shows that all entries come from a run, except a status.json, and a
    config.toml whose text is not `resumed_config`."""
    foreign = _not_free(path, entries)
    if resumed_config is not None:
        file = path / CONFIG_FILE
        is_own = file.is_file() and file.read_bytes() == resumed_config.encode()
        doubtful = {STATUS_FILE} if is_own else {STATUS_FILE, CONFIG_FILE}
        foreign = [entry for entry in foreign if entry in doubtful]
    if foreign:
        raise ConfigError(
            f'[job] dump_folder = "{path}" holds {", ".join(foreign)}, but no {STATUS_FILE} of a '
            "run, so no run may have written that; move it elsewhere, or name another folder."
        )


def _move_to_previous(path: Path, entries: list[str], *, started: float) -> None:
    """Move those `entries` that an earlier run, `started` then, left to a new folder in previous/.
    Raises ConfigError for a link, whose target would stay in its place."""
    found = _not_free(path, entries)
    if links := [entry for entry in found if (path / entry).is_symlink()]:
        raise ConfigError(
            f'[job] dump_folder = "{path}" holds {links[0]}, a link to '
            f"{(path / links[0]).readlink()}, which is not empty; a new run cannot move the files "
            "behind a link to previous/: link an empty folder, or name another dump_folder."
        )

    name = _time_name(started)
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    target = next(folder for name in names if not (folder := path / "previous" / name).exists())
    for entry in found:
        (target / entry).parent.mkdir(parents=True, exist_ok=True)
        (path / entry).rename(target / entry)
    logger.info(f"moved the files of an earlier run in {path} to {target}: {', '.join(found)}")


def _time_name(seconds: float) -> str:
    """Return local time in a form that suits a file name: 2026-11-20T20-53-20."""
    return time.strftime("%Y-%m-%dT%H-%M-%S", time.localtime(seconds))


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an OSError into the RunError that names the folder, the reason and the fix."""
    try:
        yield
    except OSError as error:
        fixable = isinstance(error, FileExistsError | NotADirectoryError | PermissionError)
        fixable |= error.errno == errno.ELOOP  # a link in place of the lock
        raise (ConfigError if fixable else StorageError)(
            f'[job] dump_folder = "{path}" cannot be written: {error.filename or path}: '
            f"{error.strerror}; make room or fix its permissions, or name another folder."
        ) from error
