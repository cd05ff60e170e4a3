"""Make token stores on all cores, in bounded memory, and safe to kill at any moment.

A store grows in the folder `STORE.partial`, which is renamed when it is complete. Each chunk of the
source becomes one shard. When a shard's files are on disk, its manifest is written, for example
`shard-00000.json`; a later run continues after the last shard with a manifest. The content of a
store does not depend on when and how often a run was killed.
"""

import fcntl
import hashlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path

import numpy as np

from torchtitan_lite.base.errors import DataError, StorageError
from torchtitan_lite.base.files import fsync_folder, lock_file, remove_folder, usable_cores
from torchtitan_lite.base.logger import logger

from .encoder import EncodedBatch, encode_batches
from .rows import BadRow, TextRow
from .sources import Chunk, Source
from .store_files import documents_file, tokens_file
from .token_store import (
    FORMAT,
    MANIFEST_FILE,
    START_DTYPES,
    DamagedStoreError,
    Shard,
    StoreManifest,
    StoreRecipe,
    TokenStore,
    is_store,
    read_manifest,
    write_manifest,
    wrong_sizes,
)
from .tokenizer import Tokenizer

SHARD_MANIFEST = "shard-{:05d}.json"
BATCH_BYTES = 2**20
"""Size of the batch of rows that a worker tokenizes at a time."""
REPORTED_ROWS = 20
"""Number of bad rows to log; more are only counted."""
REPORT_SECONDS = 10.0
"""Time between two log lines of progress."""
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
    max_tokens: int | None = None,
    workers: int | None = None,
    replace_damaged: bool = False,
) -> TokenStore:
    """Open the store of `source` in `folder`. Make it if it is missing, finish it if it is partial.

    Up to `skip_bad` rows that are not valid documents are skipped and counted. The store ends with
    the document that reaches `max_tokens`, or with the source. `workers` defaults to one per core.
    With `replace_damaged` a damaged store is rebuilt, and other processes may ask for the same one,
    which takes a file system with locks. Raises DataError for more bad rows, text that changes, no
    documents, or a folder that is no store; StorageError without locks; OSError."""
    if not folder.name:
        raise DataError(f"{folder} is no name for a token store; name a new folder")
    recipe, started = _recipe(source, tokenizer, max_tokens), time.monotonic()

    # Only one process makes a store; the others wait and then find it.
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(folder.with_name(f".{folder.name}.lock"), needed=replace_damaged):
        if folder.exists():
            if not (replace_damaged or is_store(folder)):
                raise DataError(f"{folder} exists and is no token store; name another folder")
            try:
                store = TokenStore(folder)
                _check_made(folder, store.manifest, recipe, skip_bad)
                return store
            except DamagedStoreError as error:
                if not replace_damaged:
                    raise
                logger.warning("%s", error)
                remove_folder(folder)

        # A new store gets its final name when it is complete.
        partial = folder.with_name(folder.name + ".partial")
        unfinished = UnfinishedStore(partial, recipe, skip_bad, max_tokens)
        unfinished.finish(source, tokenizer, workers or len(usable_cores()))
        unfinished.folder.rename(folder)
        fsync_folder(folder.parent)

    store = TokenStore(folder)
    logger.info(
        f"tokenized {source.name}: {store.documents:,} documents, {store.tokens:,} tokens, "
        f"{store.manifest.skipped_rows} rows skipped, {time.monotonic() - started:.1f} s, {folder}"
    )
    return store


