"""Text in: the documents of a folder, a file, a Hugging Face dataset, or the running Python's own
standard library."""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torchtitan_lite.errors import DataError

from .columns import open_dataset, read_dataset, read_parquet
from .rows import START, BadRow, Parser, Position, Row, reading
from .text_files import JSONL_ENDINGS, TEXT_ENDINGS, read_text_file

PARQUET_ENDING = ".parquet"
ENDINGS = (*TEXT_ENDINGS, *JSONL_ENDINGS, PARQUET_ENDING)
KINDS = ".txt .md .rst .py .jsonl (each also with .gz or .zst) or .parquet"
HF_PREFIX = "hf:"
NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class Source:
    """Text that is read as it is asked for, always in the same order. `fingerprint` changes when
    the text does, as far as names, sizes and times of modification tell."""

    name: str
    fingerprint: str
    parser: Parser
    read: Callable[[Position], Iterator[Row]]
    files: Callable[[], Iterable[Path]] = tuple
    fingerprint_now: Callable[[], str] | None = None
    """The fingerprint of the text as it is by now; None where it cannot change."""

    def rows(self, start: Position = START) -> Iterator[Row]:
        """The rows after a position. Raises DataError for a file that cannot be read."""
        return self.read(start)

    def documents(self) -> Iterator[str]:
        """The text of every row. Raises DataError also for the first row without text, and if there
        is no row."""
        row = None
        for row in self.rows():
            try:
                yield self.parser(row)
            except BadRow as error:
                raise DataError(f"{error}; mend it") from error
        if row is None:
            raise DataError(f"{self.name}: holds no text")

    def sizes(self) -> Iterator[int]:
        """Bytes on disk of each of the files, by their numbers in positions; of none where there
        are no files."""
        return (path.stat().st_size for path in self.files())


def build_source(
    path: str | None,
    *,
    text_field: str = "text",
    hf_name: str | None = None,
    hf_split: str = "train",
) -> Source:
    """The text at a path: of all files of a folder and its sub-folders that are of a readable kind,
    or of one file; the source text of the running Python's library for None; and after `hf:` that
    of a Hugging Face dataset, by folder or by name, of which `hf_name` is the configuration and
    `hf_split` the split. .jsonl files, parquet files and datasets have the text in `text_field` of
    each row. Raises DataError if there is nothing to read."""
    if path is None:
        library = Path(sysconfig.get_path("stdlib"))
        modules = partial(_walk, library, endings=(".py",), passed_over=NOT_THE_LIBRARY)
        return _of_files(
            "pystdlib", modules, root=library, parser=Parser("text", decode_errors="ignore")
        )
    parser = Parser(text_field)
    if path.startswith(HF_PREFIX):
        name = path.removeprefix(HF_PREFIX)
        dataset, state = open_dataset(name, config=hf_name, split=hf_split, text_field=text_field)
        fingerprint = hashlib.sha256(f"{path}\n{state}\n{text_field}".encode()).hexdigest()
        return Source(
            path,
            fingerprint,
            parser,
            partial(read_dataset, dataset, name=path, text_field=text_field),
        )
    root = Path(path).expanduser()
    if not root.exists():
        raise DataError(f"{root.absolute()}: does not exist; name a folder, or a file of {KINDS}")
    if root.is_dir():
        return _of_files(path, partial(_walk, root), root=root, parser=parser)
    if not (root.is_file() and root.name.lower().endswith(ENDINGS)):
        raise DataError(f"{root}: is no file of {KINDS}; name one, or a folder")
    return _of_files(path, lambda: [root], root=root.parent, parser=parser)


def _of_files(
    name: str, files: Callable[[], Iterable[Path]], *, root: Path, parser: Parser
) -> Source:
    fingerprint_now = partial(_fingerprint, files, root=root, text_field=parser.text_field)
    read = partial(_read_files, files, text_field=parser.text_field)
    return Source(name, fingerprint_now(), parser, read, files, fingerprint_now)


def _fingerprint(files: Callable[[], Iterable[Path]], *, root: Path, text_field: str) -> str:
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


def _read_files(
    files: Callable[[], Iterable[Path]], start: Position, *, text_field: str
) -> Iterator[Row]:
    for number, path in enumerate(files()):
        if number >= start.file:
            begin = start if number == start.file else Position(number, START.offset, START.line)
            if path.name.lower().endswith(PARQUET_ENDING):
                yield from read_parquet(path, begin, text_field=text_field)
            else:
                yield from read_text_file(path, begin)


def _walk(
    folder: Path,
    *,
    endings: tuple[str, ...] = ENDINGS,
    passed_over: Set[str] = frozenset(),
    above: tuple[tuple[int, int], ...] = (),
) -> Iterator[Path]:
    """The files with such endings in a folder and those below it, in the order of their paths as
    strings; only one folder's names are in memory for each level. Links are followed, but not back
    into a folder `above`."""
    try:
        status = folder.stat()
        with os.scandir(folder) as entries:
            names = sorted(entry.name + "/" * entry.is_dir() for entry in entries)
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error
    here = (status.st_dev, status.st_ino)
    if here in above:
        raise DataError(f"{folder}: is a link back to a folder that it is in; remove it")
    for name in names:
        path = folder / name
        if name.endswith("/"):
            if path.name not in passed_over:
                yield from _walk(
                    path, endings=endings, passed_over=passed_over, above=(*above, here)
                )
        elif name.lower().endswith(endings):
            if not path.is_file():
                raise DataError(f"{path}: is a broken link, or no regular file; remove it")
            yield path
