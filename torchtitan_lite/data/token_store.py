"""Tokens on disk: the documents of a source as one stream of ids, made once and memory-mapped from then on."""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np

from torchtitan_lite.data.sources import Source
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.errors import DataError
from torchtitan_lite.logger import logger

FORMAT = 1
TOKENS_FILE = "tokens.bin"
MANIFEST_FILE = "manifest.json"
BATCH_CHARACTERS = 2**21
CHUNK_TOKENS = 2**20
ENTROPY_CHUNKS = 64


@dataclass(frozen=True)
class Manifest:
    """What a token store holds, and what it was made of. `sha256` is that of the tokens file."""

    format: int
    source: str
    source_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    dtype: str
    tokens: int
    documents: int
    sha256: str


class TokenStore:
    """A folder with `manifest.json` and `tokens.bin`: BOS, ids, EOS of every document, one after the other, in little
    endian. `tokens` is the read-only memory map; `fingerprint` changes with any token. Raises DataError for a folder
    that is incomplete, damaged or of another format."""

    def __init__(self, folder: Path) -> None:
        try:
            fields = json.loads((folder / MANIFEST_FILE).read_text())
            if fields["format"] != FORMAT:
                raise ValueError(f"its format is {fields['format']}, not {FORMAT}")
            manifest = Manifest(**fields)
            dtype = np.dtype(manifest.dtype)
            size, expected = (folder / TOKENS_FILE).stat().st_size, manifest.tokens * dtype.itemsize
            if size != expected:
                raise ValueError(f"{TOKENS_FILE} has {size} bytes, not {expected}")
            self.tokens = np.memmap(folder / TOKENS_FILE, dtype=dtype, mode="r")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(f"token store {folder} is damaged: {error}; it must be made anew") from error
        self.fingerprint = manifest.sha256
        self.documents = manifest.documents
        self.vocab_size = manifest.vocab_size

    def unigram_entropy(self) -> float:
        """Nats per token of a model that knows the frequency of each id and no context. Reads the tokens in at most
        ENTROPY_CHUNKS chunks, evenly spaced in a larger store."""
        counts = np.zeros(self.vocab_size, np.int64)
        chunks = range(0, len(self.tokens), CHUNK_TOKENS)
        for start in chunks[:: -(-len(chunks) // ENTROPY_CHUNKS)]:
            counts += np.bincount(self.tokens[start : start + CHUNK_TOKENS], minlength=self.vocab_size)
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum())


def open_token_store(source: Source, tokenizer: Tokenizer, *, cache_dir: Path | None = None) -> TokenStore:
    """The tokens of a source, from the cache. The first process to ask makes them while the others wait, each machine
    or shared file system once; a damaged store is made anew. `cache_dir` is `torchtitan_lite/tokens` in
    $XDG_CACHE_HOME or ~/.cache if not given. Raises DataError if it cannot be written."""
    key = hashlib.sha256(f"{source.fingerprint} {tokenizer.fingerprint}".encode()).hexdigest()[:16]
    folder = (cache_dir or _user_cache()) / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return _opened(folder) or _made(folder, source, tokenizer)
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
        shutil.rmtree(folder)
        return None


def _made(folder: Path, source: Source, tokenizer: Tokenizer) -> TokenStore:
    """The new store in a folder. It is written beside it and then moved, so that the folder is whole if it exists."""
    started = time.monotonic()
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    partial.mkdir()
    try:
        _write(partial, source, tokenizer)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    store = TokenStore(folder)
    seconds = time.monotonic() - started
    counts = f"{store.documents} documents, {len(store.tokens)} tokens"
    logger.info("tokenized %s: %s, %.1f s, %s", source.name, counts, seconds, folder)
    return store


def _write(folder: Path, source: Source, tokenizer: Tokenizer) -> None:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    digest, tokens, documents = hashlib.sha256(), 0, 0
    with (folder / TOKENS_FILE).open("wb") as file:
        for texts in _batches(source.documents()):
            for ids in tokenizer.encode_documents(texts):
                data = np.array(ids, dtype).tobytes()
                file.write(data)
                digest.update(data)
                tokens += len(ids)
            documents += len(texts)
        _sync(file)
    manifest = Manifest(
        format=FORMAT,
        source=source.name,
        source_fingerprint=source.fingerprint,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        dtype=dtype.str,
        tokens=tokens,
        documents=documents,
        sha256=digest.hexdigest(),
    )
    with (folder / MANIFEST_FILE).open("w") as file:
        json.dump(asdict(manifest), file, indent=2)
        _sync(file)


def _sync(file: IO) -> None:
    """Have the file on disk before the folder gets its name: its size alone would not show that data is missing."""
    file.flush()
    os.fsync(file.fileno())


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Runs of texts, each cut off once it has BATCH_CHARACTERS: enough for all cores, little enough for memory."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
