"""The status of a run, as it stands in status.json: whose the folder is, and how the run ended."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from torchtitan_lite.base.errors import WRONG_PATH, ConfigError, StorageError
from torchtitan_lite.base.files import DISK_FULL, replace_file, storage_fix
from torchtitan_lite.base.jsonfile import Count, read_regular, strict_json

STATUS_FILE = "status.json"


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
        broken = error.errno not in WRONG_PATH
        raise (StorageError if broken else ConfigError)(
            f'[job] dump_folder = "{path}" cannot be written: {error.filename or path}: '
            f"{error.strerror}; {storage_fix(error)}, or name another folder."
        ) from error
