"""Files that survive a crash whole, and folders removed: standard library only."""

import errno
import hashlib
import os
import shutil
import socket
from pathlib import Path

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a disk or a quota without room."""


def replace_file(path: Path, content: str | bytes) -> None:
    """Put `content` into a file at once: a reader, a crash or another process finds the old file or
    the new one, never a part. It is on disk, under its name, when this returns; where it fails
    nothing is left of it."""
    draft = draft_of(path)
    try:
        with draft.open("wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def draft_of(path: Path) -> Path:
    """Where `replace_file` of this process writes before it renames: `.NAME.HOST.PID`, beside the
    file."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")


def remove_folder(path: Path) -> None:
    """Delete a folder and all in it; of a link to a folder, delete the link alone."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def fsync_folder(path: Path) -> None:
    """Put the names in a folder on disk: what was made, renamed or deleted in it stays so after a
    power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def usable_cores() -> int:
    """Return the number of CPUs that this process may use."""
    if not hasattr(os, "sched_getaffinity"):  # not on Linux
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def hash_sources(folder: Path) -> str:
    """SHA-256 of the names and contents of all Python files in a folder and below, in hex."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
