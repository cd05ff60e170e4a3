"""Making of token stores: on all cores, in bounded memory, and safe to kill at any moment.

A store grows in the folder `STORE.partial`, which is renamed when it is complete. Each chunk of the
source becomes one shard. `shard-00000.json`, the manifest of a single shard, is written when the
shard's files are on disk; a run that finds it goes on after that shard. The content of a store does
not depend on when and how often a run was killed.
"""

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np

from torchtitan_lite.errors import DataError
from torchtitan_lite.files import fsync_folder, remove_folder, usable_cores
from torchtitan_lite.logger import logger

from .encoder import EncodedBatch, encode_batches
from .rows import TextRow
from .sources import Chunk, Source
from .token_store import (
    FORMAT,
    MANIFEST_FILE,
    START_DTYPES,
    DamagedStoreError,
    Shard,
    StoreManifest,
    StoreRecipe,
    TokenStore,
    documents_file,
    is_store,
    read_manifest,
    tokens_file,
    write_manifest,
    wrong_sizes,
)
from .tokenizer import Tokenizer

TokenizedBatch = tuple[list[TextRow], EncodedBatch]
"""Rows and their tokens; an empty batch ends a chunk."""
Encode = Callable[..., Generator[TokenizedBatch, None, None]]
"""`encode_batches` with its tokenizer and its number of workers."""
SHARD_MANIFEST = "shard-{:05d}.json"
BATCH_BYTES = 2**20
"""Size of the rows that a worker gets at a time."""
REPORTED_ROWS = 20
"""Bad rows that are named; further ones are only counted."""
REPORT_SECONDS = 10.0
"""Time between two lines that report progress."""
OWN_FILES = re.compile(
    r"(tokens|documents)-\d+\.bin|(shard-\d+|manifest)\.json|\.(shard-\d+|manifest)\.json\..+"
)
"""Names of the files in an unfinished store, and of drafts that `replace_file` left."""


def make_store(
    folder: Path,
    source: Source,
    tokenizer: Tokenizer,
    *,
    skip_bad: int = 0,
    workers: int | None = None,
    replace_damaged: bool = False,
) -> TokenStore:
    """Make the store of `source` in `folder`, or finish it, unless it is there already.

    Up to `skip_bad` rows that are no documents are left out and counted. `workers` is by default
    one per core. With `replace_damaged` a damaged store is made again. Raises DataError for more
    bad rows, changing text, no documents, or another kind of folder; OSError if writing fails.
    """
    if not folder.name:
        raise DataError(f"{folder} is no name for a token store; name a new folder")

    recipe = StoreRecipe(
        format=FORMAT,
        source=source.name,
        source_fingerprint=source.fingerprint,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        dtype="<u2" if tokenizer.vocab_size <= 2**16 else "<u4",
    )
    encode = partial(encode_batches, tokenizer=tokenizer, workers=workers or len(usable_cores()))

    # Only one process makes a store; the others find it made.
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(folder.with_name(f".{folder.name}.lock")):
        if folder.exists() and (made := _open_made(folder, recipe, skip_bad, replace_damaged)):
            return made

        started = time.monotonic()  # a new store gets its name when it is complete
        unfinished = folder.with_name(folder.name + ".partial")
        _make_unfinished(unfinished, recipe, source, encode, skip_bad)
        fsync_folder(unfinished)
        unfinished.rename(folder)
        fsync_folder(folder.parent)

    store = TokenStore(folder)
    logger.info(
        f"tokenized {source.name}: {store.documents:,} documents, {store.tokens:,} tokens, "
        f"{store.manifest.skipped_rows} rows skipped, {time.monotonic() - started:.1f} s, {folder}"
    )
    return store


def _open_made(
    folder: Path, recipe: StoreRecipe, skip_bad: int, replace_damaged: bool
) -> TokenStore | None:
    """Open a store that is there, or remove it if it is damaged and may be made again."""
    if not (replace_damaged or is_store(folder)):
        raise DataError(f"{folder} exists and is no token store; name another folder")
    try:
        store = TokenStore(folder)
        _check_recipe(folder, store.manifest.recipe, recipe)
        _check_skipped(folder, store.manifest.skipped_rows, skip_bad)
        return store
    except DamagedStoreError as error:
        if not replace_damaged:
            raise
        logger.warning("%s", error)
        remove_folder(folder)
        return None


