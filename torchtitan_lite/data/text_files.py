"""Rows of text and .jsonl files, compressed or not, in memory that does not grow with a file or a
line."""

import gzip
import io
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .rows import MAX_ROW_BYTES, Form, Position, Row, reading

COMPRESSIONS = ("", ".gz", ".zst")
TEXT_ENDINGS = tuple(
    kind + compression for kind in (".txt", ".md", ".rst", ".py") for compression in COMPRESSIONS
)
JSONL_ENDINGS = tuple(".jsonl" + compression for compression in COMPRESSIONS)
PART_BYTES = 2**22
"""A text that is longer is cut at the first end of a line past it."""
CHUNK_BYTES = 2**20
ZSTD_CHUNK_BYTES = 2**10  # decompressed, these can be 32 MiB


def read_text_file(path: Path, start: Position) -> Iterator[Row]:
    """The rows of a file from `start` on: the lines of a .jsonl file that are not blank, the parts
    of any other. A byte order mark is left out at the start of a file and of a .jsonl row. Raises
    DataError for what cannot be read."""
    form: Form = "jsonl" if path.name.lower().endswith(JSONL_ENDINGS) else "text"
    end = start
    with (
        reading(path, OSError, EOFError, zlib.error),
        path.open("rb") as raw,
        _decompress(raw, path.suffix) as file,
    ):
        if file is not raw and not raw.peek(1):
            raise EOFError("Compressed file ended before its start")
        _pass_over(file, start.offset)
        for data, length in _pieces(file, part_bytes=PART_BYTES if form == "text" else 0):
            begin, lines = end, max(1, data.count(b"\n"))
            end = Position(begin.file, begin.offset + length, begin.line + lines)
            problem = "" if data else f"longer than {MAX_ROW_BYTES} bytes"
            if form == "jsonl" or begin.offset == 0:
                data = data.removeprefix(BOM_UTF8)
            blank = not data or (form == "jsonl" and data.isspace())
            if problem or not blank:
                yield Row(str(path), begin.line, form, data, problem, end, raw.tell())


def _pieces(file: io.BufferedIOBase, *, part_bytes: int) -> Iterator[tuple[bytes, int]]:
    """The fewest lines that are more than `part_bytes` bytes together, again and again, and how
    many bytes they are. A line longer than MAX_ROW_BYTES is a piece by itself, passed over and
    given as b""."""
    while True:
        head = file.read(part_bytes)
        begun = head.rfind(b"\n") + 1  # where the head's last line begins, which the tail ends
        room = MAX_ROW_BYTES - (len(head) - begun)
        tail = file.readline(room + 1)
        if len(tail) > room:
            if begun:
                yield head[:begun], begun
            length = len(head) - begun + len(tail)
            while not tail.endswith(b"\n") and (tail := file.readline(CHUNK_BYTES)):
                length += len(tail)
            yield b"", length
        elif head or tail:
            yield head + tail, len(head) + len(tail)
        else:
            return


def _pass_over(file: io.BufferedIOBase, count: int) -> None:
    if file.seekable():
        file.seek(count)
        return
    while count and (passed := file.read(min(count, CHUNK_BYTES))):
        count -= len(passed)


def _decompress(raw: io.BufferedReader, suffix: str) -> io.BufferedIOBase:
    """The bytes of a file with such a suffix, decompressed."""
    if suffix.lower() == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if suffix.lower() == ".zst":
        return io.BufferedReader(_ZstdFile(raw), CHUNK_BYTES)
    return raw


class _ZstdFile(io.RawIOBase):
    """The decompressed bytes of a .zst file."""

    def __init__(self, raw: BinaryIO) -> None:
        self._pieces = _decompressed(raw)
        self._piece = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._piece:
            self._piece = memoryview(next(self._pieces, b""))
        count = min(len(buffer), len(self._piece))
        buffer[:count] = self._piece[:count]
        self._piece = self._piece[count:]
        return count


def _decompressed(file: BinaryIO) -> Iterator[bytes]:
    """What the frames of a zstd file hold, in pieces that are not empty. Raises EOFError for one
    that is cut off, which zstandard's own reader takes for one that ends."""
    import zstandard  # few sources need it

    data = file.read(ZSTD_CHUNK_BYTES)
    while data:
        frame = zstandard.ZstdDecompressor().decompressobj()
        while not frame.eof:
            if not data:
                raise EOFError("Compressed file ended before the end of a frame")
            try:
                piece = frame.decompress(data)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            if piece:
                yield piece
            data = frame.unused_data or file.read(ZSTD_CHUNK_BYTES)
