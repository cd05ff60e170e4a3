"""Rows, the pieces of a source that hold one document each, and reading them from text files.

Reading rows is cheap and parsing them is not, so the main process reads them as raw bytes and
worker processes parse them. Workers import this file, so it imports little. Memory does not grow
with the files, compressed or not.
"""

import gzip
import json
import re
import sys
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from torchtitan_lite.base.errors import DataError

RowFormat = Literal["text", "jsonl"]
JSON_ENDINGS = (".json", ".json.gz", ".json.zst")
"""Hugging Face calls files of JSON lines so."""
JSONL_ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst")
MAX_ROW_BYTES = 2**24
"""Longer rows are bad."""
TOO_LONG = "longer than {} bytes"
NO_FIELD = 'no {} "{}" among {}; --text-field or [training] text_field names it'
ONE_LIST = (
    "a JSON list, and rows are objects, one a line; this makes a file of them: "
    "jq -c '.[]' LIST.json > ROWS.jsonl"
)
MAX_ZSTD_WINDOW = 2**31
"""Bytes: the longest window, of zstd --long=31. Its decoder takes as much memory."""
PART_BYTES = 2**22
"""Files are read in parts: a part ends at the first line end after so many bytes. At most
MAX_ROW_BYTES."""
READ_BYTES = 2**20
ZSTD_READ_BYTES = 2**10  # can be 32 MiB when decompressed
LIST_OF_OBJECTS = re.compile(rb"\s*\[\s*\{")
NOT_BLANK_LINE = re.compile(rb"\S[^\n]*\n?")


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
        if begin:  # only rows that are reported pay for counting the lines in front of their span
            with reading(file, OSError), Path(file).open("rb") as content:
                line += sum(block.count(b"\n") for block in _blocks(content, begin))
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
        raise ValueError(NO_FIELD.format("field", name, f"{list(fields)!r:.100}"))
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
    except DataError:
        raise
    except errors as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{name}: cannot be read: {reason}") from error


class Span(NamedTuple):
    """Bytes `begin` to `end` of a file. A compressed file is one span."""

    path: Path
    begin: int
    end: int


def split_file(path: Path, span_bytes: int) -> list[Span]:
    """Split an uncompressed file into spans of at least `span_bytes`, the last one excepted.

    A span ends where a part does, so it holds the same rows wherever reading starts."""
    size = path.stat().st_size
    spans: list[Span] = []
    begin = end = 0
    with path.open("rb") as file:
        while end < size:
            file.seek(end + PART_BYTES)
            while (piece := file.readline(READ_BYTES)) and not piece.endswith(b"\n"):
                pass
            end = min(file.tell(), size)
            if end - begin >= span_bytes or end == size:
                spans.append(Span(path, begin, end))
                begin = end
    return spans


def read_text_span(span: Span) -> Iterator[TextRow]:
    """Yield the rows of a span: parts of a text, or lines of a .jsonl file that are not blank.

    Byte order marks at the start of a file and of .jsonl rows are dropped. A .jsonl file that is
    one list is a bad row. Raises DataError."""
    path, begin, line = span.path, span.begin, 1
    is_jsonl = path.name.lower().endswith(JSONL_ENDINGS + JSON_ENDINGS)
    form: RowFormat = "jsonl" if is_jsonl else "text"
    with reading(path, OSError, EOFError, zlib.error), path.open("rb") as file:
        blocks = iter(_decompressed(file, span))
        first = next(blocks, b"")
        if is_jsonl and begin == 0 and LIST_OF_OBJECTS.match(first.removeprefix(BOM_UTF8)):
            yield TextRow(str(path), begin, line, form, b"", ONE_LIST)
            return
        for part in _parts(chain([first], blocks)):
            if not part:
                problem = TOO_LONG.format(MAX_ROW_BYTES)
                yield TextRow(str(path), begin, line, form, b"", problem)
            elif form == "jsonl":
                for lines_before, data in _not_blank_lines(part):
                    yield TextRow(str(path), begin, line + lines_before, form, data)
            elif data := part.removeprefix(BOM_UTF8) if begin == 0 and line == 1 else part:
                yield TextRow(str(path), begin, line, form, data)
            line += max(1, part.count(b"\n"))


def _not_blank_lines(part: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not blank, without the spaces in front of it, and how many lines are
    before it."""
    lines_before = counted = 0
    for match in NOT_BLANK_LINE.finditer(part):
        lines_before += part.count(b"\n", counted, match.start())
        counted = match.start()
        if (data := match[0].removeprefix(BOM_UTF8)).strip():
            yield lines_before, data


def _parts(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Cut a stream into parts. A line longer than MAX_ROW_BYTES is skipped and yielded as b""."""
    held = b""
    for block in blocks:
        held += block
        while len(held) > PART_BYTES:
            line = held.rfind(b"\n", 0, PART_BYTES) + 1
            end = held.find(b"\n", PART_BYTES) + 1
            if (end or len(held)) - line > MAX_ROW_BYTES:
                if line:
                    yield held[:line]
                yield b""
                while not end and (held := next(blocks, b"")):
                    end = held.find(b"\n") + 1
            elif end:
                yield held[:end]
            else:
                break
            held = held[end:]
    if held:
        yield held


def _decompressed(file: BinaryIO, span: Span) -> Iterator[bytes]:
    """Yield the bytes of a span, in blocks. Raises EOFError for a file that is cut off."""
    suffix = span.path.suffix.lower()
    if suffix in (".gz", ".zst") and not span.end:
        raise EOFError("Compressed file ended before its start")
    if suffix == ".gz":
        return _blocks(gzip.GzipFile(fileobj=file))
    if suffix == ".zst":
        return filter(None, _zstd_blocks(file))
    file.seek(span.begin)
    return _blocks(file, span.end - span.begin)


def _blocks(file: BinaryIO | gzip.GzipFile, size: int = sys.maxsize) -> Iterator[bytes]:
    """Yield the next `size` bytes of a file, or all that it has."""
    while block := file.read(min(READ_BYTES, size)):
        yield block
        size -= len(block)


def _zstd_blocks(file: BinaryIO) -> Iterator[bytes]:
    """Decompress a .zst file. zstandard's own reader takes a file that is cut off for complete."""
    import zstandard  # few sources need it

    frame = None
    while data := file.read(ZSTD_READ_BYTES):
        while data:
            if frame is None:
                frame = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW).decompressobj()
            try:
                yield frame.decompress(data)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            data, frame = frame.unused_data, None if frame.eof else frame
    if frame:
        raise EOFError("Compressed file ended before the end of a frame")
