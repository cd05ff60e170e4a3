"""Token stores, opened: memory-mapped ids of any number, and the data that a config names."""

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
from torchtitan_lite.errors import DataError
from torchtitan_lite.files import remove_folder
from torchtitan_lite.logger import logger

MAPPED_SHARDS = 256
"""Shards that are mapped at a time, each of which takes a file descriptor."""
CHUNK_TOKENS = 2**20
COUNTED_CHUNKS = 64


class TokenStore:
    """The store in a folder, ready to read from. What it costs to open and to hold grows with the number of shards
    only. `tokens` and `documents` are counts; `fingerprint` changes with any id. Raises DataError for a folder that is
    no store, or one of another version or whose files do not have their sizes."""

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
        self._shard = lru_cache(MAPPED_SHARDS)(self._map)

    def _map(self, shard: int) -> np.ndarray:
        # As a plain array: slicing the memmap class itself takes several times as long.
        return np.asarray(np.memmap(tokens_file(self.folder, shard), self.dtype, "r"))

    def read(self, start: int, count: int) -> np.ndarray:
        """The ids [count] from place `start` of the stream on, in the store's own type; a view where one shard has
        them all."""
        assert 0 <= start <= start + count <= self.tokens, f"no {count} tokens at {start} of {self.tokens}"
        shard, place = divmod(start, self._shard_tokens)
        if place + count <= self._shard_tokens:
            return self._shard(shard)[place : place + count]
        parts = []
        while count:
            parts.append(self._shard(shard)[place : place + count])
            count -= len(parts[-1])
            shard, place = shard + 1, 0
        return np.concatenate(parts)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The `length` ids from each of `starts` on, in the store's own type, [len(starts), length]."""
        windows = np.empty((len(starts), length), self.dtype)
        for window, start in zip(windows, starts.tolist(), strict=True):
            window[:] = self.read(start, length)
        return windows

    def document_starts(self, shard: int) -> np.ndarray:
        """Where in a shard its documents begin, uint32 [documents of the shard]."""
        if not self.manifest.shards[shard].documents:
            return np.empty(0, START_DTYPE)
        return np.memmap(documents_file(self.folder, shard), START_DTYPE, "r")

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
        """How often each id occurs, int64 [vocab_size]; in a larger store, in COUNTED_CHUNKS chunks of CHUNK_TOKENS,
        evenly spaced."""
        counts = np.zeros(self.vocab_size, np.int64)
        chunks = range(0, self.tokens, CHUNK_TOKENS)
        for start in chunks[:: -(-len(chunks) // COUNTED_CHUNKS)]:
            ids = self.read(start, min(CHUNK_TOKENS, self.tokens - start))
            counts += np.bincount(ids, minlength=self.vocab_size)
        return counts


def open_data(path: str | None, *, text_field: str, tokenizer: Tokenizer, setting: str) -> TokenStore:
    """The tokens at `path`: a token store, or text, of pystdlib if None, whose tokens are made where they are not in
    the cache yet. `setting` leads every message. Raises DataError for a path that is neither, and for a store of
    another tokenizer."""
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
    except DataError as error:
        raise DataError(f"{setting}: {error}") from error


def _check_tokenizer(store: TokenStore, tokenizer: Tokenizer) -> None:
    recipe = store.manifest.recipe
    if recipe.tokenizer_fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"token store {store.folder} was made with tokenizer {recipe.tokenizer} ({recipe.vocab_size} ids, "
            f"fingerprint {recipe.tokenizer_fingerprint[:12]}), and [model] tokenizer_path names {tokenizer.name} "
            f"({tokenizer.vocab_size} ids, {tokenizer.fingerprint[:12]}); name the tokenizer that it was made with"
        )


def open_cached(source: Source, tokenizer: Tokenizer, *, cache_dir: Path | None = None) -> TokenStore:
    """The tokens of a source, from the cache. The first process to ask makes them while the others wait, each machine
    or shared file system once; a damaged store is made anew. `cache_dir` is `torchtitan_lite/tokens` in
    $XDG_CACHE_HOME or ~/.cache if not given. Raises DataError if it cannot be written."""
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
        raise DataError(
            f"token cache {folder.parent} cannot be written: {error.strerror}; "
            "set XDG_CACHE_HOME to a writable folder with room for 2 to 4 bytes a token"
        ) from error


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torchtitan_lite" / "tokens"


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