def _check_recipe(folder: Path, found: StoreRecipe, asked: StoreRecipe) -> None:
    """Raise DataError if a folder was made from something else."""
    if found != asked:
        compared = (field.name for field in fields(found) if field.compare)
        pairs = ((name, getattr(found, name), getattr(asked, name)) for name in compared)
        differences = "; ".join(
            f"{name} is {was}, asked for is {now}" for name, was, now in pairs if was != now
        )
        raise DataError(
            f"{folder} was made of other text or with another tokenizer ({differences}); remove "
            "it, or name another folder"
        )


def _check_skipped(folder: Path, skipped_rows: int, skip_bad: int) -> None:
    if skipped_rows > skip_bad:
        raise DataError(
            f"{folder} was made without {skipped_rows} bad rows, and --skip-bad is {skip_bad}; "
            "allow as many, or remove it and fix them"
        )


def _make_unfinished(
    folder: Path, recipe: StoreRecipe, source: Source, encode: Encode, skip_bad: int
) -> None:
    """Make or go on with the unfinished store: all shards, the manifest, and nothing else."""
    folder.mkdir(exist_ok=True)
    if foreign := [path.name for path in folder.iterdir() if not OWN_FILES.fullmatch(path.name)]:
        raise DataError(
            f"{folder} is in the way, and no unfinished token store of this version: it has "
            f"{min(foreign)}; remove it"
        )

    # With a manifest, only the last steps are left to do.
    if is_store(folder):
        _check_recipe(folder, read_manifest(folder).recipe, recipe)
    else:
        manifest = _make_shards(folder, recipe, source, encode, skip_bad)
        problem = "" if manifest.documents else "holds 0 documents; name text that has some"
        if source.fingerprint_now() != source.fingerprint:
            problem = "changed while it was read; run again"
        if problem:
            remove_folder(folder)
            raise DataError(f"{source.name} {problem}")
        fingerprint = TokenStore(folder, manifest).compute_fingerprint()
        write_manifest(folder / MANIFEST_FILE, replace(manifest, fingerprint=fingerprint))

    for path in folder.iterdir():
        if path.suffix != ".bin" and path.name != MANIFEST_FILE:
            path.unlink()


def _make_shards(
    folder: Path, recipe: StoreRecipe, source: Source, encode: Encode, skip_bad: int
) -> StoreManifest:
    """Write the shards that are not there yet, and return the manifest of all of them."""
    # Earlier runs completed the shards that have a manifest.
    shards: list[StoreManifest] = []
    while (folder / SHARD_MANIFEST.format(len(shards))).exists():
        shards.append(read_manifest(folder, SHARD_MANIFEST.format(len(shards))))
        _check_recipe(folder, shards[-1].recipe, recipe)
    done = _merge(recipe, shards)
    for number in range(len(shards)):
        for problem in wrong_sizes(folder, done, number):
            raise DataError(f"{folder}: {problem}; remove the folder, to start again")
    _check_skipped(folder, done.skipped_rows, skip_bad)
    if shards:
        logger.info(
            f"{folder}: going on after {done.documents:,} documents, {done.tokens:,} tokens"
        )

    # The others, a chunk of the source each.
    chunk_count = sum(1 for _ in source.chunks())
    rows = _batched(islice(source.chunks(), len(shards), None))
    with closing(encode(rows, parser=source.parser, dtype=np.dtype(recipe.dtype))) as encoded:
        batches = _reported(encoded, source.name, done, chunk_count, skip_bad)
        for number in range(len(shards), chunk_count):
            shards.append(_write_shard(folder, number, recipe, batches))
    return _merge(recipe, shards)


