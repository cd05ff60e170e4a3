"""Reading of token stores: ids from any place of the stream.

Files are read, not mapped into memory: if a file is truncated during a run, a read reports the end
of the file, while a memory map would kill the process with SIGBUS.
"""

import hashlib
import os
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np

from .manifest import (
    START_DTYPES,
    DamagedStoreError,
    StoreManifest,
    documents_file,
    read_manifest,
    tokens_file,
    wrong_sizes,
)

OPEN_SHARDS = 256
"""Shards that are open at a time; each takes a file descriptor."""
CHUNK_TOKENS = 2**20
COUNTED_CHUNKS = 64
HASHED_TOKENS = 2**29
"""The fingerprint hashes the stream in runs of so many ids, wherever shards are cut."""


class _OpenFile:
    """A file that is open until its last reference is gone: a thread may still read a file that
    the cache has dropped."""

    def __init__(self, path: Path) -> None:
        self.path, self.descriptor = path, os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class TokenStore:
    """The token store in a folder.

    The cost of opening and holding it grows with the number of shards only. Raises DataError for a
    folder that is no store, one of another format, and files of wrong sizes. Reading raises
    DataError for a file that was cut off or cannot be read, and for an id above the manifest's
    highest.
    """

    def __init__(self, folder: Path, manifest: StoreManifest | None = None) -> None:
        """`manifest` is that of a store that is still being written."""
        self.folder = folder
        self.manifest = manifest or read_manifest(folder)
        recipe = self.manifest.recipe
        for number, shard in enumerate(self.manifest.shards):
            for problem in wrong_sizes(folder, recipe, number, shard):
                raise self._damaged(problem)

        self.name = recipe.source
        self.tokens = self.manifest.tokens
        self.documents = self.manifest.documents
        self.vocab_size = recipe.vocab_size
        self.max_token_id = self.manifest.max_token_id
        self.fingerprint = self.manifest.fingerprint
        self.dtype = np.dtype(recipe.dtype)
        sizes = (shard.tokens for shard in self.manifest.shards)
        self.shard_starts = [0, *accumulate(sizes)]
        """Place in the stream of each shard's first id, and of the end."""
        self._shard = lru_cache(OPEN_SHARDS)(lambda shard: self._open(tokens_file(folder, shard)))
        if self.max_token_id >= self.vocab_size:
            raise self._damaged(
                f"its highest id is {self.max_token_id}, and its tokenizer has "
                f"{self.vocab_size} ids"
            )

    def _damaged(self, reason: str) -> DamagedStoreError:
        return DamagedStoreError(
            f"token store {self.folder} is damaged: {reason}; scripts/prepare_data.py verify "
            f"{self.folder} lists what is broken; copy the store again, or remove it and make it "
            "again"
        )

    def _open(self, path: Path) -> _OpenFile:
        try:
            return _OpenFile(path)
        except OSError as error:
            raise self._damaged(f"{path.name}: {error.strerror}") from error

    def _fill(self, numbers: np.ndarray, file: _OpenFile, place: int) -> None:
        """Fill `numbers` with those of a file from `place` on."""
        left, offset = numbers.data.cast("B"), place * numbers.itemsize
        while left:
            try:
                count = os.preadv(file.descriptor, [left], offset)
            except OSError as error:
                raise self._damaged(f"{file.path.name}: {error.strerror}") from error
            if not count:
                raise self._damaged(
                    f"{file.path.name} ends at byte {offset}; it was cut off while in use"
                )
            left, offset = left[count:], offset + count

    def _locate(self, place: int) -> tuple[int, int]:
        """Return the shard that holds a place of the stream, and the place in that shard."""
        shard = bisect_right(self.shard_starts, place) - 1
        return shard, place - self.shard_starts[shard]

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
                shard, place = self._locate(start)
                part = window[: self.shard_starts[shard + 1] - start]
                self._fill(part, self._shard(shard), place)
                window, start = window[len(part) :], start + len(part)

        if (highest := windows.max(initial=0)) > self.max_token_id:
            row, column = divmod(int(windows.argmax()), length)
            shard, place = self._locate(int(starts[row]) + column)
            raise self._damaged(
                f"{tokens_file(self.folder, shard).name}: id {highest} at place {place} is above "
                f"the highest one, {self.max_token_id}"
            )
        return windows

    def document_starts(self, shard: int) -> np.ndarray:
        """Return the places in a shard where documents begin, int64 [documents of the shard]."""
        dtype = START_DTYPES[self.manifest.recipe.format]
        starts = np.empty(self.manifest.shards[shard].documents, dtype)
        if len(starts):
            self._fill(starts, self._open(documents_file(self.folder, shard)), 0)
        return starts.astype(np.int64)

    def documents_between(self, start: int, stop: int) -> list[int]:
        """Return the places of the stream from `start` up to `stop` where documents begin."""
        first, last = self._locate(start)[0], self._locate(stop - 1)[0]
        return [
            place
            for shard in range(first, last + 1)
            for place in (self.shard_starts[shard] + self.document_starts(shard)).tolist()
            if start <= place < stop
        ]

    def token_counts(self) -> np.ndarray:
        """Count how often each id occurs, int64 [vocab_size].

        Of a larger store, COUNTED_CHUNKS evenly spaced chunks of CHUNK_TOKENS are counted.
        """
        counts = np.zeros(self.vocab_size, np.int64)
        chunks = range(0, self.tokens, CHUNK_TOKENS)
        for start in chunks[:: -(-len(chunks) // COUNTED_CHUNKS)]:
            ids = self.read(start, min(CHUNK_TOKENS, self.tokens - start))
            counts += np.bincount(ids, minlength=self.vocab_size)
        return counts

    def compute_fingerprint(self) -> str:
        """Hash all ids of the stream, on all cores. The result does not depend on the shards."""
        recipe = self.manifest.recipe
        digest = hashlib.sha256(f"{recipe.tokenizer_fingerprint} {recipe.dtype}".encode())
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for run in threads.map(self._hash_run, range(0, self.tokens, HASHED_TOKENS)):
                digest.update(run.encode())
        return digest.hexdigest()

    def _hash_run(self, start: int) -> str:
        stop = min(start + HASHED_TOKENS, self.tokens)
        digest = hashlib.sha256()
        for place in range(start, stop, CHUNK_TOKENS):
            digest.update(self.read(place, min(CHUNK_TOKENS, stop - place)).tobytes())
        return f" {stop - start} {digest.hexdigest()}"
