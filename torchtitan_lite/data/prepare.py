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
from .rows import BadRow, TextRow
from .sources import Chunk, Source
from .token_store import TokenStore
from .tokenizer import Tokenizer

BATCH_BYTES = 2**20
"""Size of the rows that a worker gets at a time."""
REPORTED_ROWS = 20
"""Bad rows that are named; further ones are only counted."""
REPORT_SECONDS = 10.0
"""Time between two lines that report progress."""
OWN_FILES = re.compile(r"(tokens|documents)-\d+\.bin|\.?(shard-\d+|manifest)\.json(\..+)?")
"""Names of the files in an unfinished store."""


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

    finished, skipped, tokens = len(shards), total.skipped_rows, 0
    chunk_count = sum(1 for _ in source.chunks())
    started = reported = time.monotonic()
    writer: _ShardWriter | None = None
    encoded_batches = encode_batches(
        _batched(islice(source.chunks(), finished, None)),
        parser=source.parser,
        tokenizer=tokenizer,
        dtype=np.dtype(recipe.dtype),
        workers=workers or len(usable_cores()),
    )
    with closing(encoded_batches):
        for rows, encoded in encoded_batches:
            _report_bad_rows(encoded.bad_rows, skipped, skip_bad)
            skipped, tokens = skipped + len(encoded.bad_rows), tokens + len(encoded.ids)
            writer = writer or _ShardWriter(partial, len(shards), recipe)
            writer.append(encoded)

            # An empty batch ends a chunk.
            if not rows:
                shards.append(writer.commit())
                writer = None

            if (now := time.monotonic()) - reported >= REPORT_SECONDS:
                reported = now
                logger.info(
                    f"{source.name}: {len(shards)} of {chunk_count} chunks done, {tokens:,} tokens "
                    f"in this run, {tokens / (now - started):,.0f} a second"
                )
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


def _report_bad_rows(bad_rows: list[BadRow], skipped: int, skip_bad: int) -> None:
    """Log rows that are left out. Raises DataError for the first one that is too many."""
    for number, row in enumerate(bad_rows, start=skipped + 1):
        if number > skip_bad:
            raise DataError(
                f"{row}; fix the row, or make a store with scripts/prepare_data.py make "
                f"--skip-bad {number} or more"
            )
        if number <= REPORTED_ROWS:
            logger.warning("skipped: %s", row)


class _ShardWriter:
    """Writes the files of one shard."""

    def __init__(self, folder: Path, number: int, recipe: StoreRecipe) -> None:
        self._recipe = recipe
        self._record = folder / f"shard-{number:05d}.json"
        self._files = [path(folder, number).open("wb") for path in (tokens_file, documents_file)]
        self._digests = [hashlib.sha256(), hashlib.sha256()]
        self._tokens = self._documents = self._max_token_id = self._skipped_rows = 0

    def append(self, batch: EncodedBatch) -> None:
        """Add the documents of a batch."""
        starts = self._tokens + np.cumsum(batch.lengths) - batch.lengths
        numbers = (batch.ids, starts.astype(START_DTYPES[FORMAT]))
        for file, digest, part in zip(self._files, self._digests, numbers, strict=True):
            data = part.tobytes()
            file.write(data)
            digest.update(data)
        self._tokens += len(batch.ids)
        self._documents += len(batch.lengths)
        self._max_token_id = max(self._max_token_id, int(batch.ids.max(initial=0)))
        self._skipped_rows += len(batch.bad_rows)

    def commit(self) -> StoreManifest:
        """Put the shard on disk, and then its manifest, which declares it finished."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        hashes = [digest.hexdigest() for digest in self._digests]
        record = StoreManifest(
            recipe=self._recipe,
            tokens=self._tokens,
            documents=self._documents,
            max_token_id=self._max_token_id,
            skipped_rows=self._skipped_rows,
            fingerprint="",
            shards=(Shard(self._tokens, self._documents, *hashes),),
        )
        write_manifest(self._record, record)
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
