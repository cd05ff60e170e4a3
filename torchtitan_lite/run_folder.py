"""The run folder: one live run at a time, earlier runs moved aside, and a status.json that says how
the run ended.

A run writes its status.json before anything that could be moved, and moves it last. So a
status.json proves that the other files under a run's names are a run's. Without one, nothing in the
folder is moved or replaced.

`python -m torchtitan_lite.run_folder` is the last step of run_train.sh: it tells what ended a run
that did not finish.
"""

import argparse
import dataclasses
import errno
import fcntl
import itertools
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchtitan_lite.errors import (
    STOPPED_EXIT_CODE,
    CheckpointError,
    ConfigError,
    DataError,
    NumericError,
    RankLostError,
    RunError,
    StorageError,
)
from torchtitan_lite.files import DISK_FULL, replace_file
from torchtitan_lite.logger import logger

CONFIG_FILE = "config.toml"
STATUS_FILE = "status.json"
BLOCK_BYTES = 4096
"""Size of the disk's blocks, as most file systems have it: a file can be overwritten up to it
without new space."""
LOCK_FILE = ".lock"
OWN_LOCK = re.compile(r"(process \d+ on .*)?\Z")
"""Content of a lock file: the last run that held it, or nothing yet."""
LOCK_SECONDS = 10.0
"""How long a new run waits for the lock: processes of a torchrun that was killed need some seconds
to end."""

# torchrun's report has a block for each rank that did not end with 0; the first such rank to be
# seen comes last. Ranks that torchrun itself ended, because another one had failed, are told of
# before.
FAILURE = re.compile(r"^ +rank +: (\d+) .*\n +exitcode +: (-?\d+) +\(pid: (\d+)\)", re.MULTILINE)
CLOSED = re.compile(r"Sending process (\d+) closing signal")

NEXT = {
    1: "look at the logs",
    ConfigError.exit_code: "mend the config",
    DataError.exit_code: "mend the data",
    CheckpointError.exit_code: "see which checkpoints are whole, by scripts/checkpoint.py verify {path}",
    NumericError.exit_code: "lower [optimizer] lr, or name an earlier [checkpoint] load_step",
    RankLostError.exit_code: "look at the logs and at the host of that rank",
    StorageError.exit_code: "make room",
    STOPPED_EXIT_CODE: "start it again when you like",
}
"""What to do before a run is started again, by the exit code that it ended with."""


@dataclass(frozen=True)
class Status:
    """Content of status.json. `started` and `time`, that of the last change, are Unix seconds.
    `step` is the last one done, and of a run that failed the one that it failed in. `rank` is the
    one that the cause is about, if it is about one."""

    state: Literal["running", "done", "stopped", "failed"]
    started: float
    time: float
    step: int = 0
    last_checkpoint: str | None = None
    cause: str | None = None
    exit_code: int | None = None
    rank: int | None = None
    job: str | None = None
    """The torchrun of the run, which may start its processes again."""
    before: dict[str, Any] | None = None
    """The status of the run before, for its run_train.sh, which may not have read it yet."""


