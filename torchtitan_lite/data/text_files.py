"""Reading of text and .jsonl files, compressed or not, in memory that does not grow with them."""

import gzip
import io
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from .rows import MAX_ROW_BYTES, READ_BYTES, RowFormat, TextRow, reading

COMPRESSIONS = ("", ".gz", ".zst")
TEXT_ENDINGS = tuple(
    kind + compression for kind in (".txt", ".md", ".rst", ".py") for compression in COMPRESSIONS
)
JSONL_ENDINGS = tuple(".jsonl" + compression for compression in COMPRESSIONS)
PART_BYTES = 2**22
"""A longer text is cut into parts, each at the first line end after so many bytes."""
ZSTD_READ_BYTES = 2**10  # can be 32 MiB when decompressed


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
        self._piece = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._piece:
            # The rest of the last read belongs to the next frame.
            rest = self._frame.unused_data if self._frame and self._frame.eof else b""
            data = rest or self._raw.read(ZSTD_READ_BYTES)
            if self._frame is None or self._frame.eof:
                if not data:
                    return 0
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            if not data:
                raise EOFError("Compressed file ended before the end of a frame")
            try:
                self._piece = memoryview(self._frame.decompress(data))
            except self._zstandard.ZstdError as error:
                raise OSError(str(error)) from error

        count = min(len(buffer), len(self._piece))
        buffer[:count], self._piece = self._piece[:count], self._piece[count:]
        return count
