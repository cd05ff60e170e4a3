"""JSON documents with a hash of their fields. Those of checkpoints and token stores have more tests
of their own."""

import os
from dataclasses import asdict, dataclass

import pytest
from pydantic import TypeAdapter

from torchtitan_lite.documents import (
    STRICT,
    Count,
    hash_fields,
    parse_toml,
    read_json_object,
    read_regular,
    validate_document,
    write_document,
)


@dataclass(frozen=True)
class Sample:
    __pydantic_config__ = STRICT

    sizes: tuple[Count, ...]
    by_name: dict[str, int]


SAMPLE = Sample((1, 2), {"a": 3})
SCHEMA = TypeAdapter(Sample)


def test_a_document_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "sample.json"
    write_document(path, {"format": 7, **asdict(SAMPLE)})
    fields = read_json_object(path)
    assert fields["format"] == 7
    assert validate_document(fields, SCHEMA, drop={"format"}) == SAMPLE


def test_a_byte_order_mark_is_passed_over():
    assert parse_toml(b"\xef\xbb\xbf[job]\nsteps = 2") == {"job": {"steps": 2}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": [1, 3]}, "^its contents have changed$"),
        ({"sha256": None}, "^its contents have changed$"),
        ({"extra": 1}, "^its contents have changed$"),
    ],
)
def test_a_changed_document_is_refused(changes, message):
    fields = asdict(SAMPLE)
    with pytest.raises(ValueError, match=message):
        validate_document(fields | {"sha256": hash_fields(fields)} | changes, SCHEMA, drop=set())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": [-1]}, r"^sizes\.0: Input should be greater than or equal to 0$"),
        ({"sizes": ["1"]}, r"^sizes\.0: Input should be a valid integer$"),
        ({"extra": 1}, "^extra: Unexpected keyword argument$"),
        ({"by_name": {"x\ny": None}}, r"^by_name\.x y: Input should be a valid integer$"),
    ],
)
def test_a_document_of_other_fields_is_refused_on_one_line(changes, message):
    fields = asdict(SAMPLE) | changes
    with pytest.raises(ValueError, match=message):
        validate_document(fields | {"sha256": hash_fields(fields)}, SCHEMA, drop=set())


def test_only_small_regular_files_are_read(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    assert read_regular(tmp_path / "x", max_bytes=5) == b"12345"
    with pytest.raises(ValueError, match="^has 5 bytes, and the limit is 4$"):
        read_regular(tmp_path / "x", max_bytes=4)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="^is not a regular file$"):
        read_regular(tmp_path / "pipe", max_bytes=4)


@pytest.mark.parametrize(("text", "message"), [("[]", "^not a JSON object$"), ("{", "^not JSON: ")])
def test_only_json_objects_are_read(tmp_path, text, message):
    (tmp_path / "x").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_json_object(tmp_path / "x")
