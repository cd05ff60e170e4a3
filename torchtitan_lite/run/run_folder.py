"""The run folder: lock it for one run at a time, move earlier runs aside, and keep status.json.

A run writes its status.json before any file that a later run could move, and a later run moves
status.json last. So if status.json exists, a run wrote the other files that have a run's names.
Without a status.json, nothing in the folder is moved or replaced.
"""

import fcntl
import os
import re
import socket
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan_lite.base.errors import (
    FINAL_EXIT_CODES,
    ConfigError,
    RunError,
    StorageError,
)
from torchtitan_lite.base.files import lock_file, own_sources, replace_file
from torchtitan_lite.base.logger import logger

from .status import STATUS_FILE, Status, explained, job_name, read_status, time_name, write_status

CONFIG_FILE = "config.toml"
LOCK_FILE = ".lock"
OWN_LOCK = re.compile(r"(process \d+ on .*)?\Z")  # names the last run that held it, or is empty
LOCK_SECONDS = 10.0  # how long a new run waits: workers of a killed agent take seconds to end


class RunFolder:
    """A run's folder in one of its processes. Rank 0 calls `lock` and `begin`, then the other ranks
    call `join`. After that, status.json belongs to this run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.started = time.time()  # on rank 0 of a restarted run, of its first attempt
        self._lock: int | None = None  # descriptor, on rank 0
        self._inode: int | None = None  # of the lock file, which identifies this run

    def lock(self) -> bool:
        """Create the folder if needed, and lock it until `close` or the end of this process. Return
        whether torchrun has restarted this run.

        Raises ConfigError if it cannot be a run folder, or if another run still holds it after
        LOCK_SECONDS; StorageError if the disk fails; the previous attempt's error if that was
        final."""
        with explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _take_lock(self.path)
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            return False
        earlier = read_status(self.path)
        if earlier is None or earlier.job != job_name(os.getppid()):
            return False

        if earlier.exit_code in FINAL_EXIT_CODES:
            self.close()
            error = RunError(earlier.cause)
            error.exit_code = earlier.exit_code
            raise error
        self.started = earlier.started
        return True

    def begin(self, *, resumed_config: str | None, entries: Iterable[str]) -> None:
        """Set the status to "running". `resumed_config` is the config in the resumed checkpoint.

        A new run moves an earlier run's `entries` (names within the folder), config.toml and
        status.json to previous/<its start time>/. Other files, empty folders and links to empty
        folders stay. A resumed run moves nothing; until its first step, the status keeps the step
        and the last checkpoint. Raises ConfigError if it would move or replace files that no run
        wrote, StorageError if the disk fails."""
        before = read_status(self.path)
        names = [*entries, CONFIG_FILE, STATUS_FILE]
        with explained(self.path):
            if before is None:
                _check_nothing_foreign(self.path, names, resumed_config=resumed_config)
            elif resumed_config is None:
                _move_to_previous(self.path, names, started=before.started)
        self._begin(before, keeps_progress=resumed_config is not None)

    def _begin(self, before: Status | None, *, keeps_progress: bool) -> None:
        now, job = time.time(), job_name(os.getppid())
        status = Status("running", self.started, now, job=job, sources=own_sources())
        if before is not None and keeps_progress:
            status = replace(status, step=before.step, last_checkpoint=before.last_checkpoint)
        write_status(self.path, status)
        self.join()

    def join(self) -> None:
        """Record that status.json belongs to this run."""
        self._inode = self._lock_inode()

    def _lock_inode(self) -> int | None:
        with suppress(OSError):
            return (self.path / LOCK_FILE).stat().st_ino
        return None

    def check_is_ours(self, *, step: int) -> None:
        """Raise StorageError unless the folder is still the one that rank 0 locked."""
        if self._inode is None or self._inode != self._lock_inode():
            raise StorageError(
                f'[job] dump_folder = "{self.path}" was moved or deleted, or another run has it; '
                f"this one ends at step {step}. Leave the folder and its {LOCK_FILE} alone until a "
                "run has ended."
            )

    def write_config(self, text: str) -> None:
        """Replace config.toml by `text`."""
        with explained(self.path):
            replace_file(self.path / CONFIG_FILE, text)

    def update(self, *, step: int, **changes: Any) -> None:
        """Change status.json, unless the run has ended (the first cause stays), under a lock.
        Raises StorageError if the folder belongs to another run or the disk fails."""
        self.check_is_ours(step=step)
        with explained(self.path):
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                lock_file(folder, fcntl.LOCK_EX)
                now = time.time()
                status = read_status(self.path) or Status("running", started=now, time=now)
                if status.state == "running":
                    changes["step"] = step or status.step
                    write_status(self.path, replace(status, time=now, **changes))
            finally:
                os.close(folder)

    def fail(self, error: RunError, step: int) -> None:
        """Write into status.json that the run failed in `step` (0: before the first one), if the
        folder belongs to this run. Any rank may call it.

        If the run holds the lock but has not begun, the status keeps the earlier run's step and
        last checkpoint. Without an earlier run nothing is written, because a status.json would mark
        foreign files as a run's."""
        with suppress(RunError):  # a full disk: the reported error matters more
            before = read_status(self.path)
            if self._inode is None and self._lock is not None and before is not None:
                self._begin(before, keeps_progress=True)
            ended = {"cause": str(error), "exit_code": error.exit_code, "rank": error.rank}
            self.update(step=step, state="failed", **ended)

    def close(self) -> None:
        """Release the lock."""
        assert self._lock is not None, "rank 0 has locked it"
        os.close(self._lock)
        self._lock = None


