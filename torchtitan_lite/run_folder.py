"""The run folder: one live run at a time, earlier runs moved aside, and a status.json that says how the run ended.

`python -m torchtitan_lite.run_folder` is the last step of run_train.sh: it tells what ended a run that did not finish.
"""

import argparse
import dataclasses
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

from torchtitan_lite.errors import STOPPED_EXIT_CODE, ConfigError, RunError, StorageError

CONFIG_FILE = "config.toml"
STATUS_FILE = "status.json"
RANK_LOST_EXIT_CODE = 6

# torchrun's report has a block for each rank that did not end with 0; the first such rank to be seen comes last. Ranks
# that torchrun itself ended, because another one had failed, are told of before.
FAILURE = re.compile(r"^ +rank +: (\d+) .*\n +exitcode +: (-?\d+) +\(pid: (\d+)\)", re.MULTILINE)
CLOSED = re.compile(r"Sending process (\d+) closing signal")


@dataclass(frozen=True)
class Status:
    """Content of status.json. `started` and `time`, that of the last change, are Unix seconds."""

    state: Literal["running", "done", "stopped", "failed"]
    started: float
    time: float
    step: int = 0
    last_checkpoint: str | None = None
    cause: str | None = None
    exit_code: int | None = None


@dataclass(frozen=True)
class RunFolder:
    """A run folder that this process, rank 0, holds locked until `close` or its own end."""

    path: Path
    _lock: int

    def write_config(self, text: str) -> None:
        """Replace config.toml by `text`."""
        _replace(self.path / CONFIG_FILE, text)

    def running(self, *, step: int, last_checkpoint: str | None) -> None:
        """Write into status.json how far the run is."""
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


def open_run_folder(path: Path, *, resume: bool, entries: Iterable[str]) -> RunFolder:
    """The run folder at `path`: made where missing, locked, its status "running".

    Without `resume`, what an earlier run left of `entries` (names within the folder), config.toml and status.json moves
    to previous/<its start time>/; files of other names stay where they are. Raises ConfigError if a live run holds the
    folder or if it cannot be one, StorageError if the disk fails.
    """
    with _explained(path):
        path.mkdir(parents=True, exist_ok=True)
        lock = _take_lock(path)
        if not resume:
            _move_to_previous(path, [*entries, CONFIG_FILE, STATUS_FILE])
    now = time.time()
    _write_status(path, Status("running", started=now, time=now))
    return RunFolder(path, lock)


def read_status(path: Path) -> Status | None:
    """The status on file in the run folder; None if there is none, or none of ours."""
    try:
        return Status(**json.loads((path / STATUS_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def report_failure(path: Path, *, cause: str, exit_code: int) -> None:
    """Write into status.json that the run failed, unless it says already how the run ended: the first cause stays.

    For any rank, once rank 0 has opened the folder. Before that, the status on file is that of another run.
    """
    _update_status(path, state="failed", cause=cause, exit_code=exit_code)


def find_outcome(status: Status | None, *, report: str, signalled: bool) -> tuple[str, int]:
    """(cause, exit code) of a run that did not finish, from its status, None if it ended before it opened its folder,
    and torchrun's `report`. `signalled`: it was asked to stop. A killed rank counts before what others made of it."""
    failures = FAILURE.findall(report)
    closed = set(CLOSED.findall(report))
    for rank, code, pid in failures:
        if int(code) < 0 and pid not in closed:
            return f"rank {rank} was killed by {signal.Signals(-int(code)).name}", RANK_LOST_EXIT_CODE
    if status is not None and status.exit_code is not None:
        return status.cause or status.state, status.exit_code
    if failures:
        rank, code, _ = failures[-1]
        return f"rank {rank} ended with exit code {code}", int(code)
    if signalled and status is None:
        return "stopped by a signal before the first step", STOPPED_EXIT_CODE
    if signalled:
        return "killed before it could stop at a step's end", RANK_LOST_EXIT_CODE
    return "torchrun failed", 1


def main() -> int:
    """The exit code of run_train.sh, after printing the cause, the run folder and the log folder."""
    parser = argparse.ArgumentParser(description="Tell what ended a run that did not finish.")
    parser.add_argument("path", type=Path, help="run folder")
    parser.add_argument("--log-dir", type=Path, required=True, help="folder of torchrun.log")
    parser.add_argument("--since", type=float, required=True, help="start of the run at the earliest, in Unix seconds")
    parser.add_argument("--signalled", action="store_true", help="the run was asked to stop")
    args = parser.parse_args()

    report = (args.log_dir / "torchrun.log").read_text(errors="replace")
    status = read_status(args.path)
    if status is not None and status.started < args.since:
        status = None
    cause, exit_code = find_outcome(status, report=report, signalled=args.signalled)
    if status is not None and status.exit_code != exit_code:
        with suppress(RunError):  # a full disk: what is printed below matters more
            failed = dataclasses.replace(status, state="failed", time=time.time(), cause=cause, exit_code=exit_code)
            _write_status(args.path, failed)
    elif status is None and exit_code == 1:
        print(*report.splitlines()[-20:], sep="\n", file=sys.stderr)
    print(f"exit code {exit_code}: {cause}\nrun folder: {args.path}\nlogs: {args.log_dir}", file=sys.stderr)
    return exit_code


def _update_status(path: Path, **changes: Any) -> None:
    """Change status.json, but not once it says how the run ended."""
    now = time.time()
    status = read_status(path) or Status("running", started=now, time=now)
    if status.state == "running":
        _write_status(path, dataclasses.replace(status, **changes, time=now))


def _write_status(path: Path, status: Status) -> None:
    _replace(path / STATUS_FILE, json.dumps(dataclasses.asdict(status), indent=1) + "\n")


def _replace(file: Path, text: str) -> None:
    """Write a whole file at once: a reader, or a crash, sees the old text or the new, never a part."""
    draft = file.with_name(f".{file.name}.{socket.gethostname()}.{os.getpid()}")
    with _explained(file.parent):
        with draft.open("w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(file)


def _take_lock(path: Path) -> int:
    """Descriptor of the locked file. The kernel frees the lock when the process ends, so no lock outlives its run."""
    lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(
            f'[job] dump_folder = "{path}" belongs to a live run: {(path / ".lock").read_text()}; '
            "wait for it or stop it, or name another folder."
        ) from None
    os.truncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()} since {_time_name(time.time())}".encode())
    return lock


def _move_to_previous(path: Path, entries: Iterable[str]) -> None:
    """Move what exists of `entries` to a new folder under previous/."""
    found = [entry for entry in entries if (path / entry).exists()]
    if not found:
        return
    status = read_status(path)
    name = _time_name(status.started) if status else "unknown-time"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    target = next(folder for name in names if not (folder := path / "previous" / name).exists())
    for entry in found:
        (target / entry).parent.mkdir(parents=True, exist_ok=True)
        (path / entry).rename(target / entry)


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
        raise (ConfigError if mendable else StorageError)(
            f'[job] dump_folder = "{path}" cannot be written: {error.filename or path}: {error.strerror}; '
            "make room or mend its permissions, or name another folder."
        ) from error


if __name__ == "__main__":
    sys.exit(main())
