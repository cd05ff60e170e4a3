"""Sources of text: a folder, a file, a Hugging Face dataset, or a named dataset.

A source is read in chunks, always the same ones in the same order. A chunk is about 64 MiB on
disk: several small files, or part of a large one. Compressed and parquet files are not split.

The libraries for parquet files and datasets are heavy and optional: imported when they are used.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.base.logger import logger
from torchtitan_lite.catalog.datasets import DATASETS, NamedDataset
from torchtitan_lite.config import expand_user

from .rows import (
    JSON_ENDINGS,
    JSONL_ENDINGS,
    MAX_ROW_BYTES,
    NO_FIELD,
    TOO_LONG,
    BadRow,
    Parser,
    Span,
    TextRow,
    read_text_span,
    reading,
    split_file,
)
from .store_files import tokens_file

PARQUET_ENDING = ".parquet"
TEXT_KINDS = product((".txt", ".md", ".rst", ".py"), ("", ".gz", ".zst"))
ENDINGS = (*map("".join, TEXT_KINDS), *JSONL_ENDINGS, PARQUET_ENDING)
ENDING = re.compile(r"(\.\w+)?\.(gz|zst|bz2|xz|zip)$|\.\w+$|$")
WHOLE_ENDINGS = (".gz", ".zst", PARQUET_ENDING)
BEGINNINGS = {
    ".gz": rb"\x1f\x8b",
    ".zst": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
    PARQUET_ENDING: b"PAR1",
}
KINDS = ".txt .md .rst .py .jsonl .json (each also with .gz or .zst) or .parquet"
ABOUT = re.compile(
    r"(readme|licen[cs]e|copying|notice|changelog|contributing)([._-].*)?\.(txt|md|rst)(\.\w+)?"
    r"|(config|dataset_(infos?|dict))\.json"
)
"""Names, in lower case, of files in a folder of text that are about it and not read."""
HF_PREFIX = "hf:"
CHUNK_BYTES = 2**26
BATCH_ROWS = 64  # of a table in memory at a time; few, because texts can be long

Chunk = Callable[[], Iterator[TextRow]]
"""A piece of a source: a call reads its rows. Raises DataError for a file that cannot be read."""


@dataclass
class Source:
    """Text that is read when it is asked for, always in the same order."""

    name: str
    parser: Parser
    chunks: Callable[[], Iterable[Chunk]]
    fingerprint_now: Callable[[], str]
    """Return what changes with the text, as far as names, sizes and modification times show."""

    def __post_init__(self) -> None:
        self.fingerprint = self.fingerprint_now()

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


def open_source(name: str, **options: Any) -> Source:
    """Open a dataset of DATASETS by its name, otherwise the text at a path.

    `options` are further fields of a NamedDataset. Raises DataError if there is nothing to read."""
    return build_source(name, DATASETS.get(name) or NamedDataset(name, **options))


def build_source(name: str, dataset: NamedDataset) -> Source:
    """Open a file, the readable files of a folder and its sub-folders, or a Hugging Face dataset.
    Raises DataError if there is nothing to read."""
    parser = Parser(dataset.text_field, "ignore" if dataset.skip_invalid_utf8 else "strict")
    if dataset.path.startswith(HF_PREFIX):
        chunks, fingerprint = _open_hf_dataset(dataset)
        return Source(dataset.path, parser, lambda: chunks, lambda: fingerprint)

    root = Path(dataset.path)
    with reading(root, OSError):
        if not root.exists():
            problem = "does not exist; name a folder, or a file of"
            raise DataError(f"{root.absolute()}: {problem} {KINDS}")
        is_readable = root.is_file() and root.name.lower().endswith(ENDINGS + JSON_ENDINGS)
        if not root.is_dir() and not is_readable:
            raise DataError(f"{root}: is no file of {KINDS}; name one, or a folder")
        if root.is_dir() and dataset.endings is None:
            _refuse_saved_dataset(root)
            # Beside other text, .json files are settings; alone, they are the text.
            endings = ENDINGS if next(_files(root, dataset), None) else JSON_ENDINGS
            dataset = replace(dataset, endings=endings)
            _check_others(root, dataset)
    return Source(name, parser, partial(_chunks, root, dataset), partial(_hash, root, dataset))


def _files(root: Path, dataset: NamedDataset) -> Iterator[Path]:
    """Yield a file, or the files of a folder and its sub-folders that are read, in the order of
    their paths."""
    if not root.is_dir():
        yield root
        return
    for path in _visible_files(root, dataset):
        if _is_read(path.name.lower(), dataset.endings or ENDINGS):
            if not path.is_file():
                raise DataError(f"{path}: is a broken link, or no regular file; remove it")
            yield path


def _visible_files(
    folder: Path, dataset: NamedDataset, above: tuple[tuple[int, int], ...] = ()
) -> Iterator[Path]:
    """Yield the files of a folder and its sub-folders that are not hidden, in the order of their
    paths, except those of token stores among the sub-folders.

    Memory holds the names of one folder per level. Links are followed, but not back into one of
    the folders `above`, given by device and inode."""
    try:
        status = folder.stat()
        with os.scandir(folder) as entries:
            names = sorted(f"{each.name}/" if each.is_dir() else each.name for each in entries)
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error
    above = (*above, (status.st_dev, status.st_ino))
    if above[-1] in above[:-1]:
        raise DataError(f"{folder}: is a link back to a folder that it is in; remove it")
    if above[:-1] and tokens_file(0) in names:  # also the store that is being made
        return

    for name in (name for name in names if not name.startswith(".")):
        path = folder / name
        if name.endswith("/"):
            if path.name not in dataset.skipped_folders:
                yield from _visible_files(path, dataset, above)
        else:
            yield path


def _is_read(name: str, endings: tuple[str, ...]) -> bool:
    return name.endswith(endings) and not ABOUT.fullmatch(name)


def _refuse_saved_dataset(folder: Path) -> None:
    """Raise DataError for a folder that `save_to_disk` of Hugging Face's datasets has written."""
    is_saved = (folder / "state.json").is_file() and any(folder.glob("*.arrow"))
    if is_saved or (folder / "dataset_dict.json").is_file():
        raise DataError(
            f"{folder}: is a dataset in Arrow files, as save_to_disk writes it; make a token store "
            f"of it: torchtitan-lite data make hf:{folder} STORE (--hf-split NAME if it has splits)"
        )


