"""Paths as users write them: ~ is a home, and scheme://... an fsspec URL of an object store.

A URL gets pathlib's methods from universal_pathlib. It differs from a folder in what an object
store can do: no links, no locks, no rename but copy and delete. An object is there once all of it
has arrived.
"""

import fcntl
import hashlib
import os
import shutil
from glob import has_magic
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .files import is_remote, lock_file, os_errors
from .logger import logger


def expand_user(path: str, *, what: str = "") -> str:
    """Return `path` with ~ or ~user at its start replaced by that user's home. Raises ConfigError,
    which begins with `what`, if the home is not known."""
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError as error:
        home = path.partition("/")[0]
        fix = "write the path in full"
        raise ConfigError(f"{what}the folder {home} is not known; {fix}") from error


def check_url(text: str) -> str:
    """Return `text`. Raises ConfigError if it is a URL without a bucket, or with a pattern: fsspec
    deletes whatever a pattern matches."""
    is_url = "://" in _without_scheme(text)
    if is_url and (has_magic(text) or ":" in (text[0], text.rstrip("/")[-1])):
        rule = "must name a bucket, and may not have *, ? or [, which stand for other names in it"
        raise ConfigError(f"{text} {rule}")
    return text


def open_path(text: str) -> Any:
    """Return the Path of `text`, or the UPath of a URL. Raises ConfigError for a URL without a
    bucket, with a pattern, or of a scheme that is unknown or whose package is missing."""
    text = _without_scheme(check_url(text))
    if "://" not in text:
        return Path(text)
    try:
        from upath import UPath  # of the [remote] extra

        # Other ranks and other runs write into the same folder, so that a kept list may be old.
        path = UPath(text, use_listings_cache=False)
        path.fs  # noqa: B018  # imports the package of the scheme
    except Exception as error:  # of the package of the scheme
        fix = 'pip install "torchtitan-lite[remote]", and gcsfs, adlfs, ... for others than s3://'
        raise ConfigError(f"{text}: {error}; {fix}") from error
    return path


def _without_scheme(text: str) -> str:
    """Return a path without the scheme of local files."""
    return text.removeprefix("file://").removeprefix("local://")


def listed_sizes(folder: Any) -> dict[str, int]:
    """Return the size in bytes of each file in the folder at a URL by its name, from one listing.
    Raises OSError."""
    with os_errors(folder):
        found = folder.fs.find(folder.path, detail=True)
    return {name.rpartition("/")[2]: int(detail["size"]) for name, detail in found.items()}


def cache_folder(kind: str) -> Path:
    """Return the folder `kind` of this project in $XDG_CACHE_HOME. Raises ConfigError."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = expand_user(home, what=f"the cache $XDG_CACHE_HOME = {home}: ")
    return Path(home) / "torchtitan_lite" / kind


def fetch(path: Any) -> Path:
    """Return `path`; for a URL, the cached copy of its file or folder. The first process of a host
    makes the copy while the others wait. Raises OSError, ConfigError."""
    if not is_remote(path):
        return path
    with os_errors(path):
        found = path.fs.find(path.path, detail=True)
        if not found or ".." in "/".join(found).split("/"):  # which would leave the copy
            raise FileNotFoundError("there is no object of that name, or one's name has ..")
        # Sizes, times and tags, so that changed contents are copied again.
        key = hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:16]
        copy = cache_folder("fetched") / key / path.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        with copy.with_name(".lock").open("a") as lock:
            lock_file(lock, fcntl.LOCK_EX)
            if not copy.exists():
                logger.info(f"copying {path} to {copy}")
                draft = copy.with_name(f".{copy.name}.partial")
                shutil.rmtree(draft, ignore_errors=True)
                path.fs.get(path.path, str(draft), recursive=True)
                draft.rename(copy)
    return copy
