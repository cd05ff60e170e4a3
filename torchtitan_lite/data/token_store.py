"""Token stores, opened: ids read from any place, and the data that a config names.

Files are read, not mapped into memory: if a file is truncated during a run, a read reports the end
of the file, and a memory map kills the process with SIGBUS.
"""

import hashlib
import os
from functools import lru_cache
from pathlib import Path

import numpy as np

from torchtitan_lite.data.manifest import (
    START_DTYPE,
    check_sizes,
    documents_file,
    is_store,
    read_manifest,
    tokens_file,
)
from torchtitan_lite.data.prepare import exclusive, lock_of, make_store
from torchtitan_lite.data.sources import HF_PREFIX, Source, build_source
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.errors import DataError, StorageError
from torchtitan_lite.files import DISK_FULL, remove_folder
from torchtitan_lite.logger import logger

OPEN_SHARDS = 256
"""Shards that are open at a time, each of which takes a file descriptor."""
CHUNK_TOKENS = 2**20
COUNTED_CHUNKS = 64


class _OpenFile:
    """A file that is open until its last reference is gone: a thread may read what the cache has
    dropped."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class TokenStore:
    """The store in a folder, ready to read from. What it costs to open and to hold grows with the
    number of shards only. `tokens` and `documents` are counts; `fingerprint` changes with any id.
    Raises DataError for a folder that is no store, or one of another version or whose files do not
    have their sizes.

    What reads raises DataError too, for a file that was cut off or cannot be read, and for an id
    above the highest that the manifest gives."""

    def __init__(self, folder: Path) -> None:
        self.manifest = read_manifest(folder)
        check_sizes(folder, self.manifest)
        recipe = self.manifest.recipe
        self.folder = folder
        self.name = recipe.source
        self.tokens = self.manifest.tokens
        self.documents = self.manifest.documents
        self.vocab_size = recipe.vocab_size
        self.max_token_id = self.manifest.max_token_id
        self.fingerprint = self.manifest.fingerprint
        self.dtype = np.dtype(recipe.dtype)
        self._shard_tokens = recipe.shard_tokens
        self._shard = lru_cache(OPEN_SHARDS)(lambda shard: self._open(tokens_file(folder, shard)))
        if self.max_token_id >= self.vocab_size:
            raise self._damaged(
                f"its highest id is {self.max_token_id}, and its tokenizer has {self.vocab_size} ids"
            )

    def _damaged(self, reason: str) -> DataError:
        return DataError(
            f"token store {self.folder} is damaged: {reason}; scripts/prepare_data.py verify {self.folder} lists what "
            "is broken; copy the store again, or remove it and make it again"
        )

    def _open(self, path: Path) -> _OpenFile:
        try:
            return _OpenFile(path, os.open(path, os.O_RDONLY))
        except OSError as error:
            raise self._damaged(f"{path.name}: {error.strerror}") from error

    def _fill(self, numbers: np.ndarray, file: _OpenFile, place: int) -> None:
        """Read `numbers`, as many as there are, from place `place` of a file on."""
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

    def read(self, start: int, count: int) -> np.ndarray:
        """The ids [count] from place `start` of the stream on, in the store's own type."""
        return self.windows(np.array([start]), count)[0]

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The `length` ids from each of `starts` on, in the store's own type, [len(starts),
        length]."""
        windows = np.empty((len(starts), length), self.dtype)
        for window, start in zip(windows, starts.tolist(), strict=True):
            assert 0 <= start <= start + length <= self.tokens, (
                f"no {length} tokens at {start} of {self.tokens}"
            )
            shard, place = divmod(start, self._shard_tokens)
            while len(window):
                part = window[: self._shard_tokens - place]
                self._fill(part, self._shard(shard), place)
                window, shard, place = window[len(part) :], shard + 1, 0
        if (highest := windows.max(initial=0)) > self.max_token_id:
            row, column = divmod(int(windows.argmax()), length)
            shard, place = divmod(int(starts[row]) + column, self._shard_tokens)
            raise self._damaged(
                f"{tokens_file(self.folder, shard).name}: id {highest} at place {place} is above the highest one, "
                f"{self.max_token_id}"
            )
        return windows

    def document_starts(self, shard: int) -> np.ndarray:
        """Where in a shard its documents begin, uint32 [documents of the shard]."""
        starts = np.empty(self.manifest.shards[shard].documents, START_DTYPE)
        if len(starts):
            self._fill(starts, self._open(documents_file(self.folder, shard)), 0)
        return starts

    def documents_between(self, start: int, stop: int) -> list[int]:
        """The places of the stream from `start` up to `stop` at which a document begins."""
        size = self._shard_tokens
        return [
            shard * size + begin
            for shard in range(start // size, -(-stop // size))
            for begin in self.document_starts(shard).tolist()
            if start <= shard * size + begin < stop
        ]

    def token_counts(self) -> np.ndarray:
        """How often each id occurs, int64 [vocab_size]; in a larger store, in COUNTED_CHUNKS chunks
        of CHUNK_TOKENS, evenly spaced."""
        counts = np.zeros(self.vocab_size, np.int64)
        chunks = range(0, self.tokens, CHUNK_TOKENS)
        for start in chunks[:: -(-len(chunks) // COUNTED_CHUNKS)]:
            ids = self.read(start, min(CHUNK_TOKENS, self.tokens - start))
            counts += np.bincount(ids, minlength=self.vocab_size)
        return counts


def open_data(
    path: str | None, *, text_field: str, tokenizer: Tokenizer, setting: str
) -> TokenStore:
    """The tokens at `path`: a token store, or text, of pystdlib if None, whose tokens are made
    where they are not in the cache yet. `setting` leads every message. Raises DataError for a path
    that is neither, and for a store of another tokenizer, and StorageError if the cache's disk is
    full."""
    try:
        if path is not None and is_store(folder := Path(path).expanduser()):
            store = TokenStore(folder)
            _check_tokenizer(store, tokenizer)
            return store
        if path is not None and path.startswith(HF_PREFIX):
            raise DataError(
                f"training reads no Hugging Face dataset; make a store of it: scripts/prepare_data.py make {path} STORE"
            )
        return open_cached(build_source(path, text_field=text_field), tokenizer)
    except (DataError, StorageError) as error:
        raise type(error)(f"{setting}: {error}") from error


def _check_tokenizer(store: TokenStore, tokenizer: Tokenizer) -> None:
    recipe = store.manifest.recipe
    if (recipe.tokenizer_fingerprint, recipe.vocab_size) != (
        tokenizer.fingerprint,
        tokenizer.vocab_size,
    ):
        raise DataError(
            f"token store {store.folder} was made with tokenizer {recipe.tokenizer} ({recipe.vocab_size} ids, "
            f"fingerprint {recipe.tokenizer_fingerprint[:12]}), and [model] tokenizer_path names {tokenizer.name} "
            f"({tokenizer.vocab_size} ids, {tokenizer.fingerprint[:12]}); name the tokenizer that it was made with"
        )


def open_cached(
    source: Source, tokenizer: Tokenizer, *, cache_dir: Path | None = None
) -> TokenStore:
    """The tokens of a source, from the cache. The first process to ask makes them while the others
    wait, each machine or shared file system once; a damaged store is made anew. `cache_dir` is
    `torchtitan_lite/tokens` in $XDG_CACHE_HOME or ~/.cache if not given. Raises StorageError if its
    disk is full, DataError if it cannot be written otherwise."""
    key = hashlib.sha256(f"{source.fingerprint} {tokenizer.fingerprint}".encode()).hexdigest()[:16]
    folder = (cache_dir or _user_cache()) / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(lock_of(folder)):
            if (store := _opened(folder)) is None:
                make_store(folder, source, tokenizer)
                store = TokenStore(folder)
        return store
    except OSError as error:
        raise (StorageError if error.errno in DISK_FULL else DataError)(
            f"token cache {folder.parent} cannot be written: {error.strerror}; "
            "set XDG_CACHE_HOME to a writable folder with room for 2 to 4 bytes a token"
        ) from error


def _user_cache() -> Path:
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        / "torchtitan_lite"
        / "tokens"
    )


def _opened(folder: Path) -> TokenStore | None:
    """The store in a folder, None if there is none. A damaged one is removed."""
    if not folder.exists():
        return None
    try:
        return TokenStore(folder)
    except DataError as error:
        logger.warning("%s", error)
        remove_folder(folder)
        return None
