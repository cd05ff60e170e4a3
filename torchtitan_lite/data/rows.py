"""Rows: the pieces of a source that hold one document each.

Reading rows is cheap and parsing them is not, so the main process reads them as raw bytes and
worker processes parse them. Workers import this file, so it imports little.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from torchtitan_lite.errors import DataError

RowFormat = Literal["text", "jsonl"]
MAX_ROW_BYTES = 2**24
"""Longer rows are bad."""
READ_BYTES = 2**20
"""Bytes read at a time where a whole row is not needed."""


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
        self.file, self.begin, self.line, self.reason = file, begin, line, reason

    def __str__(self) -> str:
        # Only rows that are reported pay for counting the lines in front of their chunk.
        line = self.line + (_count_lines(Path(self.file), self.begin) if self.begin else 0)
        return f"{self.file}, line {line}: {self.reason}"


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


def _count_lines(path: Path, end: int) -> int:
    with reading(path, OSError), path.open("rb") as file:
        sizes = (min(READ_BYTES, end - at) for at in range(0, end, READ_BYTES))
        return sum(file.read(size).count(b"\n") for size in sizes)


@contextmanager
def reading(name: object, *errors: type[Exception]) -> Iterator[None]:
    """Context manager that turns these errors into `DataError: NAME: cannot be read: reason`."""
    try:
        yield
    except errors as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{name}: cannot be read: {reason}") from error
