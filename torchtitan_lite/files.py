"""Files and folders that survive a crash. Imports only the standard library."""

import errno
import hashlib
import os
import shutil
import socket
from functools import cache
from pathlib import Path

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a full disk or an exceeded quota."""


def replace_file(path: Path, content: str | bytes) -> None:
    """Write `content` to a file atomically and durably.

    Readers find the old file or the new one, never a part of it, also after a crash. The new one is
    on disk when this returns. Raises OSError, leaving the old file."""
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
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


def remove_folder(path: Path) -> None:
    """Delete a folder with its contents. If it is a symlink, delete only the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def fsync_folder(path: Path) -> None:
    """Flush a folder to disk, so that files created, renamed or deleted in it stay so after a power
    cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def usable_cores() -> set[int]:
    """Return the CPU cores that this process may use."""
    if not hasattr(os, "sched_getaffinity"):  # not on Linux
        return set(range(os.cpu_count() or 1))
    return os.sched_getaffinity(0)


@cache
def own_sources() -> str:
    """Return the beginning of the hash of this package's sources, as they are at the first call."""
    return hash_sources(Path(__file__).parent)[:16]


def hash_sources(folder: Path) -> str:
    """Return the SHA-256 of names and contents of all Python files in a folder, at any depth."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