def _check_others(folder: Path, dataset: NamedDataset) -> None:
    """Log how many files of a folder are not read, by ending. Raises DataError if its .json files,
    not read beside other text, hold more than that text."""
    read, sizes = dataset.endings or ENDINGS, Counter[bool]()
    endings, twins = Counter[str](), 0
    for path in _visible_files(folder, dataset):
        name = path.name.lower()
        is_read = _is_read(name, read)
        if (is_read or _is_read(name, JSON_ENDINGS)) and path.is_file():
            sizes[is_read] += path.stat().st_size
        if is_read and path.suffix.lower() in (".gz", ".zst"):
            twins += path.with_suffix("").is_file()
        if ABOUT.fullmatch(name):
            endings["README and the like"] += 1
        elif not is_read and (match := ENDING.search(path.name)):
            endings[match[0]] += 1

    if sizes[False] > sizes[True]:
        raise DataError(
            f"{folder}: its .json files would not be read beside {sizes[True]:,} bytes of other "
            f"text, and have {sizes[False]:,} bytes; if they are the text, name a folder with only "
            "them, or rename them to .jsonl; if they are not, move them elsewhere"
        )
    if twins:
        logger.warning(f"{folder}: {twins:,} files are read twice: as X, and as X.gz or X.zst")
    counts = ", ".join(f"{count:,} {end or 'without one'}" for end, count in endings.most_common(9))
    if counts:
        total = endings.total()
        logger.warning(f"{folder}: {total:,} other files are not read: {counts}")


def _hash(root: Path, dataset: NamedDataset) -> str:
    """Hash the names, sizes and modification times of all files."""
    folder = root if root.is_dir() else root.parent
    digest = hashlib.sha256(dataset.text_field.encode())
    path = None
    with reading(root, OSError):
        for path in _files(root, dataset):
            status = path.stat()
            relative = path.relative_to(folder).as_posix()
            digest.update(os.fsencode(f"\n{relative}\0{status.st_size}\0{status.st_mtime_ns}"))
    if path is None:
        raise DataError(
            f"{root}: holds 0 files of {KINDS}, apart from hidden ones and a README or LICENSE; "
            "name a file, or a folder with some"
        )
    return digest.hexdigest()


def _chunks(root: Path, dataset: NamedDataset) -> Iterator[Chunk]:
    """Group the spans of all files until they have CHUNK_BYTES."""
    group: list[Span] = []
    size = 0
    for path in _files(root, dataset):
        whole = path.name.lower().endswith(WHOLE_ENDINGS)
        with reading(path, OSError):
            spans = [Span(path, 0, path.stat().st_size)] if whole else split_file(path, CHUNK_BYTES)
        for span in spans:
            group.append(span)
            size += span.end - span.begin
            if size >= CHUNK_BYTES:
                yield partial(_read_spans, group, dataset.text_field)
                group, size = [], 0
    if group:
        yield partial(_read_spans, group, dataset.text_field)