@dataclass(frozen=True)
class RunFolder:
    """A run folder that this process, rank 0, holds locked until `close` or its own end."""

    path: Path
    _lock: int

    def earlier_attempt(self) -> Status | None:
        """The status that this job left before torchrun started it again; None in its first
        attempt."""
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            return None
        status = read_status(self.path)
        return status if status is not None and status.job == _job_name() else None

    def begin(self, *, resumed_config: str | None, entries: Iterable[str]) -> None:
        """Set the status to "running". `resumed_config` is the config that the checkpoint to resume
        from holds, None for a run that resumes nothing.

        Without it, what an earlier run left of `entries` (names within the folder), config.toml and
        status.json moves to previous/<its start time>/; files of other names, empty folders and
        links to such stay where they are. With it, the status keeps step and last checkpoint,
        should this run fail before its first step. Raises ConfigError if what would move or be
        replaced is not a run's, StorageError if the disk fails."""
        before, resumes = read_status(self.path), resumed_config is not None
        names = [*entries, CONFIG_FILE, STATUS_FILE]
        with _explained(self.path):
            if before is None:
                _check_nothing_foreign(self.path, names, resumed_config=resumed_config)
            elif not resumes:
                _move_to_previous(self.path, names, started=before.started)
        self._begin(before, state="running", keeps_progress=resumes)

    def _begin(self, before: Status | None, *, keeps_progress: bool, **fields: Any) -> None:
        now = time.time()
        if before is not None:
            if keeps_progress:
                fields |= {"step": before.step, "last_checkpoint": before.last_checkpoint}
            fields["before"] = dataclasses.asdict(dataclasses.replace(before, before=None))
        _write_status(self.path, Status(started=now, time=now, job=_job_name(), **fields))

    def refuse(self, *, cause: str, exit_code: int) -> None:
        """Write into status.json why the run did not begin; step and last checkpoint stay the
        earlier run's. Without an earlier run write nothing: a status.json would mark foreign files
        as a run's."""
        if (before := read_status(self.path)) is not None:
            self._begin(
                before, keeps_progress=True, state="failed", cause=cause, exit_code=exit_code
            )

    def write_config(self, text: str) -> None:
        """Replace config.toml by `text`."""
        with _explained(self.path):
            replace_file(self.path / CONFIG_FILE, text)

    def check_is_ours(self, *, step: int) -> None:
        """Raise StorageError unless the folder is still the one that this process locked."""
        if lock_inode(self.path) != os.fstat(self._lock).st_ino:
            raise StorageError(
                f'[job] dump_folder = "{self.path}" was moved or deleted, or another run has it; this one ends at step '
                f"{step}. Leave the folder and its {LOCK_FILE} alone until a run has ended."
            )

    def running(self, *, step: int, last_checkpoint: str | None) -> None:
        """Write into status.json how far the run is. Raises StorageError if the folder is no longer
        this run's."""
        self.check_is_ours(step=step)
        _update_status(self.path, step=step, last_checkpoint=last_checkpoint)

    def done(self) -> None:
        """Write into status.json that the run reached its last step."""
        _update_status(self.path, state="done", exit_code=0)

    def stopped(self, *, cause: str) -> None:
        """Write into status.json that a signal ended the run at a step's end."""
        _update_status(self.path, state="stopped", cause=cause, exit_code=STOPPED_EXIT_CODE)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)


def lock_inode(path: Path) -> int | None:
    """What identifies the lock file of a run folder as long as a process holds it; None if there is
    no such file."""
    try:
        return (path / LOCK_FILE).stat().st_ino
    except OSError:
        return None


def open_run_folder(path: Path) -> RunFolder:
    """The run folder at `path`: made where missing, and locked. Raises ConfigError if a live run
    holds it, after waiting LOCK_SECONDS for it, or if it cannot be one, StorageError if the disk
    fails."""
    with _explained(path):
        path.mkdir(parents=True, exist_ok=True)
        return RunFolder(path, _take_lock(path))


def _job_name() -> str:
    """What tells this process's torchrun from others."""
    return f"process {os.getppid()} on {socket.gethostname()}"


def read_status(path: Path) -> Status | None:
    """The status on file in the run folder; None if there is none, or none of ours."""
    file = path / STATUS_FILE
    if not file.is_file():  # a pipe would be waited for
        return None
    try:
        status = Status(**json.loads(file.read_text()))
        _time_name(status.started)
    except (OSError, ValueError, TypeError, ArithmeticError, RecursionError):
        return None
    return status


def report_failure(path: Path, *, cause: str, exit_code: int, rank: int | None, step: int) -> None:
    """Write into status.json that the run failed in `step`, 0: before its first one; unless it says
    already how the run ended: the first cause stays.

    For any rank, once rank 0 has opened the folder. Before that, the status on file is that of
    another run.
    """
    ended: dict[str, Any] = {
        "state": "failed",
        "cause": cause,
        "exit_code": exit_code,
        "rank": rank,
    }
    _update_status(path, **ended, **({"step": step} if step else {}))


