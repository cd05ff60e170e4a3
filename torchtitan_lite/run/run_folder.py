"""The run folder: lock it for one run at a time, move earlier runs aside, and keep status.json.

Whose a folder is, its status.json alone decides. A run writes it before any other file, and a later
run moves it last. Without one nothing in the folder is moved or replaced; and a run to which it
does not belong any more writes nothing. Until a start begins, it changes nothing of an earlier run.
"""

import fcntl
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from torchtitan_lite.base.errors import (
    STOPPED_EXIT_CODE,
    ConfigError,
    RankLostError,
    RunError,
    StorageError,
    kind_of,
)
from torchtitan_lite.base.files import DISK_FULL, lock_file, replace_file, storage_fix
from torchtitan_lite.base.jsonfile import Count, read_regular, strict_json
from torchtitan_lite.base.logger import logger
from torchtitan_lite.catalog.run_files import RUN_FILES

STATUS_FILE = "status.json"
RESTARTED = {RunError.exit_code, RankLostError.exit_code, StorageError.exit_code}
"""Exit codes after which torchrun's restart makes sense. After others the run would fail again, or
the user has stopped it."""
LOCK_FILE = ".lock"
STAYS = {LOCK_FILE, "logs", "previous"}
"""Of RUN_FILES, what a later run does not move."""
LOCK_SECONDS = 10.0  # how long a new run waits: workers of a killed agent take seconds to end


@dataclass(frozen=True)
class Status:
    """Content of status.json. Times are Unix seconds. A new field needs a default."""

    state: Literal["running", "done", "stopped", "failed"]
    started: float  # identifies the run
    time: float  # last change
    step: Count = 0  # last finished step; of a failed run, the step that failed
    total_steps: Count | None = None
    loss: float | None = None  # of the last logged step, like tps
    tps: float | None = None  # tokens per second per device
    mfu: float | None = None  # percent
    eta_s: float | None = None  # from the last logged step to the end
    last_checkpoint: str | None = None
    cause: str | None = None
    exit_code: Count | None = None
    rank: Count | None = None  # rank that the cause refers to, if any
    device: str | None = None  # as torch calls it; "CPU"
    world_size: Count | None = None
    job: str | None = None  # agent that started the run and may restart its processes


def job_name(agent: int) -> str:
    """Return the name of the job whose workers are children of process `agent` on this host."""
    return f"process {agent} on {socket.gethostname()}"


def read_status(path: Path) -> Status | None:
    """Return the status in a run folder; None if there is no valid one. Ignores unknown keys."""
    try:
        content = read_regular(path / STATUS_FILE, max_bytes=1 << 20)  # a cause may be long
        status = TypeAdapter(Status).validate_json(content)
        time_name(status.started)
    except (OSError, ValueError, ArithmeticError):
        return None
    return status


def write_status(path: Path, status: Status) -> None:
    """Replace status.json. Raises ConfigError or StorageError.

    On a full disk, overwrite it in place if the run has ended, with a short cause: its first block,
    4096 bytes on most file systems, needs no new space."""
    file = path / STATUS_FILE
    with explained(path):
        try:
            replace_file(file, _to_json(status))
        except OSError as error:
            if error.errno not in DISK_FULL or status.exit_code is None:
                raise
            short = replace(status, cause=(status.cause or "")[:400])
            with file.open("r+b") as stream:
                stream.write(_to_json(short))
                stream.truncate()


def _to_json(status: Status) -> bytes:
    return (strict_json(asdict(status), indent=1) + "\n").encode()


