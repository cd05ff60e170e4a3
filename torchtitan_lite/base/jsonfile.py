"""JSON and TOML from anyone, read into values that are safe to handle.

Kind and size of the file, depth and size of the values are checked. Hashed JSON is an object whose
field `sha256` is the hash of all other fields, so that damage is noticed.
"""

import hashlib
import json
import stat
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tomli
from pydantic import Field, TypeAdapter, ValidationError

from .files import os_errors, replace_file

T = TypeVar("T")

MAX_JSON_BYTES = 16 << 20
"""Largest JSON file that is read: three times the manifest of a checkpoint of 16,000 ranks. Parsed,
it takes about 25 times its size in memory."""
MAX_TOML_BYTES = 1 << 20
MAX_DEPTH = 50
"""Deepest nesting of lists and tables: far below what Python's recursive functions can handle."""
MAX_DIGITS = 100
Count = Annotated[int, Field(ge=0, lt=2**63)]


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """Return the contents of a regular file.

    Raises ValueError for a file of more than `max_bytes`, and for a pipe or a device, which may
    have no end; OSError if the file cannot be read."""
    if (size := regular_size(path)) > max_bytes:
        raise ValueError(f"has {size} bytes, and the limit is {max_bytes}")
    with os_errors(path):
        return path.read_bytes()


def regular_size(path: Path) -> int:
    """Return the size of a regular file in bytes. Raises ValueError for anything else, and OSError
    if there is none."""
    with os_errors(path):
        found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("is not a regular file")
    return found.st_size


def strict_json(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON, with null for numbers that are not finite, which JSON lacks."""
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(finite, indent=indent)


def read_json_object(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError for anything else; OSError if the file
    cannot be read."""
    fields = _parse(json.loads, read_regular(path, max_bytes=max_bytes), "JSON")
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    return fields


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises ValueError for anything else; OSError if the file
    cannot be read."""
    return parse_toml(read_regular(path, max_bytes=MAX_TOML_BYTES))


def parse_toml(content: bytes) -> dict[str, Any]:
    """Return the tables of a TOML text. Raises ValueError."""
    return _parse(tomli.loads, content, "valid TOML")


def _parse(loads: Callable[[str], Any], content: bytes, kind: str) -> Any:
    """Return the value of a text. Raises ValueError also for values that break functions on plain
    values: lists and tables deeper than MAX_DEPTH, and huge whole numbers."""
    try:
        value = loads(content.decode("utf-8-sig"))  # Windows editors begin with U+FEFF
    except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
        raise ValueError(f"not {kind}: {error}") from error

    level = [value]
    for _ in range(MAX_DEPTH):
        if any(isinstance(each, int) and abs(each) >= 10**MAX_DIGITS for each in level):
            raise ValueError(f"holds a number of more than {MAX_DIGITS} digits")
        tables = [each.values() for each in level if isinstance(each, dict)]
        level = list(chain(*tables, *(each for each in level if isinstance(each, list))))
    if level:
        raise ValueError(f"holds a value nested more than {MAX_DEPTH} deep")
    return value


def write_hashed_json(path: Path, fields: dict[str, Any]) -> None:
    """Write `fields` and their hash, replacing the file atomically. Raises OSError."""
    replace_file(path, json.dumps(fields | {"sha256": hash_fields(fields)}, indent=1))


def validate_hashed_json(fields: dict[str, Any], schema: TypeAdapter[T], *, drop: set[str]) -> T:
    """Compare the `fields` of hashed JSON with their hash, and return the value that they describe.

    The hash and the keys in `drop` are not part of the value. Raises ValueError, on one line, with
    the field that is wrong."""
    hashed = {key: value for key, value in fields.items() if key != "sha256"}
    if fields.get("sha256") != hash_fields(hashed):
        raise ValueError("its contents have changed")
    described = {key: value for key, value in hashed.items() if key not in drop}
    try:
        # Only validate_json accepts a list for a tuple in pydantic's strict mode.
        return schema.validate_json(json.dumps(described))
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ValueError(" ".join(reason.split())) from error  # a key may contain line breaks


def hash_fields(fields: dict[str, Any]) -> str:
    """Return the SHA-256 of the fields of a JSON object, in hex."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