@dataclass(frozen=True)
class Outcome:
    """How a run ended that did not finish; `rank` is the one that the cause is about, if it is
    about one."""

    cause: str
    exit_code: int
    rank: int | None = None


def find_outcome(status: Status | None, *, report: str, torchrun: int, signalled: bool) -> Outcome:
    """How a run ended, from its status, None if it ended before it opened its folder, and
    torchrun's `report` and exit code. `signalled`: it was asked to stop. A killed rank counts
    before what others made of it, but for what they found out about it."""
    lost = RankLostError.exit_code
    failures = [(int(rank), int(code), pid) for rank, code, pid in FAILURE.findall(report)]
    closed = set(CLOSED.findall(report))
    for rank, code, pid in failures:
        if code < 0 and pid not in closed:
            killed = f"rank {rank} was killed by {signal.Signals(-code).name}"
            if status is not None and status.exit_code == lost:
                return Outcome(
                    f"{status.cause} ({killed})", lost, rank if status.rank is None else status.rank
                )
            return Outcome(killed, lost, rank)
    if status is not None and status.exit_code is not None:
        return Outcome(status.cause or status.state, status.exit_code, status.rank)
    if failures:
        rank, code, _ = failures[-1]
        return Outcome(f"rank {rank} ended with exit code {code}", code, rank)
    if torchrun in NEXT and torchrun != 1:  # launch.py passes on a worker's exit code
        return Outcome(
            f"a rank ended with exit code {torchrun}, and neither it nor torchrun could write why",
            torchrun,
        )
    if signalled and status is None:
        return Outcome("stopped by a signal before the first step", STOPPED_EXIT_CODE)
    if signalled:
        return Outcome("killed before it could stop at a step's end", lost)
    if torchrun > 128:  # as a shell tells of a signal
        return Outcome(f"torchrun was killed by {signal.Signals(torchrun - 128).name}", lost)
    return Outcome("torchrun failed", 1)


def format_outcome(
    outcome: Outcome, status: Status | None, *, path: Path, logs: str, command: str
) -> str:
    """The lines at the end of a run that did not finish: what ended it, how far it was by the
    `status` on file, and what to do next, after which `command` starts it again."""
    step, last_checkpoint = (status.step, status.last_checkpoint) if status else (0, None)
    rank = "" if outcome.rank is None else f"rank: {outcome.rank}\n"
    goes_on = "goes on from the last checkpoint" if last_checkpoint else "starts anew"
    return (
        f"exit code {outcome.exit_code}: {outcome.cause}\n{rank}step: {step}\n"
        f"last checkpoint: {last_checkpoint or 'none'}\nrun folder: {path}\nlogs: {logs}\n"
        f"next: {NEXT.get(outcome.exit_code, NEXT[1]).format(path=path)}; this {goes_on}: {command}"
    )


def find_logs(folder: Path, *, rank: int | None, first_rank: int) -> str:
    """The log files of the last attempt of `rank`, if that is one of this host's, of which
    `first_rank` is the lowest; else their folder. torchrun's layout:
    RUN/attempt_K/LOCAL_RANK/{stdout,stderr}.log."""
    if rank is None:
        return str(folder)
    attempts = folder.glob(f"*/attempt_*/{rank - first_rank}")
    last = max(
        attempts,
        key=lambda attempt: int(attempt.parent.name.removeprefix("attempt_")),
        default=None,
    )
    return f"{last}/{{stdout,stderr}}.log" if last else str(folder)


