"""Sources of text: a folder, a file, a Hugging Face dataset, or a named dataset.

A source is read in chunks, always the same ones in the same order. A chunk is about 64 MiB on
disk: several small files, or part of a large one. Compressed and parquet files are not split.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan_lite.errors import DataError

from .columns import open_dataset, read_dataset, read_parquet
from .datasets import DATASETS
from .rows import BadRow, Parser, TextRow, reading
from .text_files import JSONL_ENDINGS, TEXT_ENDINGS, Span, read_text_span, split_file

PARQUET_ENDING = ".parquet"
WHOLE_ENDINGS = (".gz", ".zst", PARQUET_ENDING)
ENDINGS = (*TEXT_ENDINGS, *JSONL_ENDINGS, PARQUET_ENDING)
KINDS = ".txt .md .rst .py .jsonl (each also with .gz or .zst) or .parquet"
HF_PREFIX = "hf:"
CHUNK_BYTES = 2**26


Chunk = Callable[[], Iterator[TextRow]]
"""A piece of a source: a call reads its rows. Raises DataError for a file that cannot be read."""


@dataclass(frozen=True)
class Source:
    """Text that is read when it is asked for, always in the same order."""

    name: str
    parser: Parser
    chunks: Callable[[], Iterable[Chunk]]
    fingerprint: str
    """Changes with the text, as far as names, sizes and modification times show."""
    fingerprint_now: Callable[[], str]
    """Compute the fingerprint again, to see whether the text has changed."""

    def documents(self) -> Iterator[str]:
        """Yield the text of every row. Raises DataError for a bad row, and if there are none."""
        row = None
        for row in (row for chunk in self.chunks() for row in chunk()):
            try:
                yield self.parser(row)
            except BadRow as error:
                raise DataError(f"{error}; fix it") from error
        if row is None:
            raise DataError(f"{self.name}: holds no text")


def open_source(name: str, *, text_field: str = "text", **hf_options: Any) -> Source:
    """Open a dataset of DATASETS by its name, or else `build_source`."""
    if name in DATASETS:
        return build_named_source(name)
    return build_source(name, text_field=text_field, **hf_options)


def build_source(
    path: str, *, text_field: str = "text", hf_name: str | None = None, hf_split: str = "train"
) -> Source:
    """Open the text at a path: a file, the readable files of a folder and its sub-folders, or after
    `hf:` a Hugging Face dataset. Raises DataError if there is nothing to read.

    Rows of .jsonl files, parquet files and datasets have their text in `text_field`.
    """
    if path.startswith(HF_PREFIX):
        return _hf_source(path, text_field=text_field, config=hf_name, split=hf_split)
    root = Path(path).expanduser()
    if not root.exists():
        raise DataError(f"{root.absolute()}: does not exist; name a folder, or a file of {KINDS}")
    if root.is_dir():
        return _files_source(path, partial(_walk, root), root, Parser(text_field))
    if not (root.is_file() and root.name.lower().endswith(ENDINGS)):
        raise DataError(f"{root}: is no file of {KINDS}; name one, or a folder")
    return _files_source(path, lambda: [root], root.parent, Parser(text_field))


def build_named_source(name: str) -> Source:
    """Open one of DATASETS. Raises DataError if there is nothing to read."""
    row = DATASETS[name]
    if row.path.startswith(HF_PREFIX):
        return build_source(row.path, text_field=row.text_field, hf_name=row.hf_name)
    root = Path(row.path).expanduser()
    files = partial(_walk, root, endings=row.endings or ENDINGS, skipped=row.skipped_folders)
    parser = Parser(row.text_field, "ignore" if row.skip_invalid_utf8 else "strict")
    return _files_source(name, files, root, parser)


def _hf_source(path: str, *, text_field: str, config: str | None, split: str) -> Source:
    name = path.removeprefix(HF_PREFIX)
    pieces, state = open_dataset(name, config=config, split=split, text_field=text_field)
    fingerprint = hashlib.sha256(f"{path}\n{state}\n{text_field}".encode()).hexdigest()
    names = [path] if len(pieces) == 1 else [f"{path} part {i + 1}" for i in range(len(pieces))]
    chunks = [
        partial(read_dataset, piece, name, text_field)
        for piece, name in zip(pieces, names, strict=True)
    ]
    return Source(path, Parser(text_field), lambda: chunks, fingerprint, lambda: fingerprint)


def _files_source(
    name: str, files: Callable[[], Iterable[Path]], root: Path, parser: Parser
) -> Source:
    now = partial(_fingerprint, files, root, parser.text_field)
    return Source(name, parser, partial(_chunks, files, parser.text_field), now(), now)


def _fingerprint(files: Callable[[], Iterable[Path]], root: Path, text_field: str) -> str:
    digest = hashlib.sha256(text_field.encode())
    path = None
    with reading(root, OSError):
        for path in files():
            status = path.stat()
            relative = path.relative_to(root).as_posix()
            digest.update(os.fsencode(f"\n{relative}\0{status.st_size}\0{status.st_mtime_ns}"))
    if path is None:
        raise DataError(f"{root}: holds 0 files of {KINDS}; name a file, or a folder with some")
    return digest.hexdigest()


def _chunks(files: Callable[[], Iterable[Path]], text_field: str) -> Iterator[Chunk]:
    """Group the spans of all files until they have CHUNK_BYTES."""
    group: list[Span] = []
    size = 0
    for span in _spans(files()):
        group.append(span)
        size += span.end - span.begin
        if size >= CHUNK_BYTES:
            yield partial(_read_spans, group, text_field)
            group, size = [], 0
    if group:
        yield partial(_read_spans, group, text_field)


def _spans(files: Iterable[Path]) -> Iterator[Span]:
    for path in files:
        with reading(path, OSError):
            if path.name.lower().endswith(WHOLE_ENDINGS):
                yield Span(path, 0, path.stat().st_size)
            else:
                yield from split_file(path, CHUNK_BYTES)


def _read_spans(spans: list[Span], text_field: str) -> Iterator[TextRow]:
    for span in spans:
        if span.path.name.lower().endswith(PARQUET_ENDING):
            yield from read_parquet(span.path, text_field)
        else:
            yield from read_text_span(span)


def _walk(
    folder: Path,
    *,
    endings: tuple[str, ...] = ENDINGS,
    skipped: Set[str] = frozenset(),
    above: tuple[tuple[int, int], ...] = (),
) -> Iterator[Path]:
    """Yield the files of a folder and its sub-folders, in the order of their paths as strings.

    Memory holds the names of one folder per level. Links are followed, but not back into one of
    the folders `above`, given by device and inode.
    """
    try:
        status = folder.stat()
        with os.scandir(folder) as entries:
            names = sorted(entry.name + "/" * entry.is_dir() for entry in entries)
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error
    above = (*above, (status.st_dev, status.st_ino))
    if above[-1] in above[:-1]:
        raise DataError(f"{folder}: is a link back to a folder that it is in; remove it")

    for name in names:
        path = folder / name
        if name.endswith("/"):
            if path.name not in skipped:
                yield from _walk(path, endings=endings, skipped=skipped, above=above)
        elif name.lower().endswith(endings):
            if not path.is_file():
                raise DataError(f"{path}: is a broken link, or no regular file; remove it")
            yield path
