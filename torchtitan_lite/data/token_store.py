"""Token stores: their format on disk, their manifest, and reading of their ids.

A store is a folder of shards. `tokens-00000.bin`, `tokens-00001.bin`, ... hold one stream of token
ids: BOS, text, EOS of every document; if BOS is EOS, only BOS and text. `documents-00000.bin`, ...
hold the places in their shard at which documents begin. All numbers are little endian.
In format 3 a shard is a chunk of the source; in format 2, which is still read, it is 2^29 ids.

Files are read, not mapped into memory: the process would be killed if a mapped file were truncated.
"""

import hashlib
import os
from bisect import bisect_right
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import TypeAdapter

from torchtitan_lite.base.errors import DataError, StorageError
from torchtitan_lite.base.files import ABSENT, storage_fix
from torchtitan_lite.base.jsonfile import (
    STRICT,
    Count,
    read_json_object,
    regular_size,
    validate_hashed_json,
    write_hashed_json,
)

FORMAT = 3
START_DTYPES: dict[int, np.dtype] = {2: np.dtype("<u4"), 3: np.dtype("<i8")}
"""Type of the numbers in documents files, by format."""
MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 2**28
"""Enough for a million shards, or 64 TiB of text."""
READ_BYTES = 2**23
CHUNK_TOKENS = 2**20
HASHED_TOKENS = 2**29
"""The fingerprint hashes the stream in runs of so many ids, wherever shards are cut."""


def tokens_file(shard: int) -> str:
    """Return the name of the file with a shard's ids."""
    return f"tokens-{shard:05d}.bin"


def documents_file(shard: int) -> str:
    """Return the name of the file with the places in a shard at which documents begin."""
    return f"documents-{shard:05d}.bin"


@dataclass(frozen=True)
class StoreRecipe:
    """What a store is made from. Names and the format do not take part in a comparison."""

    format: int = field(compare=False)
    source: str = field(compare=False)
    source_fingerprint: str
    tokenizer: str = field(compare=False)
    tokenizer_fingerprint: str
    vocab_size: Count
    bos_id: Count
    eos_id: Count
    dtype: Literal["<u2", "<u4"]
    shard_tokens: Count | None = field(default=None, compare=False)
    """Ids of each shard but the last one; only in format 2."""
    one_separator: bool = False
    """BOS is EOS, and stands once between documents; in earlier stores such an id stands twice."""


@dataclass(frozen=True)
class Shard:
    """Sizes and sha256 of a shard's two files."""

    tokens: Count
    documents: Count
    tokens_sha256: str
    documents_sha256: str


@dataclass(frozen=True)
class StoreManifest:
    """Content of a store."""

    __pydantic_config__ = STRICT

    recipe: StoreRecipe
    tokens: Count
    documents: Count
    max_token_id: Count
    skipped_rows: Count
    fingerprint: str
    """Changes with any id of the stream, and with nothing else."""
    shards: tuple[Shard, ...]

    def files(self) -> dict[str, tuple[int, str]]:
        """Return the size in bytes and the sha256 of each file of the shards, by name."""
        ids, starts = np.dtype(self.recipe.dtype), START_DTYPES[self.recipe.format]
        files = {}
        for number, shard in enumerate(self.shards):
            size = shard.tokens * ids.itemsize
            files[tokens_file(number)] = (size, shard.tokens_sha256)
            size = shard.documents * starts.itemsize
            files[documents_file(number)] = (size, shard.documents_sha256)
        return files


_SCHEMA = TypeAdapter(StoreManifest)


def is_store(path: Path) -> bool:
    """Return whether a path is a folder with a manifest, or with something in its place."""
    return os.path.lexists(path / MANIFEST_FILE)


def write_manifest(path: Path, manifest: StoreManifest) -> None:
    """Write a manifest, with a hash of all its fields, in one step."""
    write_hashed_json(path, asdict(manifest))


