"""JSON objects with a hash of their fields. Checkpoints and token stores have more tests of
theirs."""

import os
from dataclasses import asdict, dataclass

import pytest
from pydantic import ConfigDict, TypeAdapter

from torchtitan_lite.base.jsonfile import (
    Count,
    hash_fields,
    parse_toml,
    read_json_object,
    read_regular,
    validate_hashed_json,
    write_hashed_json,
)


@dataclass(frozen=True)
class Sample:
    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    sizes: tuple[Count, ...]
    by_name: dict[str, int]


SAMPLE = Sample((1, 2), {"a": 3})
SCHEMA = TypeAdapter(Sample)


def test_write_document_and_validate_document(tmp_path):
    path = tmp_path / "sample.json"
    write_hashed_json(path, {"format": 7, **asdict(SAMPLE)})
    fields = read_json_object(path)
    assert fields["format"] == 7
    assert validate_hashed_json(fields, SCHEMA, drop={"format"}) == SAMPLE
    for change in ({"sizes": [1, 3]}, {"sha256": None}):
        with pytest.raises(ValueError, match="^its contents have changed$"):
            validate_hashed_json(fields | change, SCHEMA, drop={"format"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": [-1]}, r"^sizes\.0: .* greater than or equal to 0$"),
        ({"sizes": ["1"]}, r"^sizes\.0: .* valid integer$"),
        ({"extra": 1}, "^extra: Unexpected"),
        ({"by_name": {"x\ny": None}}, r"^by_name\.x y: .* valid integer$"),
    ],
)
def test_validate_document_refuses_other_fields_on_one_line(changes, message):
    fields = asdict(SAMPLE) | changes
    with pytest.raises(ValueError, match=message):
        validate_hashed_json(fields | {"sha256": hash_fields(fields)}, SCHEMA, drop=set())


def test_parse_toml_passes_over_a_byte_order_mark():
    assert parse_toml(b"\xef\xbb\xbf[job]\nsteps = 2") == {"job": {"steps": 2}}


def test_read_regular_reads_only_small_regular_files(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    assert read_regular(tmp_path / "x", max_bytes=5) == b"12345"
    with pytest.raises(ValueError, match="5 bytes, .* 4$"):
        read_regular(tmp_path / "x", max_bytes=4)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="^is not a regular file$"):
        read_regular(tmp_path / "pipe", max_bytes=4)


@pytest.mark.parametrize(("text", "message"), [("[]", "^not a JSON object$"), ("{", "^not JSON: ")])
def test_read_json_object_refuses_other_values(tmp_path, text, message):
    (tmp_path / "x").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_json_object(tmp_path / "x")