def main() -> int:
    """The exit code of run_train.sh, after printing how the run ended."""
    parser = argparse.ArgumentParser(description="Tell what ended a run that did not finish.")
    parser.add_argument("path", type=Path, help="run folder")
    parser.add_argument(
        "--log-dir", type=Path, required=True, help="folder of torchrun.log and of the ranks' logs"
    )
    parser.add_argument(
        "--since",
        type=float,
        required=True,
        help="start of the run at the earliest, in Unix seconds",
    )
    parser.add_argument("--torchrun", type=int, required=True, help="torchrun's exit code")
    parser.add_argument("--torchrun-pid", type=int, required=True, help="its process")
    parser.add_argument("--signalled", action="store_true", help="the run was asked to stop")
    parser.add_argument("--first-rank", type=int, default=0, help="lowest rank of this host")
    parser.add_argument("--command", required=True, help="what started the run")
    args = parser.parse_args()
    command = re.sub(
        r" --checkpoint\.load_step[= ]\S+", "", args.command
    )  # it would go on from there again

    report = ""
    with suppress(OSError):  # the disk may be gone
        report = (args.log_dir / "torchrun.log").read_text(errors="replace")
    on_file = _read_end(args.path, since=args.since)
    status = on_file if on_file is not None and on_file.started >= args.since else None
    job = f"process {args.torchrun_pid} on {socket.gethostname()}"
    if (
        status is not None and args.first_rank == 0 and status.job not in (None, job)
    ):  # another run has begun meanwhile
        on_file = status = (
            Status(**status.before) if status.before and status.before["job"] == job else None
        )
    outcome = find_outcome(status, report=report, torchrun=args.torchrun, signalled=args.signalled)
    if status is not None and status.exit_code != outcome.exit_code:
        with suppress(RunError):  # a full disk: what is printed below matters more
            ended = dataclasses.asdict(outcome) | {"state": "failed", "time": time.time()}
            _write_status(args.path, dataclasses.replace(status, **ended))
    elif status is None and outcome.exit_code == 1:
        print(*report.splitlines()[-20:], sep="\n", file=sys.stderr)
    logs = find_logs(args.log_dir, rank=outcome.rank, first_rank=args.first_rank)
    print(
        format_outcome(outcome, on_file, path=args.path, logs=logs, command=command),
        file=sys.stderr,
    )
    return outcome.exit_code


def _read_end(path: Path, *, since: float) -> Status | None:
    """The status on file, after waiting for those ranks of a run started `since` that outlive a
    killed torchrun: they write how they ended, and then the lock is free."""
    status = read_status(path)
    if status is None or status.state != "running" or status.started < since:
        return status
    with suppress(RunError, OSError):
        os.close(_take_lock(path))
    return read_status(path)


