"""Token stores, made: rows in, shards out, on all cores, in constant memory, and safe to kill at
any moment.

The store grows in a folder beside its own, `STORE.partial`, which takes the store's name once it is
whole. Every COMMIT_SECONDS the files are on disk and `progress.json` tells how much of them counts
and where in the source to read on, so that a killed run goes on there. The ids do not depend on
when that was: a store is the same, byte by byte.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import IO

from torchtitan_lite.data.encoder import encode_batches
from torchtitan_lite.data.manifest import (
    FORMAT,
    MANIFEST_FILE,
    MAX_SHARD_TOKENS,
    Manifest,
    Recipe,
    Shard,
    check_sizes,
    is_store,
    read_manifest,
    write_manifest,
    wrong_sizes,
)
from torchtitan_lite.data.rows import Position, Row
from torchtitan_lite.data.sources import Source
from torchtitan_lite.data.store_writer import PROGRESS_FILE, Progress, StoreWriter, write_progress
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.errors import DataError, StorageError
from torchtitan_lite.files import fsync_folder, remove_folder
from torchtitan_lite.logger import logger

SHARD_TOKENS = 2**29
"""Ids of a shard: 1 GiB where an id takes 2 bytes."""
BATCH_BYTES = 2**20
"""Of rows that a process gets at a time."""
COMMIT_SECONDS = 2.0
REPORTED_ROWS = 20
"""Bad rows that are named; of more only the number is told."""


@dataclass(frozen=True)
class Pace:
    """What a progress line is made of."""

    progress: Progress
    read: float | None
    """Share of the source, 0 to 1; None where its size is not known."""
    tokens_per_s: float


def prepare_store(
    folder: Path,
    source: Source,
    tokenizer: Tokenizer,
    *,
    skip_bad: int = 0,
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    report: Callable[[Pace], None] | None = None,
) -> Manifest:
    """The manifest of the store of `source` in `folder`: made, finished where an earlier run was
    killed, or there already. Arguments are those of `make_store`. Raises DataError for a folder
    that is something else, and StorageError where the store cannot be written."""
    if not folder.name:
        raise DataError(f"{folder} is no name for a token store; name a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(lock_of(folder)):
            if folder.exists():
                return _made_before(
                    folder, _recipe(source, tokenizer, shard_tokens), skip_bad=skip_bad
                )
            return make_store(
                folder,
                source,
                tokenizer,
                skip_bad=skip_bad,
                workers=workers,
                shard_tokens=shard_tokens,
                report=report,
            )
    except OSError as error:
        raise StorageError(
            f"token store {folder} cannot be written: {error.strerror}; make room, or name another folder; run again, "
            "it goes on where it was"
        ) from error


def make_store(
    folder: Path,
    source: Source,
    tokenizer: Tokenizer,
    *,
    skip_bad: int = 0,
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    report: Callable[[Pace], None] | None = None,
) -> Manifest:
    """The manifest of the store of `source` in `folder`, which is not there yet; the caller is
    alone there. Up to `skip_bad` rows that are no documents are left out and counted. `workers`
    processes tokenize, by default one a core. `report` is called with each batch. Raises DataError
    for more bad rows, and if there is no document."""
    started = time.monotonic()
    partial = folder.with_name(folder.name + ".partial")
    recipe = _recipe(source, tokenizer, shard_tokens)
    if is_store(partial) and not (partial / PROGRESS_FILE).exists():
        manifest = read_manifest(partial)  # an earlier run was killed with only this left to do
        _check_recipe(partial, manifest.recipe, recipe)
    else:
        with StoreWriter(partial, _unfinished(partial, recipe)) as writer:
            _fill(
                writer,
                source,
                tokenizer,
                skip_bad=skip_bad,
                workers=workers or _cores(),
                report=report,
            )
            manifest = writer.finish()
        if source.fingerprint_now is not None and source.fingerprint_now() != source.fingerprint:
            remove_folder(partial)
            raise DataError(f"{source.name} changed while it was read; run again")
        if not manifest.documents:
            remove_folder(partial)
            raise DataError(f"{source.name} holds 0 documents; name text that has some")
        write_manifest(partial, manifest)
        (partial / PROGRESS_FILE).unlink(missing_ok=True)
    fsync_folder(partial)
    partial.rename(folder)
    fsync_folder(folder.parent)
    logger.info(
        f"tokenized {source.name}: {manifest.documents:,} documents, {manifest.tokens:,} tokens, "
        f"{manifest.skipped_rows} rows skipped, {time.monotonic() - started:.1f} s, {folder}"
    )
    return manifest


def _recipe(source: Source, tokenizer: Tokenizer, shard_tokens: int) -> Recipe:
    assert 1 <= shard_tokens <= MAX_SHARD_TOKENS, f"no shards of {shard_tokens} tokens"
    return Recipe(
        format=FORMAT,
        source=source.name,
        source_fingerprint=source.fingerprint,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        dtype="<u2" if tokenizer.vocab_size <= 2**16 else "<u4",
        shard_tokens=shard_tokens,
    )


def lock_of(folder: Path) -> Path:
    """The file for `exclusive` use of a store's folder."""
    return folder.with_name(f".{folder.name}.lock")


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """One process at a time, of all that name the same file; the others wait. The file is there
    only meanwhile."""
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
    """Whether a file is still there: who held it before may have removed it, and a lock on that
    would keep no one out."""
    try:
        return os.path.samestat(path.stat(), os.fstat(lock.fileno()))
    except FileNotFoundError:
        return False


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _made_before(folder: Path, recipe: Recipe, *, skip_bad: int) -> Manifest:
    """The manifest of a folder that is there, if it is the store that `recipe` makes."""
    if not is_store(folder):
        raise DataError(f"{folder} exists and is no token store; name another folder")
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    _check_recipe(folder, manifest.recipe, recipe)
    _check_skipped(folder, manifest.skipped_rows, skip_bad)
    logger.info(
        f"{folder} is made already: {manifest.documents:,} documents, {manifest.tokens:,} tokens"
    )
    return manifest


