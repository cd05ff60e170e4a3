"""Rows, the pieces of a source that hold one document each, as raw bytes, and the text in them. To
read rows is cheap and to parse them is not, so they are parsed in other processes: those import
this file, which imports little."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torchtitan_lite.errors import DataError

Form = Literal["text", "jsonl"]
MAX_ROW_BYTES = 2**24
"""A longer row is a bad one."""


class Position(NamedTuple):
    """A place between two rows of a source, where reading can go on: the number of files before it,
    of the bytes (in their decompressed form) or, where a file has columns, rows before it in its
    file, and of the line that follows."""

    file: int
    offset: int
    line: int


START = Position(0, 0, 1)


class Row(NamedTuple):
    """The piece of a source from a line of a file to a position. `data` is UTF-8 text or, in the
    form jsonl, a JSON object with a field of text; it is empty if there is a `problem`."""

    file: str
    line: int
    form: Form
    data: bytes
    problem: str
    end: Position
    disk: int
    """Bytes of its file, as it is on disk, that were read to get to the end: nearly so, as reading
    is in chunks."""


class BadRow(ValueError):
    """A row without a text. The message is `file, line N: reason`."""


@dataclass(frozen=True)
class Parser:
    """The text of any row of a source, never empty; in form jsonl, it is in the field `text_field`.
    Raises BadRow."""

    text_field: str
    decode_errors: Literal["strict", "ignore"] = "strict"

    def __call__(self, row: Row) -> str:
        try:
            if row.problem:
                raise ValueError(row.problem)
            text = row.data.decode("utf-8", self.decode_errors)
            if row.form == "jsonl":
                text = _string_field(text, self.text_field)
            if not text:
                raise ValueError("empty text")
        except UnicodeDecodeError as error:
            line = row.line + row.data.count(b"\n", 0, error.start)
            reason = f"not UTF-8: byte 0x{row.data[error.start]:02x}, {error.reason}"
            raise BadRow(f"{row.file}, line {line}: {reason}") from error
        except ValueError as error:
            raise BadRow(f"{row.file}, line {row.line}: {error}") from error
        return text


def _string_field(row: str, name: str) -> str:
    """The string that a JSON object has under a name. Raises ValueError if there is none."""
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
    text.encode()  # half a surrogate pair is valid JSON, but no text
    return text


@contextmanager
def reading(name: object, *errors: type[Exception]) -> Iterator[None]:
    """A context in which any of these errors becomes a DataError that tells what cannot be read."""
    try:
        yield
    except errors as error:
        raise DataError(
            f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
