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
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from itertools import count, islice
from pathlib import Path
from typing import IO

import numpy as np

from torchtitan_lite.errors import DataError
from torchtitan_lite.files import fsync_folder, remove_folder, usable_cores
from torchtitan_lite.logger import logger

from .encoder import EncodedBatch, encode_batches
from .manifest import (
    FORMAT,
    MANIFEST_FILE,
    START_DTYPES,
    DamagedStoreError,
    Shard,
    StoreManifest,
    StoreRecipe,
    documents_file,
    is_store,
    merge_manifests,
    read_manifest,
    tokens_file,
    write_manifest,
    wrong_sizes,
)
from .rows import TextRow
from .sources import Chunk, Source
from .token_store import TokenStore
from .tokenizer import Tokenizer

TokenizedBatch = tuple[list[TextRow], EncodedBatch]
"""Rows and their tokens; an empty batch ends a chunk."""
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

    Up to `skip_bad` rows that are no documents are left out and counted. `workers` processes
    tokenize, by default one per core. Raises DataError for more bad rows, for text that changes
    meanwhile, if there is no document, and for a folder that is something else; a damaged store is
    made again with `replace_damaged`. Raises OSError if files cannot be written.
    """
    if not folder.name:
        raise DataError(f"{folder} is no name for a token store; name a new folder")
    recipe = _build_recipe(source, tokenizer)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(folder.with_name(f".{folder.name}.lock")):
        if folder.exists():
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

        started = time.monotonic()
        partial = folder.with_name(folder.name + ".partial")
        _make_partial(partial, recipe, source, tokenizer, skip_bad, workers)
        fsync_folder(partial)
        partial.rename(folder)
        fsync_folder(folder.parent)
    store = TokenStore(folder)
    logger.info(
        f"tokenized {source.name}: {store.documents:,} documents, {store.tokens:,} tokens, "
        f"{store.manifest.skipped_rows} rows skipped, {time.monotonic() - started:.1f} s, {folder}"
    )
    return store


def _make_partial(
    partial: Path,
    recipe: StoreRecipe,
    source: Source,
    tokenizer: Tokenizer,
    skip_bad: int,
    workers: int | None,
) -> None:
    """Make or finish the unfinished store: all shards, the manifest, and nothing else."""
    partial.mkdir(exist_ok=True)
    if foreign := [p.name for p in partial.iterdir() if not OWN_FILES.fullmatch(p.name)]:
        raise DataError(
            f"{partial} is in the way, and no unfinished token store of this version: it has "
            f"{min(foreign)}; remove it"
        )

    # With a manifest, only the last steps are left to do.
    if is_store(partial):
        _check_recipe(partial, read_manifest(partial).recipe, recipe)
    else:
        shards = _make_shards(partial, recipe, source, tokenizer, skip_bad, workers)
        manifest = merge_manifests(recipe, shards)
        problem = "" if manifest.documents else "holds 0 documents; name text that has some"
        if source.fingerprint_now() != source.fingerprint:
            problem = "changed while it was read; run again"
        if problem:
            remove_folder(partial)
            raise DataError(f"{source.name} {problem}")
        fingerprint = TokenStore(partial, manifest).compute_fingerprint()
        write_manifest(partial / MANIFEST_FILE, replace(manifest, fingerprint=fingerprint))

    for path in partial.iterdir():
        if path.suffix != ".bin" and path.name != MANIFEST_FILE:
            path.unlink()


def _build_recipe(source: Source, tokenizer: Tokenizer) -> StoreRecipe:
    return StoreRecipe(
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


def _finished_shards(partial: Path, recipe: StoreRecipe) -> Iterator[StoreManifest]:
    """Yield the manifest of each shard that earlier runs completed."""
    for number in count():
        name = f"shard-{number:05d}.json"
        if not (partial / name).exists():
            return
        record = read_manifest(partial, name)
        _check_recipe(partial, record.recipe, recipe)
        for problem in wrong_sizes(partial, recipe, number, record.shards[0]):
            raise DataError(f"{partial}: {problem}; remove the folder, to start again")
        yield record


def _make_shards(
    partial: Path,
    recipe: StoreRecipe,
    source: Source,
    tokenizer: Tokenizer,
    skip_bad: int,
    workers: int | None,
) -> list[StoreManifest]:
    """Write the shards that are not there yet, and return the manifests of all of them."""
    shards = list(_finished_shards(partial, recipe))
    total = merge_manifests(recipe, shards)
    _check_skipped(partial, total.skipped_rows, skip_bad)
    if shards:
        logger.info(
            f"{partial}: going on after {total.documents:,} documents, {total.tokens:,} tokens"
        )

    chunk_count = sum(1 for _ in source.chunks())
    encoded_batches = encode_batches(
        _batched(islice(source.chunks(), len(shards), None)),
        parser=source.parser,
        tokenizer=tokenizer,
        dtype=np.dtype(recipe.dtype),
        workers=workers or len(usable_cores()),
    )
    with closing(encoded_batches):
        batches = _reported(encoded_batches, source.name, total, chunk_count, skip_bad)
        for number in range(len(shards), chunk_count):
            shards.append(_write_shard(partial, number, recipe, batches))
    return shards


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
    partial: Path, number: int, recipe: StoreRecipe, batches: Iterator[TokenizedBatch]
) -> StoreManifest:
    """Write the batches of a chunk, and then the shard's manifest, which declares it finished."""
    tokens = documents = max_token_id = skipped_rows = 0
    digests = (hashlib.sha256(), hashlib.sha256())
    ids_path, starts_path = tokens_file(partial, number), documents_file(partial, number)
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
    write_manifest(partial / f"shard-{number:05d}.json", record)
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
