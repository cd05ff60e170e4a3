"""Token stores: their format on disk, their manifest, and reading of their ids.

A store is a folder of shards. `tokens-00000.bin`, `tokens-00001.bin`, ... hold one stream of
little-endian token ids: BOS, text, EOS of every document; if BOS is EOS, only BOS and text.
In format 3 a shard is a chunk of the source; in format 2, which is still read, it is 2^29 ids.

Files are read, not mapped into memory: the process would be killed if a mapped file were truncated.
"""

import os
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import ConfigDict, TypeAdapter

from torchtitan_lite.base.errors import DataError, StorageError
from torchtitan_lite.base.files import ABSENT, hash_file, storage_fix
from torchtitan_lite.base.jsonfile import (
    Count,
    read_json_object,
    regular_size,
    validate_hashed_json,
)
from torchtitan_lite.base.progress import progress

MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 2**28
"""Enough for a million shards, or 64 TiB of text."""


def tokens_file(shard: int) -> str:
    """Return the name of the file with a shard's ids."""
    return f"tokens-{shard:05d}.bin"


@dataclass(frozen=True)
class StoreRecipe:
    """What a store is made from. Names and the format do not take part in a comparison."""

    format: Literal[2, 3] = field(compare=False)
    source: str = field(compare=False)
    source_fingerprint: str
    tokenizer: str = field(compare=False)
    tokenizer_fingerprint: str
    vocab_size: Count
    bos_id: Count
    eos_id: Count
    dtype: Literal["<u2", "<u4"]
    one_separator: bool = False
    """BOS is EOS, and stands once between documents; in earlier stores such an id stands twice."""


@dataclass(frozen=True)
class Shard:
    """Content of a shard, and the sha256 of its file."""

    tokens: Count
    documents: Count
    tokens_sha256: str


@dataclass(frozen=True)
class StoreManifest:
    """Content of a store."""

    # Earlier versions had more fields.
    __pydantic_config__ = ConfigDict(strict=True, extra="ignore")

    recipe: StoreRecipe
    max_token_id: Count
    skipped_rows: Count
    fingerprint: str
    """Changes with any id of the stream, and with nothing else; "" if more shards are to come."""
    shards: tuple[Shard, ...]

    @property
    def tokens(self) -> int:
        """Number of ids in all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Number of documents in all shards."""
        return sum(shard.documents for shard in self.shards)

    def __str__(self) -> str:
        return f"{self.documents:,} documents, {self.tokens:,} tokens"


_SCHEMA = TypeAdapter(StoreManifest)


def is_store(path: Path) -> bool:
    """Return whether a path is a folder with a manifest, or with something in its place."""
    return os.path.lexists(path / MANIFEST_FILE)


def read_manifest(folder: Path) -> StoreManifest:
    """Read a store's manifest. Raises DataError if it is missing, damaged or of another format."""
    if not folder.is_dir():
        raise DataError(f"token store {folder.absolute()} is missing; name the folder of a store")
    try:
        fields = read_json_object(folder / MANIFEST_FILE, max_bytes=MAX_MANIFEST_BYTES)
        manifest = validate_hashed_json(fields, _SCHEMA, drop=set())
        highest, ids = manifest.max_token_id, manifest.recipe.vocab_size
        if not highest < ids <= 2 ** (8 * np.dtype(manifest.recipe.dtype).itemsize):
            kind = manifest.recipe.dtype
            raise ValueError(f"its highest id is {highest}, of {ids} ids in type {kind!r}")
        return manifest
    except (*ABSENT, ValueError) as error:
        raise unusable(folder, f"{MANIFEST_FILE}: {error}") from error


def find_damage(folder: Path, manifest: StoreManifest, *, read: bool = False) -> list[str]:
    """List the files of a store that have wrong sizes; `read` them to find changed contents too."""
    problems, id_size = [], np.dtype(manifest.recipe.dtype).itemsize
    with progress(f"verifying {folder}", manifest.tokens * id_size, shown=read) as bar:
        for number, shard in enumerate(manifest.shards):
            name, size = tokens_file(number), shard.tokens * id_size
            try:
                if (found := regular_size(folder / name)) != size:
                    problems.append(f"{name} has {found} bytes, not {size}")
                elif read and hash_file(folder / name, bar.update) != shard.tokens_sha256:
                    problems.append(f"{name}: its contents have changed")
            except ValueError as error:
                problems.append(f"{name} {error}")
            except ABSENT as error:
                problems.append(f"{name}: {error.strerror}")
    return problems


def unusable(folder: Path, reason: str) -> DataError:
    """Return the error for a store that is broken, or of another format."""
    return DataError(
        f"token store {folder}: {reason}; torchtitan-lite data verify lists what is broken; copy "
        "it again, or make it again in another folder: torchtitan-lite data make"
    )


class TokenStore:
    """The token store in a folder. Raises DataError for one that is unfinished or broken. A read
    raises it for a file that was cut off or an id above the highest, and StorageError for a file
    that the system cannot read."""

    def __init__(self, folder: Path, manifest: StoreManifest | None = None) -> None:
        """`manifest` describes a store that is still being written."""
        if manifest is None:
            manifest = read_manifest(folder)
            if not manifest.fingerprint:
                fix = "run torchtitan-lite data make again"
                raise DataError(f"token store {folder} is unfinished; {fix}")
        self.folder, self.manifest = folder, manifest
        for problem in find_damage(folder, manifest):
            raise unusable(folder, problem)

        self.max_token_id = manifest.max_token_id
        self.fingerprint = manifest.fingerprint
        self.dtype = np.dtype(manifest.recipe.dtype)
        self.shard_starts = [0, *accumulate(shard.tokens for shard in manifest.shards)]
        """Place in the stream of each shard's first id, and of the end."""
        self.tokens = self.shard_starts[-1]

    def read(self, start: int, count: int) -> np.ndarray:
        """Return the ids [count] from place `start` of the stream on, in the store's own type."""
        return self.windows(np.array([start]), count)[0]

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return the ids [len(starts), length] from each of `starts` on, in the store's type."""
        windows = np.empty((len(starts), length), self.dtype)
        for window, start in zip(windows, starts.tolist(), strict=True):
            assert 0 <= start <= start + length <= self.tokens, (
                f"no {length} tokens at {start} of {self.tokens}"
            )
            while len(window):
                shard = bisect_right(self.shard_starts, start) - 1
                part = window[: self.shard_starts[shard + 1] - start]
                self._fill(part, shard, start - self.shard_starts[shard])
                window, start = window[len(part) :], start + len(part)
        return windows

    def _fill(self, ids: np.ndarray, shard: int, place: int) -> None:
        """Fill `ids` with those of a shard from `place` on."""
        name = tokens_file(shard)
        try:
            offset = place * ids.itemsize
            found = np.fromfile(self.folder / name, ids.dtype, len(ids), offset=offset)
        except ABSENT as error:
            raise unusable(self.folder, f"{name}: {error.strerror}") from error
        except OSError as error:
            problem = f"token store {self.folder}: {name} cannot be read: {error.strerror}"
            raise StorageError(f"{problem}; {storage_fix(error)}") from error
        if len(found) < len(ids):
            reason = f"{name} ends at place {place + len(found)}; it was cut off"
            raise unusable(self.folder, reason)
        if (highest := found.max()) > self.max_token_id:
            reason = f"id {highest} at place {place + int(found.argmax())} is above the highest one"
            raise unusable(self.folder, f"{name}: {reason}, {self.max_token_id}")
        ids[:] = found
