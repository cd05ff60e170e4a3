"""Rows, which hold a document each, and the readers of text files, in bounded memory."""

import gzip
import io
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from backports.zstd import DecompressionParameter, ZstdError, ZstdFile

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.catalog.datasets import NamedDataset

MAX_ROW_BYTES = 2**24
"""Longer rows are bad."""
TOO_LONG = "longer than {} bytes"
ZSTD_OPTIONS: dict[int, int] = {DecompressionParameter.window_log_max: 31}
"""The longest window, of zstd --long=31: 2^31 bytes, which its decoder takes of memory."""
PART_BYTES = 2**22
"""A long text becomes several rows: one ends at the first line end after so many bytes. At most
MAX_ROW_BYTES."""
READ_BYTES = 2**20
COMPRESSED = (".gz", ".zst")

File = IO[bytes] | io.BufferedIOBase
Item = TypeVar("Item")


class Row(NamedTuple):
    """The text of a document, never empty, or the problem with it."""

    place: str
    """File and line."""
    text: str
    problem: str = ""


@contextmanager
def reading(name: object, *errors: type[Exception]) -> Iterator[None]:
    """Turn these errors into `DataError: NAME: cannot be read: reason`."""
    try:
        yield
    except DataError:
        raise
    except errors as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{name}: cannot be read: {reason}") from error


def build_row(place: str, parse: Callable[..., str], *content: object) -> Row:
    """Return the row with the text that `parse` returns for `content`, or with its ValueError."""
    try:
        text = parse(*content)
        if not text:
            raise ValueError("empty text")
        if len(text.encode()) > MAX_ROW_BYTES:  # half a surrogate pair is a ValueError here
            raise ValueError(TOO_LONG.format(MAX_ROW_BYTES))
        return Row(place, text)
    except ValueError as error:
        return Row(place, "", str(error))


def grouped(sized: Iterable[tuple[Item, int]], limit: int) -> Iterator[list[Item]]:
    """Yield items, each given with its size, in groups that end when they have `limit`."""
    group: list[Item] = []
    size = 0
    for item, item_size in sized:
        group.append(item)
        size += item_size
        if size >= limit:
            yield group
            group, size = [], 0
    if group:
        yield group


def decode(data: bytes) -> str:
    """Return the text of bytes in UTF-8. Raises ValueError."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{data[error.start]:02x}, {error.reason}") from error


def check_string(value: object, field: str) -> str:
    """Return the value of a field. Raises ValueError if it is no string."""
    if not isinstance(value, str):
        raise ValueError(f'field "{field}" holds {type(value).__name__}, not a string')
    return value


def json_text(line: bytes, field: str) -> str:
    """Return a string field of the JSON object on a line. Raises ValueError."""
    try:
        fields = json.loads(decode(line))
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from error
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(fields, dict):
        raise ValueError(f"a JSON {type(fields).__name__}, not an object")
    if field not in fields:
        fix = "--text-field or [training] text_field names it"
        raise ValueError(f'no field "{field}" among {list(fields)!r:.100}; {fix}')
    return check_string(fields[field], field)


def read_text(path: Path, dataset: NamedDataset) -> Iterator[Row]:
    """Yield the text of a file, in rows of about PART_BYTES. Raises DataError."""
    line = 1
    with _opened(path) as file:
        while part := file.read(PART_BYTES):
            begun = len(part) - (part.rfind(b"\n") + 1)  # bytes of the last line
            rest = _rest_of_line(file, begun)
            part = part[: len(part) - begun] if rest is None else part + rest
            if data := part.removeprefix(BOM_UTF8):
                yield build_row(f"{path}, line {line}", decode, data)
            line += part.count(b"\n")
            if rest is None:
                yield Row(f"{path}, line {line}", "", TOO_LONG.format(MAX_ROW_BYTES))
                line += 1


def read_jsonl(path: Path, dataset: NamedDataset) -> Iterator[Row]:
    """Yield the text in each line of a file that is not blank. Raises DataError."""
    line = 1
    with _opened(path) as file:
        while (data := _rest_of_line(file, 0)) != b"":
            place = f"{path}, line {line}"
            if data is None:
                yield Row(place, "", TOO_LONG.format(MAX_ROW_BYTES))
            elif (data := data.removeprefix(BOM_UTF8)).strip():
                yield build_row(place, json_text, data, dataset.text_field)
            line += 1


def _rest_of_line(file: File, begun: int) -> bytes | None:
    """Read the rest of a line of which `begun` bytes were read. Return None, and skip the line, if
    it is longer than MAX_ROW_BYTES."""
    rest = file.readline(MAX_ROW_BYTES + 1 - begun)
    if begun + len(rest) <= MAX_ROW_BYTES:
        return rest
    while rest and not rest.endswith(b"\n"):
        rest = file.readline(READ_BYTES)
    return None


@contextmanager
def _opened(path: Path) -> Iterator[File]:
    """Open a file, decompressed. A compressed file that is cut off is an error."""
    suffix = path.suffix.lower()
    with reading(path, OSError, EOFError, zlib.error, ZstdError), path.open("rb") as file:
        if suffix in COMPRESSED and not path.stat().st_size:
            raise EOFError("Compressed file ended before its start")
        if suffix == ".gz":
            yield gzip.GzipFile(fileobj=file)
        elif suffix == ".zst":
            yield ZstdFile(file, options=ZSTD_OPTIONS)
        else:
            yield file