def _update_status(path: Path, **changes: Any) -> None:
    """Change status.json, but not once it says how the run ended."""
    with _explained(path), _exclusive(path):
        now = time.time()
        status = read_status(path) or Status("running", started=now, time=now)
        if status.state == "running":
            _write_status(path, dataclasses.replace(status, **changes, time=now))


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Lets one process at a time into its body, for a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write_status(path: Path, status: Status) -> None:
    """Replace status.json. On a full disk, how the run ended is written over the old status, which
    needs no new block of the disk as long as it is short."""
    file = path / STATUS_FILE
    with _explained(path):
        try:
            replace_file(file, _to_json(status))
        except OSError as error:
            if error.errno not in DISK_FULL or status.exit_code is None:
                raise
            short = dataclasses.replace(status, before=None)
            while len(_to_json(short)) > BLOCK_BYTES and short.cause:
                short = dataclasses.replace(short, cause=short.cause[: len(short.cause) // 2])
            if len(_to_json(short)) > BLOCK_BYTES:
                raise
            with file.open("r+b") as stream:
                stream.write(_to_json(short))
                stream.truncate()


def _to_json(status: Status) -> bytes:
    return (json.dumps(dataclasses.asdict(status), indent=1) + "\n").encode()


def _take_lock(path: Path) -> int:
    """Descriptor of the locked file. The kernel frees the lock when the process ends, so no lock
    outlives its run. Raises ConfigError for a file of that name that no run has made."""
    file = path / LOCK_FILE
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    if not OWN_LOCK.match(os.read(lock, 100).decode(errors="replace")):
        os.close(lock)
        raise ConfigError(
            f'[job] dump_folder = "{path}" holds a file {LOCK_FILE} that no run has left; move it elsewhere, or name '
            "another folder."
        )
    deadline = time.monotonic() + LOCK_SECONDS
    while not _try_lock(lock):
        if time.monotonic() > deadline:
            os.close(lock)
            raise ConfigError(
                f'[job] dump_folder = "{path}" belongs to a live run: {file.read_text()}; '
                "wait for it or stop it, or name another folder."
            )
        time.sleep(0.2)
    os.truncate(lock, 0)
    os.pwrite(
        lock,
        f"process {os.getpid()} on {socket.gethostname()} since {_time_name(time.time())}".encode(),
        0,
    )
    return lock


def _try_lock(lock: int) -> bool:
    """Whether the open file `lock` is now locked by this process."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _not_free(path: Path, entries: Iterable[str]) -> list[str]:
    """Those of `entries` that exist and are neither an empty folder nor a link to one."""
    there = [entry for entry in entries if os.path.lexists(path / entry)]
    return [
        entry for entry in there if not (path / entry).is_dir() or any((path / entry).iterdir())
    ]


def _check_nothing_foreign(
    path: Path, entries: Iterable[str], *, resumed_config: str | None
) -> None:
    """Raise ConfigError if a run would move or replace something in the folder, which has no
    status.json of ours.

    With a checkpoint to resume from, all else is a run's too, except a status.json, and a
    config.toml whose text is not `resumed_config`."""
    foreign = _not_free(path, entries)
    if resumed_config is not None:
        config = path / CONFIG_FILE
        own = (
            {CONFIG_FILE}
            if config.is_file() and config.read_bytes() == resumed_config.encode()
            else set()
        )
        foreign = [entry for entry in foreign if entry in {CONFIG_FILE, STATUS_FILE} - own]
    if foreign:
        raise ConfigError(
            f'[job] dump_folder = "{path}" holds {", ".join(foreign)}, but no {STATUS_FILE} of a run, so no run may '
            "have written that; move it elsewhere, or name another folder."
        )


def _move_to_previous(path: Path, entries: Iterable[str], *, started: float) -> None:
    """Move what an earlier run, `started` then, left of `entries` to a new folder under previous/.
    Raises ConfigError for a link, whose target would stay where it is."""
    found = _not_free(path, entries)
    if links := [entry for entry in found if (path / entry).is_symlink()]:
        raise ConfigError(
            f'[job] dump_folder = "{path}" holds {links[0]}, a link to {(path / links[0]).readlink()}, which is not '
            "empty; a new run cannot move the files behind a link to previous/: link an empty folder, or name another "
            "dump_folder."
        )
    name = _time_name(started)
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    target = next(folder for name in names if not (folder := path / "previous" / name).exists())
    for entry in found:
        (target / entry).parent.mkdir(parents=True, exist_ok=True)
        (path / entry).rename(target / entry)
    logger.info(f"what an earlier run left in {path} is now in {target}: {', '.join(found)}")


def _time_name(seconds: float) -> str:
    """Local time in a form that suits a file name: 2026-11-20T20-53-20."""
    return time.strftime("%Y-%m-%dT%H-%M-%S", time.localtime(seconds))


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an OSError into the RunError that names the folder, the reason and the fix."""
    try:
        yield
    except OSError as error:
        mendable = isinstance(error, FileExistsError | NotADirectoryError | PermissionError)
        mendable |= error.errno == errno.ELOOP  # a link in place of the lock
        raise (ConfigError if mendable else StorageError)(
            f'[job] dump_folder = "{path}" cannot be written: {error.filename or path}: {error.strerror}; '
            "make room or mend its permissions, or name another folder."
        ) from error


if __name__ == "__main__":
    sys.exit(main())