def _recipe(source: Source, tokenizer: Tokenizer, max_tokens: int | None) -> StoreRecipe:
    """Describe the inputs of a store. Escape names, since JSON cannot hold invalid Unicode."""
    limit = "" if max_tokens is None else f" up to {max_tokens} tokens"
    return StoreRecipe(
        format=FORMAT,
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


@contextmanager
def exclusive(path: Path, *, needed: bool = False) -> Iterator[None]:
    """Lock the file `path`; other processes wait. The file is not deleted.

    Where the file system has no locks, raise StorageError if it is `needed`, otherwise warn."""
    with path.open("a") as lock:
        try:
            has_locks = lock_file(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info(f"waiting for another process that holds {path}")
            has_locks = lock_file(lock, fcntl.LOCK_EX)
        if not has_locks:
            problem = f"{path.parent} is on a file system without locks (flock)"
            if needed:
                raise StorageError(
                    f"{problem}, and several processes may write there; set XDG_CACHE_HOME to a "
                    "folder on another, or make a store first: torchtitan-lite data make"
                )
            logger.warning(f"{problem}; do not make the same store twice at a time")
        yield


def _check_made(folder: Path, found: StoreManifest, recipe: StoreRecipe, skip_bad: int) -> None:
    """Raise DataError if a store has other inputs, or has skipped more than `skip_bad` rows."""
    if found.recipe != recipe:
        compared = (field.name for field in fields(recipe) if field.compare)
        values = ((name, getattr(found.recipe, name), getattr(recipe, name)) for name in compared)
        changes = "; ".join(
            f"{name} is {was}, not {now}" for name, was, now in values if was != now
        )
        raise DataError(
            f"{folder} was made of other text or with another tokenizer ({changes}); remove it, or "
            "name another folder"
        )
    if found.skipped_rows > skip_bad:
        raise DataError(
            f"{folder} was made without {found.skipped_rows} bad rows, and --skip-bad is "
            f"{skip_bad}; allow as many, or remove it and fix them"
        )


class UnfinishedStore:
    """A store that grows in `folder`, one shard per chunk of its source."""

    def __init__(
        self, folder: Path, recipe: StoreRecipe, skip_bad: int, max_tokens: int | None
    ) -> None:
        folder.mkdir(exist_ok=True)
        names = [path.name for path in folder.iterdir()]
        if foreign := [name for name in names if not OWN_FILES.fullmatch(name)]:
            raise DataError(
                f"{folder} is in the way, and no unfinished token store of this version: it has "
                f"{min(foreign)}; remove it"
            )
        self.folder, self.recipe, self.skip_bad = folder, recipe, skip_bad
        self.max_tokens = max_tokens or sys.maxsize
        self.shards: list[StoreManifest] = []
        """Manifests of the finished shards."""
        self.tokens = 0  # written by this process
        self.skipped = 0

    def finish(self, source: Source, tokenizer: Tokenizer, workers: int) -> None:
        """Write the missing shards and the manifest, and remove all other files."""
        # If the manifest exists, only clean up.
        if is_store(self.folder):
            _check_made(self.folder, read_manifest(self.folder), self.recipe, self.skip_bad)
        else:
            self._read_shards()
            self._make_shards(source, tokenizer, workers)
            manifest = self._manifest()
            problem = "" if manifest.documents else "holds 0 documents; name text that has some"
            if source.fingerprint_now() != source.fingerprint:
                problem = "changed while it was read; run again"
            if problem:
                remove_folder(self.folder)
                raise DataError(f"{source.name} {problem}")
            fingerprint = TokenStore(self.folder, manifest).compute_fingerprint()
            write_manifest(self.folder / MANIFEST_FILE, replace(manifest, fingerprint=fingerprint))

        for path in self.folder.iterdir():
            if path.suffix != ".bin" and path.name != MANIFEST_FILE:
                path.unlink()
        fsync_folder(self.folder)

    def _manifest(self) -> StoreManifest:
        """Return the manifest of all shards, without the fingerprint."""
        return StoreManifest(
            recipe=self.recipe,
            tokens=sum(shard.tokens for shard in self.shards),
            documents=sum(shard.documents for shard in self.shards),
            max_token_id=max((shard.max_token_id for shard in self.shards), default=0),
            skipped_rows=sum(shard.skipped_rows for shard in self.shards),
            fingerprint="",
            shards=tuple(shard for manifest in self.shards for shard in manifest.shards),
        )

    def _read_shards(self) -> None:
        """Read the manifests of the shards that earlier runs have finished."""
        while (path := self.folder / SHARD_MANIFEST.format(len(self.shards))).exists():
            self.shards.append(read_manifest(self.folder, path.name))
            self.skipped += self.shards[-1].skipped_rows
            found = replace(self.shards[-1], skipped_rows=self.skipped)
            _check_made(self.folder, found, self.recipe, self.skip_bad)
        done = self._manifest()
        for problem in wrong_sizes(self.folder, done).values():
            raise DataError(f"{self.folder}: {problem}; remove the folder, to start again")
        if self.shards:
            counts = f"{done.documents:,} documents, {done.tokens:,} tokens"
            logger.info(f"{self.folder}: going on after {counts}")

    def _make_shards(self, source: Source, tokenizer: Tokenizer, workers: int) -> None:
        """Write the shards of the remaining chunks."""
        chunk_count = sum(1 for _ in source.chunks())
        room = self.max_tokens - sum(shard.tokens for shard in self.shards)
        batches = encode_batches(
            _batched(islice(source.chunks(), len(self.shards), None)),
            parser=source.parser,
            tokenizer=tokenizer,
            dtype=np.dtype(self.recipe.dtype),
            workers=workers,
        )
        with closing(batches), self._reporting(source.name, chunk_count):
            while len(self.shards) < chunk_count and room > 0:
                self.shards.append(self._write_shard(batches, room))
                room -= self.shards[-1].tokens

    @contextmanager
    def _reporting(self, name: str, chunk_count: int) -> Iterator[None]:
        """Log the progress every REPORT_SECONDS, even while the source yields no row."""
        ended, started = threading.Event(), time.monotonic()

        def report() -> None:
            while not ended.wait(REPORT_SECONDS):
                rate = self.tokens / (time.monotonic() - started)
                logger.info(
                    f"{name}: {len(self.shards)} of {chunk_count} chunks done, {self.tokens:,} "
                    f"tokens in this run, {rate:,.0f} a second"
                )

        thread = threading.Thread(target=report)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _write_shard(
        self, batches: Iterator[tuple[list[TextRow], EncodedBatch]], room: int
    ) -> StoreManifest:
        """Write the batches of a chunk, up to the document that reaches `room` tokens, then the
        manifest, which marks the shard as finished.

        Raises DataError at the first bad row beyond `skip_bad`."""
        number = len(self.shards)
        tokens = documents = max_token_id = skipped_rows = 0
        digests = (hashlib.sha256(), hashlib.sha256())
        ids_path = self.folder / tokens_file(number)
        starts_path = self.folder / documents_file(number)
        with ids_path.open("wb") as ids, starts_path.open("wb") as starts:
            for rows, batch in batches:
                skipped_rows += len(batch.bad_rows)
                self._report_bad(batch.bad_rows)
                ends = tokens + np.cumsum(batch.lengths)
                kept = int(np.searchsorted(ends, room)) + 1  # documents, or more than there are
                lengths = batch.lengths[:kept]
                kept_ids = batch.ids[: lengths.sum()]
                places = ends[:kept] - lengths
                parts = (kept_ids, places.astype(START_DTYPES[FORMAT]))
                for file, digest, part in zip((ids, starts), digests, parts, strict=True):
                    file.write(part.data)
                    digest.update(part.data)

                tokens += len(kept_ids)
                documents += len(lengths)
                max_token_id = max(max_token_id, int(kept_ids.max(initial=0)))
                self.tokens += len(kept_ids)
                if not rows or tokens >= room:  # the end of the chunk, or of the store
                    break
            for file in (ids, starts):
                file.flush()
                os.fsync(file.fileno())

        shard = Shard(tokens, documents, *(digest.hexdigest() for digest in digests))
        counts = (tokens, documents, max_token_id, skipped_rows)
        manifest = StoreManifest(self.recipe, *counts, fingerprint="", shards=(shard,))
        write_manifest(self.folder / SHARD_MANIFEST.format(number), manifest)
        return manifest

    def _report_bad(self, rows: list[BadRow]) -> None:
        for row in rows:
            self.skipped += 1
            if self.skipped > self.skip_bad:
                raise DataError(
                    f"{row}; fix the row, or make a store with torchtitan-lite data make "
                    f"--skip-bad {self.skipped} or more"
                )
            if self.skipped <= REPORTED_ROWS:
                logger.warning("skipped: %s", row)


def _batched(chunks: Iterable[Chunk]) -> Iterator[list[TextRow]]:
    """Yield each chunk's rows in batches of about BATCH_BYTES, then an empty batch."""
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
