"""Make token stores on all cores, in bounded memory, and safe to kill at any moment.

A store grows in the folder `STORE.partial`, which is renamed when it is complete. Each chunk of the
source becomes one shard. When it is on disk, the manifest of all shards so far is written; a later
run continues after them. What it ends with does not depend on when a run was killed.
"""

import fcntl
import hashlib
import os
import sys
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from torchtitan_lite.base.errors import DataError, StorageError
from torchtitan_lite.base.files import fsync_folder, hash_file, lock_file, remove_folder
from torchtitan_lite.base.jsonfile import write_hashed_json
from torchtitan_lite.base.logger import logger
from torchtitan_lite.base.paths import cache_folder
from torchtitan_lite.base.progress import progress
from torchtitan_lite.catalog.datasets import NamedDataset

from .rows import Row, grouped
from .sources import Chunk, Source, build_source
from .token_store import (
    MANIFEST_FILE,
    Shard,
    StoreManifest,
    StoreRecipe,
    TokenStore,
    find_damage,
    is_store,
    read_manifest,
    tokens_file,
)
from .tokenizer import Tokenizer

BATCH_BYTES = 2**20
"""Size of the batch of rows that a thread tokenizes at a time."""
AHEAD = 2
"""Batches per thread that are read before they are asked for."""
CHUNK_TOKENS = 2**20
HASHED_TOKENS = 2**29
"""The fingerprint hashes the stream in runs of so many ids, wherever shards are cut."""

Encoded = tuple[list[np.ndarray], list[Row], int]
"""The documents of a batch of rows, each the ids [tokens] with its frame, the bad rows, and the
bytes of the texts."""


def open_cached(name: str, dataset: NamedDataset, tokenizer: Tokenizer) -> TokenStore:
    """Open the tokens of a dataset in the cache, `torchtitan_lite/tokens` in $XDG_CACHE_HOME. The
    first process to ask makes them while the others wait. Raises RunError, OSError."""
    source = build_source(name, dataset)
    inputs = f"{source.fingerprint} {tokenizer.fingerprint}"
    if tokenizer.one_separator:  # earlier versions made another store of the same inputs
        inputs += " one separator"
    key = hashlib.sha256(inputs.encode()).hexdigest()[:16]
    return make_store(cache_folder("tokens") / key, source, tokenizer)


def make_store(
    folder: Path,
    source: Source,
    tokenizer: Tokenizer,
    *,
    skip_bad: int = 0,
    max_tokens: int | None = None,
) -> TokenStore:
    """Open the store of `source` in `folder`. Make it if it is missing, finish it if it is partial.

    Up to `skip_bad` bad rows are skipped. The store ends with the document that reaches
    `max_tokens`, or with the source. Raises DataError, OSError; StorageError without locks."""
    if not folder.name:
        raise DataError(f"{folder} is no name for a token store; name a new folder")
    recipe = _recipe(source, tokenizer, max_tokens)
    folder.parent.mkdir(parents=True, exist_ok=True)

    # Other processes wait for the one that makes the store. The lock's file is never deleted.
    with folder.with_name(f".{folder.name}.lock").open("a") as lock:
        if not lock_file(lock, fcntl.LOCK_EX):
            raise StorageError(
                f"{folder.parent} is on a file system without locks (flock); make the store on "
                "another: torchtitan-lite data make (the cache of a run is in XDG_CACHE_HOME)"
            )
        if folder.exists():
            if not is_store(folder):
                raise DataError(f"{folder} exists and is no token store; name another folder")
            store = TokenStore(folder)
            _check_inputs(folder, store.manifest, recipe)
            return store

        # A new store gets its final name when it is complete.
        partial = folder.with_name(f"{folder.name}.partial")
        unfinished = UnfinishedStore(partial, recipe, skip_bad=skip_bad)
        if not unfinished.manifest.fingerprint:  # else a run was killed before the next line
            unfinished.complete(source, tokenizer, max_tokens or sys.maxsize)
        partial.rename(folder)
        fsync_folder(folder.parent)

    store = TokenStore(folder)
    logger.info(
        f"tokenized {source.name}: {store.manifest}, {store.manifest.skipped_rows} rows skipped, "
        f"{folder}"
    )
    return store


def _recipe(source: Source, tokenizer: Tokenizer, max_tokens: int | None) -> StoreRecipe:
    """Describe the inputs of a store. Escape names, since JSON cannot hold invalid Unicode."""
    limit = "" if max_tokens is None else f" up to {max_tokens} tokens"
    return StoreRecipe(
        format=3,
        source=source.name.encode(errors="backslashreplace").decode(),
        source_fingerprint=source.fingerprint + limit,
        tokenizer=tokenizer.name.encode(errors="backslashreplace").decode(),
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        one_separator=tokenizer.one_separator,
        dtype="<u2" if tokenizer.vocab_size <= 2**16 else "<u4",
    )


def _check_inputs(folder: Path, found: StoreManifest, recipe: StoreRecipe) -> None:
    """Raise DataError if a store has other inputs."""
    if found.recipe != recipe:
        raise DataError(
            f"{folder} was made of other text, with another tokenizer or another --max-tokens; "
            "remove it, or name another folder"
        )