def make_log_folder(path: Path) -> Path:
    """Create a log folder, named after the time and host. Raises ConfigError, StorageError."""
    with explained(path):
        name = f"{time_name(time.time())}-{socket.gethostname()}"
        folder = _new_folder(path / "logs", name)
        (folder / "torchrun.log").touch()
    return folder


def read_end(
    path: Path, *, since: float, agent: int, owner: bool
) -> tuple[Status | None, Status | None]:
    """Return two statuses after a run has ended: the one on file, and the one of this run, which is
    None if it never began.

    `since` is a time before the run's start, and `agent` the process that started its workers on
    this node. `owner` says whether rank 0 is among them. Workers that outlive a killed agent write
    their status and then release the lock, so this waits for the lock."""
    status = read_status(path)
    if status is None or status.started < since:
        return status, None
    if status.state == "running":
        with suppress(RunError, OSError):
            os.close(_take_lock(path))
        status = read_status(path) or status

    # Another run may have begun since.
    is_own = not owner or status.job in (None, job_name(agent))
    return status, status if is_own else None


def _take_lock(path: Path) -> int:
    """Lock the folder's lock file and return its descriptor. The kernel releases the lock when the
    process ends. Raises ConfigError if the file was not written by a run."""
    file = path / LOCK_FILE
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    is_file = stat.S_ISREG(os.fstat(lock).st_mode)  # reading a pipe would fail
    if not is_file or not OWN_LOCK.match(os.read(lock, 100).decode(errors="replace")):
        os.close(lock)
        raise ConfigError(
            f'[job] dump_folder = "{path}" holds a file {LOCK_FILE} that no run has left; move it '
            "elsewhere, or name another folder."
        )

    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        with suppress(BlockingIOError):
            if not lock_file(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
                logger.warning(
                    f'[job] dump_folder = "{path}" is on a file system without locks (flock), so '
                    "that another run in it would go unnoticed; start one at a time"
                )
            break
        if time.monotonic() > deadline:
            holder = os.pread(lock, 200, 0).decode(errors="replace")
            os.close(lock)
            raise ConfigError(
                f'[job] dump_folder = "{path}" belongs to a live run: {holder}; '
                "wait for it or stop it, or name another folder."
            )
        time.sleep(0.2)

    os.truncate(lock, 0)
    os.pwrite(lock, f"{job_name(os.getpid())} since {time_name(time.time())}".encode(), 0)
    return lock


def _not_free(path: Path, entries: list[str]) -> list[str]:
    """Return the `entries` that exist, except empty folders and links to empty folders."""
    there = [entry for entry in entries if os.path.lexists(path / entry)]
    return [
        entry for entry in there if not (path / entry).is_dir() or any((path / entry).iterdir())
    ]


def _check_nothing_foreign(path: Path, entries: list[str], *, resumed_config: str | None) -> None:
    """Raise ConfigError if a run would move or replace anything in a folder without a valid status.

    A checkpoint to resume from proves that a run wrote the entries, except for an invalid
    status.json and for a config.toml that differs from `resumed_config`."""
    foreign = _not_free(path, entries)
    if resumed_config is not None:
        file = path / CONFIG_FILE
        own = resumed_config.encode()
        is_own = file.is_file() and file.stat().st_size == len(own) and file.read_bytes() == own
        doubtful = {STATUS_FILE} if is_own else {STATUS_FILE, CONFIG_FILE}
        foreign = [entry for entry in foreign if entry in doubtful]
    if foreign:
        raise ConfigError(
            f'[job] dump_folder = "{path}" holds {", ".join(foreign)}, but no {STATUS_FILE} of a '
            "run, so no run may have written that; move it elsewhere, or name another folder."
        )


def _move_to_previous(path: Path, entries: list[str], *, started: float) -> None:
    """Move the earlier run's `entries` to a folder in previous/, named after its start time.
    Raises ConfigError for a link, because its target would not move."""
    found = _not_free(path, entries)
    if links := [entry for entry in found if (path / entry).is_symlink()]:
        raise ConfigError(
            f'[job] dump_folder = "{path}" holds {links[0]}, a link to '
            f"{(path / links[0]).readlink()}, which is not empty; a new run cannot move the files "
            "behind a link to previous/: link an empty folder, or name another dump_folder."
        )

    target = _new_folder(path / "previous", time_name(started))
    for entry in found:
        (target / entry).parent.mkdir(parents=True, exist_ok=True)
        (path / entry).rename(target / entry)
    logger.info(f"moved the files of an earlier run in {path} to {target}: {', '.join(found)}")


def _new_folder(parent: Path, name: str, number: int = 1) -> Path:
    """Create a folder in `parent`; append a number if the name is taken."""
    folder = parent / (name if number == 1 else f"{name}-{number}")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return _new_folder(parent, name, number + 1)
    return folder