def _merge(recipe: StoreRecipe, parts: list[StoreManifest]) -> StoreManifest:
    """Describe the store whose shards are those of `parts`; its fingerprint is still empty."""
    return StoreManifest(
        recipe=recipe,
        tokens=sum(part.tokens for part in parts),
        documents=sum(part.documents for part in parts),
        max_token_id=max((part.max_token_id for part in parts), default=0),
        skipped_rows=sum(part.skipped_rows for part in parts),
        fingerprint="",
        shards=tuple(shard for part in parts for shard in part.shards),
    )


def _batched(chunks: Iterable[Chunk]) -> Iterator[list[TextRow]]:
    """Yield the rows of each chunk in batches of BATCH_BYTES or one row, and then an empty one."""
    for chunk in chunks:
        batch: list[TextRow] = []
        size = 0
        for row in chunk():
            batch.append(row)
            size += len(row.data)
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch
        yield []


def _reported(
    batches: Iterable[TokenizedBatch],
    name: str,
    before: StoreManifest,
    chunk_count: int,
    skip_bad: int,
) -> Iterator[TokenizedBatch]:
    """Pass batches on, and log bad rows and progress, after the shards of `before`.

    Raises DataError for the first bad row that is too many.
    """
    started = reported = time.monotonic()
    tokens, skipped, finished = 0, before.skipped_rows, len(before.shards)
    for rows, encoded in batches:
        for row in encoded.bad_rows:
            skipped += 1
            if skipped > skip_bad:
                raise DataError(
                    f"{row}; fix the row, or make a store with scripts/prepare_data.py make "
                    f"--skip-bad {skipped} or more"
                )
            if skipped <= REPORTED_ROWS:
                logger.warning("skipped: %s", row)

        tokens, finished = tokens + len(encoded.ids), finished + (not rows)
        if (now := time.monotonic()) - reported >= REPORT_SECONDS:
            reported = now
            logger.info(
                f"{name}: {finished} of {chunk_count} chunks done, {tokens:,} tokens in this run, "
                f"{tokens / (now - started):,.0f} a second"
            )
        yield rows, encoded


def _write_shard(
    folder: Path, number: int, recipe: StoreRecipe, batches: Iterator[TokenizedBatch]
) -> StoreManifest:
    """Write the batches of a chunk, and then the shard's manifest, which declares it finished."""
    tokens = documents = max_token_id = skipped_rows = 0
    digests = (hashlib.sha256(), hashlib.sha256())
    ids_path, starts_path = tokens_file(folder, number), documents_file(folder, number)
    with ids_path.open("wb") as ids_file, starts_path.open("wb") as starts_file:
        files = (ids_file, starts_file)
        for rows, batch in batches:
            starts = tokens + np.cumsum(batch.lengths) - batch.lengths
            parts = (batch.ids, starts.astype(START_DTYPES[FORMAT]))
            for file, digest, part in zip(files, digests, parts, strict=True):
                file.write(part.data)
                digest.update(part.data)
            tokens += len(batch.ids)
            documents += len(batch.lengths)
            max_token_id = max(max_token_id, int(batch.ids.max(initial=0)))
            skipped_rows += len(batch.bad_rows)
            if not rows:  # the end of the chunk
                break
        for file in files:
            file.flush()
            os.fsync(file.fileno())

    shard = Shard(tokens, documents, *(digest.hexdigest() for digest in digests))
    record = StoreManifest(recipe, tokens, documents, max_token_id, skipped_rows, "", (shard,))
    write_manifest(folder / SHARD_MANIFEST.format(number), record)
    return record


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, which exists only meanwhile; other processes wait."""
    while True:
        with path.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info(f"waiting for another process, which has {path}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_open_as(path, lock):
                try:
                    yield
                finally:
                    path.unlink()
                return


def _is_open_as(path: Path, lock: IO[str]) -> bool:
    """Return whether a lock file is still there. Its last owner may have removed it, and a lock on
    a removed file would keep no one out."""
    try:
        return os.path.samestat(path.stat(), os.fstat(lock.fileno()))
    except FileNotFoundError:
        return False