def _check_recipe(folder: Path, found: Recipe, asked: Recipe) -> None:
    """Raise DataError if what a folder holds was made of something else."""
    if found != asked:
        pairs = {
            field.name: (getattr(found, field.name), getattr(asked, field.name))
            for field in fields(found)
        }
        differences = (
            f"{name} is {was}, asked for is {now}"
            for name, (was, now) in pairs.items()
            if was != now
        )
        raise DataError(
            f"{folder} was made of other text or with another tokenizer ({'; '.join(differences)}); remove it, or name "
            "another folder"
        )


def _check_skipped(folder: Path, skipped_rows: int, skip_bad: int) -> None:
    if skipped_rows > skip_bad:
        raise DataError(
            f"{folder} was made without {skipped_rows} bad rows, and --skip-bad is {skip_bad}; allow as many, or "
            "remove it and mend them"
        )


def _unfinished(partial: Path, recipe: Recipe) -> Progress:
    """How far a killed run came in `partial`, which is made if it is not there. Raises DataError
    for a folder that is something else, and for files that are not what was left."""
    partial.mkdir(exist_ok=True)
    for name in (PROGRESS_FILE, MANIFEST_FILE):
        for draft in partial.glob(f".{name}.*"):  # of a run that was killed while it wrote the file
            draft.unlink()
    if not any(partial.iterdir()):
        progress = Progress(recipe)
        write_progress(partial, progress)
        return progress
    try:
        saved = json.loads((partial / PROGRESS_FILE).read_text())
        progress = replace(
            Progress(**saved),
            recipe=Recipe(**saved["recipe"]),
            position=Position(*saved["position"]),
            shards=tuple(Shard(**shard) for shard in saved["shards"]),
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(
            f"{partial} is in the way, and no unfinished token store: {error}; remove it"
        ) from error
    _check_recipe(partial, progress.recipe, recipe)
    if problems := wrong_sizes(partial, recipe, progress.shards):
        raise DataError(f"{partial}: {problems[0]}; remove it, to start anew")
    if progress.tokens:
        logger.info(
            f"{partial}: going on after {progress.documents:,} documents, {progress.tokens:,} tokens"
        )
    return replace(progress, recipe=recipe)


def _fill(
    writer: StoreWriter,
    source: Source,
    tokenizer: Tokenizer,
    *,
    skip_bad: int,
    workers: int,
    report: Callable[[Pace], None] | None,
) -> None:
    """Write what is left of the source."""
    began, tokens_before, committed = time.monotonic(), writer.progress.tokens, time.monotonic()
    _check_skipped(writer.folder, writer.progress.skipped_rows, skip_bad)
    share_read = ShareRead(source)
    batches = batched(source.rows(writer.progress.position))
    encoded_batches = encode_batches(
        batches, parser=source.parser, tokenizer=tokenizer, dtype=writer.dtype, workers=workers
    )
    with closing(encoded_batches):
        for rows, encoded in encoded_batches:
            _name_bad_rows(encoded.bad_rows, before=writer.progress.skipped_rows, skip_bad=skip_bad)
            writer.append(
                encoded.ids, encoded.lengths, skipped=len(encoded.bad_rows), position=rows[-1].end
            )
            if time.monotonic() - committed >= COMMIT_SECONDS:
                writer.commit()
                committed = time.monotonic()
            if report is not None:
                rate = (writer.progress.tokens - tokens_before) / (time.monotonic() - began)
                report(Pace(writer.progress, share_read(rows[-1]), rate))


def _name_bad_rows(bad_rows: list[str], *, before: int, skip_bad: int) -> None:
    """Log rows that are left out. Raises DataError for the first that is too many."""
    for count, reason in enumerate(bad_rows, start=before + 1):
        if count > skip_bad:
            raise DataError(
                f"{reason}; mend the row, or make a store with scripts/prepare_data.py make --skip-bad {count} or more"
            )
        if count <= REPORTED_ROWS:
            logger.warning("skipped: %s", reason)


def batched(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Runs of rows, each cut off once it has BATCH_BYTES."""
    batch: list[Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += len(row.data)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class ShareRead:
    """The share of a source that is read up to a row, from 0 to 1, of rows in their order; None
    where there are no files."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._sizes = enumerate(source.sizes())
        self._file, self._size, self._before = -1, 0, 0

    @cached_property
    def _all(self) -> int:
        return sum(
            self._source.sizes()
        )  # asks for the size of every file, which is not needed unless it is reported

    def __call__(self, row: Row) -> float | None:
        while self._all and self._file < row.end.file:
            self._before += self._size
            self._file, self._size = next(self._sizes)
        return min(1.0, (self._before + row.disk) / self._all) if self._all else None