def _read_spans(spans: list[Span], text_field: str) -> Iterator[TextRow]:
    for span in spans:
        beginning = BEGINNINGS.get(span.path.suffix.lower(), b"")
        with reading(span.path, OSError), span.path.open("rb") as file:
            found = file.read(4)
        if found and not re.match(beginning, found):  # a stray file is one bad row
            problem = f"not a {span.path.suffix} file"
            yield TextRow(str(span.path), 0, 1, "text", b"", problem)
        elif span.path.name.lower().endswith(PARQUET_ENDING):
            yield from read_parquet(span.path, text_field)
        else:
            yield from read_text_span(span)


def read_parquet(path: Path, text_field: str) -> Iterator[TextRow]:
    """Yield the rows of a parquet file. Raises DataError if it is broken or has no such column."""
    pyarrow = _import("pyarrow", wanted_by=path, extra="parquet")
    parquet = _import("pyarrow.parquet", wanted_by=path, extra="parquet")
    with (
        reading(path, Exception),  # a broken file can raise anything
        parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file,
    ):
        columns = file.schema_arrow.names
        if text_field not in columns:
            problem = NO_FIELD.format("column", text_field, f"{columns!r:.100}")
            raise DataError(f"{path}: has {problem}")
        batches = file.iter_batches(BATCH_ROWS, columns=[text_field])
        binary = pyarrow.large_binary()
        values = (value for batch in batches for value in batch.column(0).cast(binary).to_pylist())
        yield from _table_rows(values, str(path), text_field)


def _open_hf_dataset(row: NamedDataset) -> tuple[list[Chunk], str]:
    """Return the chunks of a Hugging Face dataset, and its fingerprint.

    Its name is a folder written by `save_to_disk` (memory-mapped), a folder of data files, or a
    dataset on the hub (both streamed, a chunk for each data file). Raises DataError."""
    datasets = _import("datasets", wanted_by=row.path, extra="hf")
    datasets.disable_progress_bars()  # they move the cursor
    name, split = row.path.removeprefix(HF_PREFIX), row.hf_split

    with reading(row.path, Exception):  # the library lets errors of many libraries pass
        folder = Path(expand_user(name))
        saved = [path for path in (folder, folder / split) if (path / "state.json").is_file()]
        if saved:
            stored = datasets.load_from_disk(saved[0])
            pieces = min(len(stored), stored.data.nbytes // CHUNK_BYTES) or 1
            dataset, state = stored.to_iterable_dataset(pieces), stored._fingerprint
        else:
            path = str(folder) if folder.exists() else name
            try:
                builder = datasets.load_dataset_builder(path, row.hf_name)
            except ConnectionError as error:
                fix = "check the network, or name a downloaded copy in HF_HOME: hf:FOLDER"
                raise DataError(f"{row.path}: {error}; {fix}") from error
            dataset = builder.as_streaming_dataset(split=split)
            state = f"{builder.hash} {builder.config_id}"

        # One chunk for each part of the dataset.
        columns = dataset.column_names
        if columns is not None and row.text_field not in columns:
            problem = NO_FIELD.format("column", row.text_field, f"{columns!r:.100}")
            raise DataError(f"{row.path}: has {problem}")
        dataset = dataset.select_columns([row.text_field])
        count = dataset.num_shards
        names = [row.path] if count == 1 else [f"{row.path} part {i + 1}" for i in range(count)]
        chunks: list[Chunk] = [
            partial(_read_hf_piece, dataset.shard(count, i), name, row.text_field)
            for i, name in enumerate(names)
        ]
        content = f"{row.path}\n{state} {split}\n{row.text_field}"
        return chunks, hashlib.sha256(content.encode()).hexdigest()


def _read_hf_piece(piece: Any, name: str, text_field: str) -> Iterator[TextRow]:
    with reading(name, Exception):  # as above
        yield from _table_rows((row[text_field] for row in piece), name, text_field)


def _table_rows(values: Iterable[object], file: str, text_field: str) -> Iterator[TextRow]:
    for line, value in enumerate(values, start=1):
        data, problem = value.encode() if isinstance(value, str) else value, ""
        if not isinstance(data, bytes):
            data, problem = b"", f'field "{text_field}" holds {type(value).__name__}, not a string'
        elif len(data) > MAX_ROW_BYTES:
            data, problem = b"", TOO_LONG.format(MAX_ROW_BYTES)
        yield TextRow(file, 0, line, "text", data, problem)


def _import(module: str, *, wanted_by: object, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        fix = f'pip install "torchtitan-lite[{extra}]"'
        raise DataError(f"{wanted_by}: needs {package}; {fix}") from error
