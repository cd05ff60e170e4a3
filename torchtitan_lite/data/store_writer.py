"""Shards, written: documents appended to the files of a store that is being made, and what survives
a crash of it."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from torchtitan_lite.data.manifest import (
    START_DTYPE,
    Manifest,
    Recipe,
    Shard,
    documents_file,
    fingerprint_of,
    tokens_file,
)
from torchtitan_lite.data.rows import START, Position
from torchtitan_lite.errors import DataError
from torchtitan_lite.files import replace_file

PROGRESS_FILE = "progress.json"


@dataclass(frozen=True)
class Progress:
    """How far an unfinished store is: what counts of its files, and where in the source to read
    on."""

    recipe: Recipe
    position: Position = START
    tokens: int = 0
    documents: int = 0
    max_token_id: int = 0
    skipped_rows: int = 0
    shards: tuple[Shard, ...] = ()
    """Those that are full."""


def write_progress(folder: Path, progress: Progress) -> None:
    """Put the progress of an unfinished store into its folder. Raises OSError if the disk fails."""
    replace_file(folder / PROGRESS_FILE, json.dumps(asdict(progress), indent=1))


class StoreWriter:
    """Appends documents to the shards in `folder`, from where `progress` says on; what the files
    hold beyond that is cut off. A context manager, which closes the files."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.progress = progress
        self.dtype = np.dtype(progress.recipe.dtype)
        self.folder = folder
        self._shard_tokens = progress.recipe.shard_tokens
        self._open_shard(
            tokens=progress.tokens - sum(shard.tokens for shard in progress.shards),
            documents=progress.documents - sum(shard.documents for shard in progress.shards),
        )

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        for part in self._parts:
            part.file.close()

    def append(
        self, ids: np.ndarray, lengths: np.ndarray, *, skipped: int, position: Position
    ) -> None:
        """Add the documents of a batch, after `skipped` rows of which reading goes on at
        `position`."""
        start = self.progress.tokens
        starts = start + np.cumsum(lengths) - lengths  # of the documents, in the whole stream
        written = 0
        while written < len(ids):
            if self._tokens.count == self._shard_tokens:
                self._close_shard()
                self._open_shard(tokens=0, documents=0)
            begin = len(self.progress.shards) * self._shard_tokens + self._tokens.count
            part = ids[written : written + self._shard_tokens - self._tokens.count]
            here = starts[(starts >= begin) & (starts < begin + len(part))]
            self._documents.write((here - begin + self._tokens.count).astype(START_DTYPE))
            self._tokens.write(part)
            written += len(part)
        self.progress = replace(
            self.progress,
            position=position,
            tokens=start + len(ids),
            documents=self.progress.documents + len(lengths),
            max_token_id=max(self.progress.max_token_id, int(ids.max(initial=0))),
            skipped_rows=self.progress.skipped_rows + skipped,
        )

    def commit(self) -> None:
        """Have all that was appended on disk, and go on from here after a crash."""
        for part in self._parts:
            part.sync()
        write_progress(self.folder, self.progress)

    def finish(self) -> Manifest:
        """The manifest of all that was appended, which is on disk then."""
        if self._tokens.count:
            self._close_shard()
        progress = self.progress
        return Manifest(
            recipe=progress.recipe,
            tokens=progress.tokens,
            documents=progress.documents,
            max_token_id=progress.max_token_id,
            skipped_rows=progress.skipped_rows,
            fingerprint=fingerprint_of(progress.recipe, progress.shards),
            shards=progress.shards,
        )

    def _open_shard(self, *, tokens: int, documents: int) -> None:
        """Go on in the shard after the full ones, which has so many of each so far."""
        shard = len(self.progress.shards)
        self._tokens = _ShardFile(tokens_file(self.folder, shard), self.dtype, count=tokens)
        self._documents = _ShardFile(
            documents_file(self.folder, shard), START_DTYPE, count=documents
        )
        self._parts = (self._tokens, self._documents)

    def _close_shard(self) -> None:
        for part in self._parts:
            part.sync()
            part.file.close()
        shard = Shard(
            tokens=self._tokens.count,
            documents=self._documents.count,
            tokens_sha256=self._tokens.sha256,
            documents_sha256=self._documents.sha256,
        )
        self.progress = replace(self.progress, shards=(*self.progress.shards, shard))


class _ShardFile:
    """A file of numbers that is appended to, from its first `count` on, and hashed on the way."""

    def __init__(self, path: Path, dtype: np.dtype, *, count: int) -> None:
        self.count = count
        self._digest = hashlib.sha256()
        path.touch()
        size = count * dtype.itemsize
        if path.stat().st_size < size:
            raise DataError(
                f"{path.parent}: {path.name} has less than {size} bytes; remove it, to start anew"
            )
        os.truncate(path, size)
        self.file: IO[Any] = path.open("r+b")
        while chunk := self.file.read(2**24):
            self._digest.update(chunk)

    def write(self, numbers: np.ndarray) -> None:
        """Append."""
        data = numbers.tobytes()
        self.file.write(data)
        self._digest.update(data)
        self.count += len(numbers)

    def sync(self) -> None:
        """Have the file on disk."""
        self.file.flush()
        os.fsync(self.file.fileno())

    @property
    def sha256(self) -> str:
        """Of all that is in the file."""
        return self._digest.hexdigest()