class UnfinishedStore:
    """A store that grows in `folder`, one shard per chunk of its source. Raises DataError if the
    folder holds something else."""

    def __init__(self, folder: Path, recipe: StoreRecipe, *, skip_bad: int) -> None:
        self.folder, self.skip_bad = folder, skip_bad
        self.manifest = StoreManifest(recipe, 0, 0, fingerprint="", shards=())
        """Of the finished shards."""
        folder.mkdir(exist_ok=True)
        if any(folder.iterdir()) and not (folder / tokens_file(0)).exists():
            raise DataError(f"{folder} is in the way, and no unfinished store; remove it")
        if not is_store(folder):
            return

        done = read_manifest(folder)
        _check_inputs(folder, done, recipe)
        for problem in find_damage(folder, done):
            raise DataError(f"{folder}: {problem}; remove the folder, to start again")
        self.manifest = replace(done, recipe=recipe)
        logger.info(f"{folder}: going on after {done}")

    def complete(self, source: Source, tokenizer: Tokenizer, max_tokens: int) -> None:
        """Write the shards of the remaining chunks, and turn all into a store. Removes them, and
        raises DataError, if they hold no document or the text has changed."""
        with progress(f"tokenizing {source.name}", None) as self._bar:
            for number, chunk in enumerate(source.chunks()):
                if number >= len(self.manifest.shards) and self.manifest.tokens < max_tokens:
                    self._write_shard(chunk, tokenizer, room=max_tokens - self.manifest.tokens)

        problem = "" if self.manifest.documents else "holds 0 documents; name text that has some"
        if source.fingerprint_now() != source.fingerprint:
            problem = "changed while it was read; run again"
        if problem:
            remove_folder(self.folder)
            raise DataError(f"{source.name} {problem}")
        fingerprint = hash_ids(TokenStore(self.folder, self.manifest))
        finished = replace(self.manifest, fingerprint=fingerprint)
        write_hashed_json(self.folder / MANIFEST_FILE, asdict(finished))
        for draft in self.folder.glob(f".{MANIFEST_FILE}.*"):  # of a killed run
            draft.unlink()

    def _write_shard(self, chunk: Chunk, tokenizer: Tokenizer, *, room: int) -> None:
        """Write the documents of a chunk, up to the one that reaches `room` tokens, then the
        manifest with the shard. Raises DataError at the first bad row beyond `skip_bad`."""
        tokens = documents = 0
        max_token_id, skipped_rows = self.manifest.max_token_id, self.manifest.skipped_rows
        path = self.folder / tokens_file(len(self.manifest.shards))
        dtype, threads = np.dtype(self.manifest.recipe.dtype), len(os.sched_getaffinity(0))
        rows = grouped(((row, len(row.text)) for row in chunk()), BATCH_BYTES)
        batches = encode_batches(rows, tokenizer, dtype=dtype, threads=threads)
        with closing(batches), path.open("wb") as file:
            for encoded, bad_rows, size in batches:
                self._bar.update(size)
                for row in bad_rows:
                    skipped_rows += 1
                    if skipped_rows > self.skip_bad:
                        raise DataError(
                            f"{row.place}: {row.problem}; fix the row, or make a store with "
                            "torchtitan-lite data make --skip-bad all"
                        )
                    logger.warning(f"skipped: {row.place}: {row.problem}")
                for ids in encoded:
                    if tokens < room:
                        file.write(ids.data)
                        tokens += len(ids)
                        documents += 1
                        max_token_id = max(max_token_id, int(ids.max()))
                if tokens >= room:
                    break
            file.flush()
            os.fsync(file.fileno())

        self.manifest = replace(
            self.manifest,
            max_token_id=max_token_id,
            skipped_rows=skipped_rows,
            shards=(*self.manifest.shards, Shard(tokens, documents, hash_file(path))),
        )
        write_hashed_json(self.folder / MANIFEST_FILE, asdict(self.manifest))


def hash_ids(store: TokenStore) -> str:
    """Hash all ids of a store's stream. The result does not depend on the shards."""
    recipe = store.manifest.recipe
    digest = hashlib.sha256(f"{recipe.tokenizer_fingerprint} {recipe.dtype}".encode())
    with progress(f"hashing {store.folder}", store.tokens, unit=" tokens") as bar:
        for start in range(0, store.tokens, HASHED_TOKENS):
            stop = min(start + HASHED_TOKENS, store.tokens)
            run = hashlib.sha256()
            for place in range(start, stop, CHUNK_TOKENS):
                run.update(store.read(place, min(CHUNK_TOKENS, stop - place)).data)
                bar.update(min(CHUNK_TOKENS, stop - place))
            digest.update(f" {stop - start} {run.hexdigest()}".encode())
    return digest.hexdigest()


def encode_rows(rows: list[Row], tokenizer: Tokenizer, dtype: np.dtype) -> Encoded:
    """Tokenize rows, in order."""
    documents, bad = [], [row for row in rows if row.problem]
    good = [row for row in rows if not row.problem]
    encoded = tokenizer.encode_documents([row.text for row in good])

    # Masks find documents by BOS, so that no text may hold it; as an unknown token, it could.
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    for row, ids_of_row in zip(good, encoded, strict=True):
        ids = np.asarray(ids_of_row, dtype)
        framing = np.count_nonzero((ids == bos) | (ids == eos))
        if framing > (1 if tokenizer.one_separator else 2):
            bad.append(Row(row.place, "", f"its text encodes to BOS id {bos} or EOS id {eos}"))
        else:
            documents.append(ids)
    return documents, bad, sum(len(row.text.encode()) for row in good)


def encode_batches(
    batches: Iterable[list[Row]], tokenizer: Tokenizer, *, dtype: np.dtype, threads: int
) -> Generator[Encoded, None, None]:
    """Yield the tokens of each batch, in order. Holds AHEAD batches per thread in memory. The
    tokenizers' libraries release Python's lock."""
    pool = ThreadPoolExecutor(threads, "tokenize")
    ahead: deque[Future[Encoded]] = deque()
    try:
        for batch in batches:
            ahead.append(pool.submit(encode_rows, batch, tokenizer, dtype))
            if len(ahead) > AHEAD * threads:
                yield ahead.popleft().result()
        for future in ahead:
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)
