"""Rows, the pieces of a source that hold one document each, and reading them from text files.

Reading rows is cheap and parsing them is not, so the main process reads them as raw bytes and
worker processes parse them. Workers import this file, so it imports little. Memory does not grow
with the files, compressed or not.
"""

import gzip
import io
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from torchtitan_lite.errors import DataError

RowFormat = Literal["text", "jsonl"]
JSONL_ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst")
MAX_ROW_BYTES = 2**24
"""Longer rows are bad."""
PART_BYTES = 2**22
"""A longer text is cut into parts, each at the first line end after so many bytes."""
READ_BYTES = 2**20
"""Bytes read at a time where a whole row is not needed."""
ZSTD_READ_BYTES = 2**10  # can be 32 MiB when decompressed


class TextRow(NamedTuple):
    """A piece of a file: UTF-8 text or, in format jsonl, a JSON object with a field of text."""

    file: str
    begin: int
    """Byte of the file at which `line` starts to count."""
    line: int
    format: RowFormat
    data: bytes
    problem: str = ""
    """Why the reader could not read the row; `data` is empty then."""


class BadRow(ValueError):
    """A row without text. The message is `file, line N: reason`."""

    def __init__(self, file: str, begin: int, line: int, reason: str) -> None:
        super().__init__(file, begin, line, reason)  # the arguments are what is pickled

    def __str__(self) -> str:
        file, begin, line, reason = self.args
        if begin:  # only rows that are reported pay for counting the lines in front of their chunk
            with reading(file, OSError), Path(file).open("rb") as content:
                sizes = (min(READ_BYTES, begin - at) for at in range(0, begin, READ_BYTES))
                line += sum(content.read(size).count(b"\n") for size in sizes)
        return f"{file}, line {line}: {reason}"


@dataclass(frozen=True)
class Parser:
    """Callable that returns the text of a row, never empty. Raises BadRow."""

    text_field: str
    decode_errors: Literal["strict", "ignore"] = "strict"

    def __call__(self, row: TextRow) -> str:
        line = row.line
        try:
            if row.problem:
                raise ValueError(row.problem)
            text = row.data.decode("utf-8", self.decode_errors)
            if row.format == "jsonl":
                text = _string_field(text, self.text_field)
            if not text:
                raise ValueError("empty text")
            return text
        except UnicodeDecodeError as error:
            line += row.data.count(b"\n", 0, error.start)
            reason = f"not UTF-8: byte 0x{row.data[error.start]:02x}, {error.reason}"
        except ValueError as error:
            reason = str(error)
        raise BadRow(row.file, row.begin, line, reason)


def _string_field(row: str, name: str) -> str:
    """Return the string field `name` of a JSON object. Raises ValueError if there is none."""
    try:
        fields = json.loads(row)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from error
    except RecursionError as error:
        raise ValueError("nested too deep") from error

    if not isinstance(fields, dict):
        raise ValueError(f"a JSON {type(fields).__name__}, not an object")
    if name not in fields:
        raise ValueError(f'no field "{name}" among {list(fields)!r:.100}')
    text = fields[name]
    if not isinstance(text, str):
        raise ValueError(f'field "{name}" holds {type(text).__name__}, not a string')
    text.encode()  # half a surrogate pair is valid JSON, but not valid text
    return text


@contextmanager
def reading(name: object, *errors: type[Exception]) -> Iterator[None]:
    """Context manager that turns these errors into `DataError: NAME: cannot be read: reason`."""
    try:
        yield
    except errors as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{name}: cannot be read: {reason}") from error


class Span(NamedTuple):
    """Bytes `begin` to `end` of a file. A compressed file is one span."""

    path: Path
    begin: int
    end: int


def split_file(path: Path, span_bytes: int) -> Iterator[Span]:
    """Split an uncompressed file into spans of at least `span_bytes`, the last one excepted.

    A span ends at a line end where a part ends too, so it holds the same rows wherever reading
    starts.
    """
    size = path.stat().st_size
    begin = end = 0
    with path.open("rb") as file:
        while end < size:
            file.seek(end + PART_BYTES)
            _skip_line(file)
            end = min(file.tell(), size)
            if end - begin >= span_bytes or end == size:
                yield Span(path, begin, end)
                begin = end


def read_text_span(span: Span) -> Iterator[TextRow]:
    """Yield the rows of a span: parts of a text, or lines of a .jsonl file that are not blank.

    Byte order marks at the start of a file and of .jsonl rows are dropped. Raises DataError.
    """
    path, offset, line = span.path, span.begin, 1
    form: RowFormat = "jsonl" if path.name.lower().endswith(JSONL_ENDINGS) else "text"
    with (
        reading(path, OSError, EOFError, zlib.error),
        path.open("rb") as raw,
        _decompress(raw, path.suffix) as file,
    ):
        compressed = file is not raw
        if compressed and not raw.peek(1):
            raise EOFError("Compressed file ended before its start")
        raw.seek(span.begin)

        for data, length in _pieces(file, part_bytes=PART_BYTES if form == "text" else 0):
            problem = "" if data else f"longer than {MAX_ROW_BYTES} bytes"
            lines = max(1, data.count(b"\n"))
            if form == "jsonl" or offset == 0:
                data = data.removeprefix(BOM_UTF8)
            blank = not data or (form == "jsonl" and data.isspace())
            if problem or not blank:
                yield TextRow(str(path), span.begin, line, form, data, problem)
            offset, line = offset + length, line + lines
            if not compressed and offset >= span.end:
                return


def _pieces(file: io.BufferedIOBase, *, part_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Cut a stream at the first line end after every `part_bytes` bytes; yield data and length.

    A line longer than MAX_ROW_BYTES is a piece by itself, skipped and yielded as b"".
    """
    while True:
        head = file.read(part_bytes)
        line_start = head.rfind(b"\n") + 1  # of the last line in `head`, which `tail` completes
        room = MAX_ROW_BYTES - (len(head) - line_start)
        tail = file.readline(room + 1)

        if len(tail) > room:
            if line_start:
                yield head[:line_start], line_start
            skipped = 0 if tail.endswith(b"\n") else _skip_line(file)
            yield b"", len(head) - line_start + len(tail) + skipped
        elif head or tail:
            yield head + tail, len(head) + len(tail)
        else:
            return


def _skip_line(file: io.BufferedIOBase) -> int:
    """Read to the end of the line, in bounded memory, and return the number of bytes."""
    length = 0
    while piece := file.readline(READ_BYTES):
        length += len(piece)
        if piece.endswith(b"\n"):
            break
    return length


def _decompress(raw: io.BufferedReader, suffix: str) -> io.BufferedIOBase:
    if suffix.lower() == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if suffix.lower() == ".zst":
        return io.BufferedReader(_ZstdFile(raw), READ_BYTES)
    return raw


class _ZstdFile(io.RawIOBase):
    """The decompressed bytes of a .zst file.

    Raises EOFError for a file that is cut off, which zstandard's own reader takes for complete.
    """

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard  # few sources need it

        self._raw, self._zstandard = raw, zstandard
        self._frame: Any = None
        self._piece, self._rest = memoryview(b""), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._piece:
            data = self._rest or self._raw.read(ZSTD_READ_BYTES)
            if not data and self._frame:
                raise EOFError("Compressed file ended before the end of a frame")
            if not data:
                return 0
            frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
            try:
                self._piece = memoryview(frame.decompress(data))
            except self._zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            self._frame, self._rest = None if frame.eof else frame, frame.unused_data

        count = min(len(buffer), len(self._piece))
        buffer[:count], self._piece = self._piece[:count], self._piece[count:]
        return count
