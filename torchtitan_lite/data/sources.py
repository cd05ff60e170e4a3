"""Text in: the documents of a folder, of a file, or of the running Python's own standard library."""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from torchtitan_lite.errors import DataError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
ROWS_SUFFIX = ".jsonl"
READABLE = (*TEXT_SUFFIXES, ROWS_SUFFIX)
PART_BYTES = 2**22
NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


class Source:
    """Those of the named files that are readable, sorted. `fingerprint` changes when the name, size or time of
    modification of one does. `setting` leads every message. Raises DataError if there is none."""

    def __init__(
        self,
        name: str,
        *,
        setting: str,
        root: Path,
        files: Iterable[str],
        text_field: str = "text",
        decode_errors: str = "strict",
    ) -> None:
        self.name = name
        self._setting = setting
        self._text_field = text_field
        self._decode_errors = decode_errors
        self._paths: list[Path] = []
        digest = hashlib.sha256(text_field.encode())
        try:
            for file in sorted(files):
                path = root / file
                if path.suffix.lower() in READABLE and path.is_file():
                    self._paths.append(path)
                    digest.update(os.fsencode(f"\n{file}\0{path.stat().st_size}\0{path.stat().st_mtime_ns}"))
        except OSError as error:
            raise DataError(f"{setting}: {error.filename} cannot be read: {error.strerror}") from error
        if not self._paths:
            raise DataError(f"{setting}: {root} holds 0 files of the kinds {' '.join(READABLE)}; name one, or a folder")
        self.fingerprint = digest.hexdigest()

    def documents(self) -> Iterator[str]:
        """Every text that is not empty, read as it is asked for: each row of a .jsonl file is a document, any other
        file is one, or several, cut at line ends, where it is longer than PART_BYTES. Raises DataError with file and
        line for what is no text, and at the end if there was no document."""
        documents = 0
        for path in self._paths:
            try:
                for text in self._rows(path) if path.suffix.lower() == ROWS_SUFFIX else self._parts(path):
                    if text:
                        documents += 1
                        yield text
            except OSError as error:
                raise DataError(f"{self._setting}: {path} cannot be read: {error.strerror}") from error
        if not documents:
            raise DataError(f"{self._setting}: 0 bytes of text in {len(self._paths)} files; name files with text")

    def _parts(self, path: Path) -> Iterator[str]:
        lines_before = 0
        with path.open("rb") as file:
            while lines := file.readlines(PART_BYTES):
                part = b"".join(lines)
                try:
                    text = part.decode("utf-8-sig", self._decode_errors)
                except UnicodeDecodeError as error:
                    line = lines_before + part.count(b"\n", 0, error.start) + 1
                    raise DataError(f"{self._setting}: {path}, line {line}: {error}; make it UTF-8") from error
                yield text
                lines_before += len(lines)

    def _rows(self, path: Path) -> Iterator[str]:
        with path.open("rb") as file:
            for line, row in enumerate(file, start=1):
                if row.strip():
                    try:
                        text = self._field_of(row)
                    except (ValueError, RecursionError) as error:
                        raise DataError(f"{self._setting}: {path}, line {line}: {error}; mend the row") from error
                    yield text

    def _field_of(self, row: bytes) -> str:
        fields = json.loads(row.decode("utf-8-sig"))
        text = fields.get(self._text_field) if isinstance(fields, dict) else None
        if not isinstance(text, str):
            raise ValueError(f'text_field = "{self._text_field}" names no string in {fields!r:.80}')
        text.encode()  # half a surrogate pair is valid JSON, but no text
        return text


def build_source(
    dataset: str,
    dataset_path: str | None,
    *,
    text_field: str = "text",
    key: str = "[training] dataset_path",
) -> Source:
    """The text at `dataset_path`: one file, or all files of a folder and its sub-folders. .txt, .md, .rst and .py
    files are text, .jsonl files have it in the `text_field` of each row, others are passed over. Without a path, the
    text of `dataset`. `key` is what messages call the path. Raises DataError for a path that is not there."""
    if dataset_path is None:
        assert dataset == "pystdlib", f"there is no corpus {dataset}"
        library = Path(sysconfig.get_path("stdlib"))
        modules = (file for file in _walk(library, skip=NOT_THE_LIBRARY) if file.endswith(".py"))
        setting = f'[training] dataset = "{dataset}"'
        return Source(dataset, setting=setting, root=library, files=modules, decode_errors="ignore")
    setting = f'{key} = "{dataset_path}"'
    path = Path(dataset_path).expanduser()
    if not path.exists():
        raise DataError(f"{setting}: {path.absolute()} does not exist; name a folder, a .txt or a .jsonl file")
    root, files = (path, _walk(path)) if path.is_dir() else (path.parent, iter([path.name]))
    return Source(dataset_path, setting=setting, root=root, files=files, text_field=text_field)


def _walk(root: Path, *, skip: Set[str] = frozenset()) -> Iterator[str]:
    for folder, subfolders, files in os.walk(root, onerror=_raise):
        subfolders[:] = set(subfolders) - skip
        yield from (Path(folder, file).relative_to(root).as_posix() for file in files)


def _raise(error: OSError) -> None:
    """Without this, os.walk passes over what it cannot read, and training would silently lose it."""
    raise error