def read_manifest(folder: Path, name: str = MANIFEST_FILE) -> StoreManifest:
    """Read a store's manifest. Raises DataError if it is missing, damaged or of another format."""
    if not folder.is_dir():
        raise DataError(f"token store {folder.absolute()} is missing; name the folder of a store")
    try:
        fields = read_json_object(folder / name, max_bytes=MAX_MANIFEST_BYTES)
        recipe = fields.get("recipe")
        version = recipe.get("format") if isinstance(recipe, dict) else FORMAT
        if version not in tuple(START_DTYPES):
            formats = " and ".join(map(str, START_DTYPES))
            raise ValueError(f"its format is {version}, this version reads {formats}")
        manifest = validate_hashed_json(fields, _SCHEMA, drop=set())
        highest, ids = manifest.max_token_id, manifest.recipe.vocab_size
        if not highest < ids <= 2 ** (8 * np.dtype(manifest.recipe.dtype).itemsize):
            kind = manifest.recipe.dtype
            raise ValueError(f"its highest id is {highest}, of {ids} ids in type {kind!r}")
        return manifest
    except (*ABSENT, ValueError) as error:
        raise unusable(folder, f"{name}: {error}") from error


def wrong_sizes(folder: Path, manifest: StoreManifest) -> dict[str, str]:
    """Return what is wrong with the sizes of a store's files, by name."""
    problems = {}
    for name, (size, _) in manifest.files().items():
        try:
            if (found := regular_size(folder / name)) != size:
                problems[name] = f"{name} has {found} bytes, not {size}"
        except ValueError as error:
            problems[name] = f"{name} {error}"
        except ABSENT as error:
            problems[name] = f"{name}: {error.strerror}"
    return problems


def unusable(folder: Path, reason: str) -> DataError:
    """Return the error for a store that is broken, or of another format."""
    return DataError(
        f"token store {folder}: {reason}; torchtitan-lite data verify lists what is broken; copy "
        "it again, or make it again in another folder: torchtitan-lite data make"
    )


def verify_store(folder: Path) -> list[str]:
    """Read a whole store, and list what is wrong with it. Raises DataError for its manifest."""
    manifest = read_manifest(folder)
    problems = wrong_sizes(folder, manifest)
    for name, (_, sha256) in manifest.files().items():
        if name not in problems and hash_file(folder / name) != sha256:
            problems[name] = f"{name}: its contents have changed"
    return list(problems.values())


def hash_file(path: Path) -> str:
    """Return the SHA-256 of the contents of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


class TokenStore:
    """The token store in a folder.

    Raises DataError for a folder that is no store, one of another format, and files of wrong
    sizes; a read raises it for a file that was cut off, and for an id above the highest,
    StorageError for a file that the system cannot read."""

    def __init__(self, folder: Path, manifest: StoreManifest | None = None) -> None:
        """`manifest` describes a store that is still being written."""
        self.folder = folder
        self.manifest = manifest = manifest or read_manifest(folder)
        for problem in wrong_sizes(folder, manifest).values():
            raise unusable(folder, problem)

        self.documents = sum(shard.documents for shard in manifest.shards)
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
            raise unusable(
                self.folder, f"{name} ends at place {place + len(found)}; it was cut off"
            )
        if (highest := found.max()) > self.max_token_id:
            reason = f"id {highest} at place {place + int(found.argmax())} is above the highest one"
            raise unusable(self.folder, f"{name}: {reason}, {self.max_token_id}")
        ids[:] = found

    def compute_fingerprint(self) -> str:
        """Hash all ids of the stream. The result does not depend on the shards."""
        recipe = self.manifest.recipe
        digest = hashlib.sha256(f"{recipe.tokenizer_fingerprint} {recipe.dtype}".encode())
        for start in range(0, self.tokens, HASHED_TOKENS):
            stop = min(start + HASHED_TOKENS, self.tokens)
            run = hashlib.sha256()
            for place in range(start, stop, CHUNK_TOKENS):
                run.update(self.read(place, min(CHUNK_TOKENS, stop - place)).data)
            digest.update(f" {stop - start} {run.hexdigest()}".encode())
        return digest.hexdigest()
