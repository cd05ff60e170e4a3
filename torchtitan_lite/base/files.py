"""Files and folders that survive a crash."""

import errno
import fcntl
import hashlib
import os
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from .errors import RunError

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a full disk or an exceeded quota."""
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors of a file that is missing. Others do not mean that it is damaged."""
NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})
"""Error numbers of flock on a file system without locks, as some mounts of Lustre and NFS are."""

READ_BYTES = 1 << 20


def is_remote(path: Path) -> bool:
    """Return whether `path`, of `open_path`, is a URL."""
    return not isinstance(path, Path)


@contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """Raise OSError with `path` and a reason for any error of the store that holds a URL: libraries
    of stores raise errors of their own, and OSErrors without a number."""
    try:
        yield
    except Exception as error:
        if not is_remote(path) or isinstance(error, RunError):
            raise
        kinds = ((FileNotFoundError, errno.ENOENT), (PermissionError, errno.EACCES))
        number = next((number for kind, number in kinds if isinstance(error, kind)), None)
        number = number or getattr(error, "errno", None) or errno.EIO
        reason = " ".join(str(error).split()) or type(error).__name__
        if number == errno.ENOENT:  # some libraries say the path alone
            reason = f"{os.strerror(number)}: {reason}"
        raise OSError(number, reason, str(path)) from error


def replace_file(path: Path, content: str | bytes) -> None:
    """Write `content` to a file atomically and durably: a crash leaves the old file or the new one,
    which is on disk when this returns. Raises OSError, leaving the old file."""
    if is_remote(path):
        with os_errors(path):
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return
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


def hash_file(path: Path, report: Callable[[int], object] = lambda size: None) -> str:
    """Return the SHA-256 of a file in hex. `report` gets the size of each block. Raises OSError."""
    digest = hashlib.sha256()
    with os_errors(path), path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            report(len(block))
    return digest.hexdigest()


def remove_folder(path: Path) -> None:
    """Delete a folder with its contents. If it is a symlink, delete only the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def lock_file(file: int | IO[str], operation: int) -> bool:
    """Apply `fcntl.flock` to an open file. Return False where the file system has no locks."""
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def fsync_folder(path: Path) -> None:
    """Flush a folder to disk: what was created, renamed or deleted in it survives a power cut."""
    if is_remote(path):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def storage_fix(error: OSError) -> str:
    """Return what to do about an error of a file or folder, by its number."""
    if error.errno in DISK_FULL:
        return "make room"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "fix its permissions"
    if "://" in str(error.filename):
        return "check the URL, the credentials and the network"
    return "check the path, its disk and the limits (ulimit -a)"


def allow_open_files() -> None:
    """Let this process open as many files as the system's limit for it is: stores of many shards
    and sockets to many ranks need more than the usual soft limit of 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems refuse their own limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def hash_sources(folder: Path) -> str:
    """Return the beginning of the SHA-256 of names and contents of all Python files in a folder, at
    any depth."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]
