"""Sources of text: a folder, a file, a Hugging Face dataset, or a named dataset.

A source is read in chunks, always the same ones in the same order. A chunk is a large file, or
small ones that have about 256 MiB on disk.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.base.logger import logger
from torchtitan_lite.base.paths import expand_user
from torchtitan_lite.catalog.datasets import DATASETS, HF_PREFIX, NamedDataset

from .rows import COMPRESSED, Row, build_row, check_string, grouped, read_jsonl, read_text, reading
from .token_store import tokens_file

TEXT_KINDS = dict.fromkeys((".txt", ".md", ".rst", ".py"), read_text)
TEXT_KINDS |= dict.fromkeys((".jsonl", ".json"), read_jsonl)
READERS = {
    kind + packed: reader for kind, reader in TEXT_KINDS.items() for packed in ("", *COMPRESSED)
}
"""The reader of a file, by the ending of its name."""
KINDS = f"{' '.join(TEXT_KINDS)} (each also with .gz or .zst)"
OTHERS = "torchtitan-lite data make hf:FOLDER STORE reads .parquet"
CHUNK_BYTES = 2**28

Chunk = Callable[[], Iterator[Row]]
"""A piece of a source: a call reads its rows. Raises DataError for a file that cannot be read."""


@dataclass
class Source:
    """Text that is read when it is asked for, always in the same order."""

    name: str
    chunks: Callable[[], Iterable[Chunk]]
    fingerprint_now: Callable[[], str]
    """Return what changes with the text, as far as names, sizes and modification times show."""

    def __post_init__(self) -> None:
        self.fingerprint = self.fingerprint_now()


def open_source(name: str, **options: Any) -> Source:
    """Open a dataset of DATASETS by its name, otherwise the text at a path. `options` are further
    fields of a NamedDataset. Raises DataError if there is nothing to read."""
    return build_source(name, DATASETS.get(name) or NamedDataset(name, **options))


def build_source(name: str, dataset: NamedDataset) -> Source:
    """Open a file, the files of READERS in a folder and its sub-folders, or a Hugging Face dataset.
    Raises DataError if there is nothing to read."""
    if dataset.path.startswith(HF_PREFIX):
        return open_hf_dataset(dataset)

    root = Path(dataset.path)
    with reading(root, OSError):
        if not root.exists():
            problem = "does not exist; name a folder, or a file of"
            raise DataError(f"{root.absolute()}: {problem} {KINDS}")
        if not root.is_dir() and not (root.is_file() and _is_read(root, dataset)):
            raise DataError(f"{root}: is no file of {KINDS}; name one, or a folder; {OTHERS}")
        others = 0
        if dataset.endings is None:
            others = sum(not _is_read(path, dataset) for path in _all_files(root, dataset))
    if others:
        logger.warning(f"{root}: {others:,} files are not read: they are no {KINDS}; {OTHERS}")
    return Source(name, partial(_chunks, root, dataset), partial(_hash, root, dataset))


def _is_read(path: Path, dataset: NamedDataset) -> bool:
    return path.name.lower().endswith(dataset.endings or tuple(READERS))


def _files(root: Path, dataset: NamedDataset) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield a file, or those of a folder that are read, and its status, in the order of paths."""
    with reading(root, OSError):
        for path in _all_files(root, dataset):
            if not _is_read(path, dataset):
                continue
            if not path.is_file():
                raise DataError(f"{path}: is missing, a broken link or no regular file; remove it")
            yield path, path.stat()


def _all_files(path: Path, dataset: NamedDataset) -> Iterator[Path]:
    """Yield a file, or those of a folder and its sub-folders, in the order of their paths, except
    hidden ones and those of token stores. Links are followed; one that leads back is an error."""
    if not path.is_dir():
        yield path
        return
    with reading(path, OSError), os.scandir(path) as entries:
        names = sorted(f"{each.name}/" if each.is_dir() else each.name for each in entries)
    if tokens_file(0) in names:  # also the store that is being made
        return
    for name in names:
        if name.startswith(".") or name.rstrip("/") in dataset.skipped_folders:
            continue
        if name.endswith("/"):
            yield from _all_files(path / name, dataset)
        else:
            yield path / name


def _hash(root: Path, dataset: NamedDataset) -> str:
    """Hash the names, sizes and modification times of all files."""
    folder = root if root.is_dir() else root.parent
    digest = hashlib.sha256(dataset.text_field.encode())
    path = None
    for path, status in _files(root, dataset):
        relative = path.relative_to(folder).as_posix()
        digest.update(os.fsencode(f"\n{relative}\0{status.st_size}\0{status.st_mtime_ns}"))
    if path is None:
        problem = f"holds 0 files of {KINDS} that are not hidden; name another"
        raise DataError(f"{root}: {problem}; {OTHERS}")
    return digest.hexdigest()


def _chunks(root: Path, dataset: NamedDataset) -> Iterator[Chunk]:
    """Group the files until they have CHUNK_BYTES."""
    sized = ((path, status.st_size) for path, status in _files(root, dataset))
    for group in grouped(sized, CHUNK_BYTES):
        yield partial(_read_files, group, dataset)


def _read_files(paths: list[Path], dataset: NamedDataset) -> Iterator[Row]:
    for path in paths:
        name = path.name.lower()
        reader = next(reader for ending, reader in READERS.items() if name.endswith(ending))
        yield from reader(path, dataset)


def open_hf_dataset(dataset: NamedDataset) -> Source:
    """Open a dataset on the hub, or a folder of data files, as a stream. A chunk is one of its
    files. Raises DataError."""
    try:
        import datasets  # heavy, of the [hf] extra
    except ImportError as error:
        fix = 'pip install "torchtitan-lite[hf]"'
        raise DataError(f"{dataset.path}: needs the package datasets; {fix}") from error

    datasets.disable_progress_bars()  # they move the cursor
    name, field = dataset.path.removeprefix(HF_PREFIX), dataset.text_field
    with reading(dataset.path, Exception):  # a broken file can raise any
        folder = Path(expand_user(name))
        path = str(folder) if folder.exists() else name
        builder = datasets.load_dataset_builder(path, dataset.hf_name)
        stream = builder.as_streaming_dataset(split=dataset.hf_split).select_columns([field])
        shards = [stream.shard(stream.num_shards, number) for number in range(stream.num_shards)]
        inputs = f"{dataset.path}\n{builder.hash} {builder.config_id} {dataset.hf_split}\n{field}"
    chunks = [partial(_read_shard, dataset, *each) for each in enumerate(shards, start=1)]
    fingerprint = hashlib.sha256(inputs.encode()).hexdigest()
    return Source(dataset.path, lambda: chunks, lambda: fingerprint)


def _read_shard(dataset: NamedDataset, number: int, shard: Any) -> Iterator[Row]:
    name, field = f"{dataset.path} part {number}", dataset.text_field
    with reading(name, Exception):
        for line, row in enumerate(shard, start=1):
            yield build_row(f"{name}, line {line}", check_string, row[field], field)