def time_name(seconds: float) -> str:
    """Return the local time as a file name: 2026-11-20T20-53-20."""
    return time.strftime("%Y-%m-%dT%H-%M-%S", time.localtime(seconds))


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an OSError into the RunError that names the folder, the reason and the fix."""
    try:
        yield
    except OSError as error:
        raise kind_of(error)(
            f'[job] dump_folder = "{path}" cannot be written: {error.filename or path}: '
            f"{error.strerror}; {storage_fix(error)}, or name another folder."
        ) from error


class RunFolder:
    """A run's folder in one of its processes. Rank 0 calls `lock` and `begin`; the other ranks set
    `started` to rank 0's. `names` are of what the config names in it, beside RUN_FILES."""

    def __init__(self, path: Path, names: Iterable[str] = ()) -> None:
        self.path = path
        self._names = (*names, *sorted(RUN_FILES - STAYS - {STATUS_FILE}), STATUS_FILE)
        self.started = time.time()  # of a restarted run, of its first attempt
        self._lock: int | None = None  # descriptor, on rank 0
        self._begun = False

    def lock(self) -> bool:
        """Create the folder if needed, and lock it until `close` or the end of this process. Return
        whether torchrun has restarted this run.

        Raises ConfigError if it cannot be a run folder, has files that no run wrote, or another run
        holds it, StorageError if the disk fails, and the previous attempt's error if that was
        final."""
        with explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self.path)
            earlier = read_status(self.path)
            if earlier is None and (found := _occupied(self.path, self._names)):
                self.close()
                raise ConfigError(
                    f'[job] dump_folder = "{self.path}" holds {", ".join(found)}, and no valid '
                    f"{STATUS_FILE} of a run; move that elsewhere, or name another folder."
                )
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if not restarted or earlier is None or earlier.job != job_name(os.getppid()):
            return False

        if earlier.exit_code and earlier.exit_code not in RESTARTED:
            self.close()
            error = RunError(earlier.cause)
            error.exit_code = earlier.exit_code
            raise error
        self.started = earlier.started
        return True

    def begin(self, *, resumes: bool, config: str) -> None:
        """Set the status to "running", and write `config` into config.toml.

        A new run moves an earlier run's files to previous/<its start time>/, status.json last.
        Other files, empty folders and links to empty folders stay. A run that resumes moves
        nothing, and keeps the progress of the status. Raises ConfigError if there are files that
        cannot move, StorageError if the disk fails."""
        before = read_status(self.path)
        with explained(self.path):
            if before is not None and not resumes:
                found = _occupied(self.path, self._names)
                _move_to_previous(self.path, found, started=before.started)
            self._begin(before if resumes else None)
            replace_file(self.path / "config.toml", config)

    def _begin(self, before: Status | None) -> None:
        """Set the status to "running", with the progress of the run `before`."""
        status = Status("running", self.started, time.time(), job=job_name(os.getppid()))
        if before is not None:
            kept = ("step", "loss", "tps", "mfu", "last_checkpoint")
            status = replace(status, **{name: getattr(before, name) for name in kept})
        write_status(self.path, status)
        self._begun = True

    def check_is_ours(self, *, step: int) -> None:
        """Raise StorageError unless the folder's status is this run's."""
        status = read_status(self.path)
        if status is None or status.started != self.started:
            raise StorageError(
                f'[job] dump_folder = "{self.path}" or its {STATUS_FILE} was moved or deleted, or '
                f"another run has it; this one ends at step {step}. Leave them alone until a run "
                "has ended."
            )

    def update(self, *, step: int, **changes: Any) -> None:
        """Change status.json, unless the run has ended: the first cause stays. Raises StorageError
        if the folder belongs to another run or the disk fails."""
        self.check_is_ours(step=step)
        with explained(self.path):
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                lock_file(folder, fcntl.LOCK_EX)  # other ranks may report a failure
                status = read_status(self.path)
                if status is not None and status.state == "running":
                    changes["step"] = step or status.step
                    write_status(self.path, replace(status, time=time.time(), **changes))
            finally:
                os.close(folder)

    def fail(self, error: RunError, step: int) -> None:
        """Write into status.json that the run failed in `step` (0: before the first one), or that a
        signal stopped it. Any rank may call it. It leaves an earlier run's status alone."""
        with suppress(RunError):  # a full disk: the reported error matters more
            before = read_status(self.path)
            is_own = before is None or before.started == self.started
            if self._lock is not None and not self._begun and is_own:
                self._begin(before)
            cause = f"{error}\n{error.paste}".strip()
            ended = {"cause": cause, "exit_code": error.exit_code, "rank": error.rank}
            state = "stopped" if error.exit_code == STOPPED_EXIT_CODE else "failed"
            self.update(step=step, state=state, **ended)

    def close(self) -> None:
        """Release the lock, which this process must have."""
        assert self._lock is not None
        os.close(self._lock)
        self._lock = None


def take_lock(path: Path) -> int:
    """Lock the folder's lock file until the process ends, and return its descriptor. Raises
    ConfigError if another run still has it after LOCK_SECONDS."""
    lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + LOCK_SECONDS
    while time.monotonic() <= deadline:
        with suppress(BlockingIOError):
            if not lock_file(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
                logger.warning(
                    f'[job] dump_folder = "{path}" is on a file system without locks (flock), so '
                    "that another run in it would go unnoticed; start one at a time"
                )
            return lock
        time.sleep(0.2)

    os.close(lock)
    status = read_status(path)
    raise ConfigError(
        f'[job] dump_folder = "{path}" belongs to a live run'
        f"{f', {status.job}' if status else ''}; wait for it or stop it, or name another folder."
    )


def _occupied(path: Path, names: Iterable[str]) -> list[str]:
    """Return the `names` that exist, except folders, and links to folders, that are empty or only
    have hidden files, such as the draft of a killed save."""

    def is_empty(folder: Path) -> bool:
        return folder.is_dir() and all(file.name.startswith(".") for file in folder.iterdir())

    return [name for name in names if os.path.lexists(path / name) and not is_empty(path / name)]


def _move_to_previous(path: Path, names: list[str], *, started: float) -> None:
    """Move the earlier run's `names` to a folder in previous/, named after its start time, and
    rename its event files. Raises ConfigError for a link, because its target would not move."""
    if links := [name for name in names if (path / name).is_symlink()]:
        raise ConfigError(
            f'[job] dump_folder = "{path}" holds {links[0]}, and files behind a link cannot move '
            "to previous/; move that elsewhere, or name another folder."
        )
    target = path / "previous" / time_name(started)
    for name in names:
        # TensorBoard shows every file below its logdir whose name has "tfevents" as a run's.
        for events in [each for each in (path / name).rglob("*tfevents*") if each.is_file()]:
            events.rename(events.with_name(events.name.replace("tfevents", "previous")))
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).rename(target / name)
    logger.info(f"moved the files of an earlier run in {path} to {target}: {', '.join(names)}")
