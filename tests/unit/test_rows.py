"""Rows of text files: what a row is, whole or compressed, short or long, sound or broken."""

import gzip
import json
import re
import tracemalloc
from io import BytesIO
from pathlib import Path
from random import Random

import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.catalog.datasets import NamedDataset
from torchtitan_lite.data import rows as row_module
from torchtitan_lite.data.rows import Row, read_jsonl, read_text, reading

COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress}
MARK = b"\xef\xbb\xbf"
SMALL = {"PART_BYTES": 8, "MAX_ROW_BYTES": 20, "READ_BYTES": 7}
"""Limits so small that short files meet them."""
DATASET = NamedDataset("")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("text")


def read(path: Path, dataset: NamedDataset = DATASET) -> list[Row]:
    reader = read_jsonl if ".jsonl" in path.name else read_text
    return list(reader(path, dataset))


def rows(path: Path, content: bytes, **limits: int) -> list[Row]:
    """Write a file, compressed as its name says, and read its rows within some limits."""
    path.write_bytes(COMPRESS.get(path.suffix, bytes)(content))
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(row_module, name, limit)
        return read(path)


def lines_and_texts(path: Path, content: bytes, **limits: int) -> list[tuple[int, str]]:
    found = rows(path, content, **limits)
    assert all(row.place.startswith(f"{path}, line ") for row in found)
    return [(int(row.place.rpartition(" ")[2]), row.text or row.problem) for row in found]


def jsonl(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


# ----- read_text, read_jsonl -----


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_text_file_is_a_row_and_so_is_a_line_of_jsonl(folder, ending):
    path = folder / f"a.txt{ending}"
    assert rows(path, b"one\r\n\ntwo\n") == [Row(f"{path}, line 1", "one\r\n\ntwo\n")]
    assert rows(path, b"") == []
    assert lines_and_texts(path, b" \n") == [(1, " \n")]
    content = b"\n" + jsonl("a") + b"  \r\n\n" + jsonl("b")[:-1]
    assert lines_and_texts(folder / f"a.jsonl{ending}", content) == [(2, "a"), (5, "b")]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b' \t{"id": 7, "text": "a\\nb"} \r\n', "a\nb"),
        (b'{"text": " "}', " "),
        (b'{"text": "\\u0000\\ud83d\\ude00"}', "\0\N{GRINNING FACE}"),
        ('{"text": "\x85\u2028"}'.encode(), "\x85\u2028"),
        (b'{"text": "a", "other": "\\ud800", "float": NaN}', "a"),
        (b'{"text": 1, "text": "the last counts"}', "the last counts"),
    ],
)
def test_text_of_a_jsonl_row(folder, data, text):
    assert lines_and_texts(folder / "a.jsonl", data) == [(1, text)]


def test_text_field(folder):
    path = folder / "a.jsonl"
    rows(path, b'{"body": "x", "text": 1}')
    assert read(path, NamedDataset("", text_field="body"))[0].text == "x"


BAD = {
    b'{"text": "a"': "not JSON: .* delimiter at character 13",
    b'{"text": "a"} {}': "not JSON: .* at character 15",
    b'{"text": "a\0"}': "not JSON: .* at character 12",
    b'{"text": ' + b"1" * 10_000 + b"}": "",  # longer than Python converts
    b'{"text": "a\xffb"}': "not UTF-8: byte 0xff, invalid start byte",
    b"[" * 100_000: "nested too deep",
    b'["text"]': "a JSON list, not an object",
    b"7": "a JSON int, not an object",
    b'{"body": "a", "id": 7}': r"no field \"text\" among \['body', 'id'\]",
    b'{"\\ud800": "a"}': r"no field \"text\" among \['\\ud800'\]",
    b'{"text": null}': 'field "text" holds NoneType, not a string',
    b'{"text": {"text": "a"}}': 'field "text" holds dict, not a string',
    b'{"text": "\\ud800"}': ".* character '\\\\ud800' in position 0",
    b'{"text": ""}': "empty text",
}


@pytest.mark.parametrize("data", BAD, ids=[data[:20].decode(errors="replace") for data in BAD])
def test_bad_row(folder, data):
    (row,) = rows(folder / "bad.jsonl", b"\n\n" + data)
    assert row.place == f"{folder}/bad.jsonl, line 3" and row.text == ""
    assert re.match(BAD[data], row.problem)


def test_bad_row_names_the_fields_in_short(folder):
    data = b'{"a": 1' + b"".join(b', "field %d": 1' % i for i in range(1000)) + b"}"
    (row,) = rows(folder / "bad.jsonl", data)
    assert row.problem.startswith("no field \"text\" among ['a', 'field 0', ")
    assert len(row.problem) < 200


@pytest.mark.parametrize(("name", "content", "expected"), [
    ("a.txt", MARK, []),
    ("a.jsonl", MARK + b"\n", []),
    ("a.txt", MARK + b"a2345\n" + b"b", [(1, "a2345\n"), (2, "b")]),
    ("a.jsonl", MARK + jsonl("a") + MARK + jsonl("b"), [(1, "a"), (2, "b")]),
])  # fmt: skip
def test_byte_order_marks_are_left_out(folder, name, content, expected):
    assert lines_and_texts(folder / name, content, **SMALL) == expected


@given(st.lists(st.text("ab\r\x85\u2028\x0b\x1c", max_size=12)), st.integers(1, 20))
@settings(max_examples=300, deadline=None)
def test_a_long_text_is_cut_at_the_first_line_feed_past_part_bytes(folder, lines, part_bytes):
    content, parts, part = "\n".join(lines).encode(), [], b""
    for line in BytesIO(content):  # a reference that goes line by line
        part += line
        if len(part) > part_bytes:
            parts.append(part)
            part = b""
    parts += [part] if part else []
    before = [b"".join(parts[:i]) for i in range(len(parts))]
    expected = [
        (1 + text.count(b"\n"), part.decode()) for text, part in zip(before, parts, strict=True)
    ]
    assert lines_and_texts(folder / "parts.rst", content, PART_BYTES=part_bytes) == expected


LONG, PROBLEM = b"x" * 20, "longer than 20 bytes"
ROW = jsonl("1234567")  # of 20 bytes


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize(("kind", "content", "expected"), [
    (".jsonl", ROW + ROW, [(1, "1234567"), (2, "1234567")]),
    (".jsonl", LONG + b"\n" + ROW, [(1, PROBLEM), (2, "1234567")]),
    (".jsonl", ROW + LONG * 9 + b"\n\n" + ROW, [(1, "1234567"), (2, PROBLEM), (4, "1234567")]),
    (".jsonl", ROW + LONG * 9, [(1, "1234567"), (2, PROBLEM)]),
    (".md", b"1\n2\n" + b"x" * 15 + b"\n4", [(1, "1\n2\n" + "x" * 15 + "\n"), (4, "4")]),
    (".md", b"1\n2\n" + LONG * 9 + b"\n4", [(1, "1\n2\n"), (3, PROBLEM), (4, "4")]),
    (".md", LONG + b"\n2", [(1, PROBLEM), (2, "2")]),
])  # fmt: skip
def test_a_row_that_is_too_long_is_passed_over(folder, ending, kind, content, expected):
    assert lines_and_texts(folder / f"long{kind}{ending}", content, **SMALL) == expected


@pytest.mark.parametrize("name", ["long.txt", "long.jsonl", "long.txt.gz", "long.jsonl.zst"])
def test_a_row_that_is_too_long_is_not_held_in_memory(folder, monkeypatch, name):
    monkeypatch.setattr(row_module, "PART_BYTES", 2**16)
    monkeypatch.setattr(row_module, "MAX_ROW_BYTES", 2**17)
    path = folder / name
    content = Random(0).randbytes(2**23).hex().encode() + b"\n" + ROW
    path.write_bytes(COMPRESS.get(path.suffix, bytes)(content))
    tracemalloc.start()
    found = [row.place.rpartition(" ")[2] for row in read(path)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == ["1", "2"]
    assert peak < 2**23  # half the row


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_files_can_be_joined_but_not_cut_off(folder, ending):
    compress, path = COMPRESS[ending], folder / f"a.jsonl{ending}"
    content = jsonl("a", "b")
    path.write_bytes(compress(content[:9]) + compress(b"") + compress(content[9:]))
    assert [row.text for row in read(path)] == ["a", "b"]

    texts = [f"{i**5}" for i in range(300)]
    whole = compress(jsonl(*texts))
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        found = []
        with pytest.raises(DataError, match=rf"a\.jsonl{ending}: cannot be read: "):
            found.extend(row.text for row in read_jsonl(path, DATASET))
        assert found == texts[: len(found)]


BROKEN = (b"no such format", b"\x1f\x8b\x08\0\0\0\0\0\0\0\xff\xff\xff", b"\x28\xb5\x2f\xfd\xff")


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("content", BROKEN)
def test_a_compressed_file_that_is_broken_is_refused(folder, ending, content):
    path = folder / f"broken.txt{ending}"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"broken\.txt{ending}: cannot be read: \S+"):
        read(path)


# ----- read_jsonl -----

TEXTS = st.text(min_size=1, max_size=20)
PRETTY = TEXTS.map(lambda text: json.dumps({"text": text}).encode())
PLAIN = TEXTS.map(lambda text: json.dumps({"id": 1, "text": text}, ensure_ascii=False).encode())
BEFORE, AFTER = st.sampled_from([b"", b" \t", MARK]), st.sampled_from([b"", b"\r", b"  \r"])
GOOD = st.tuples(BEFORE, PRETTY | PLAIN, AFTER).map(b"".join)
NO_OBJECT = st.binary(min_size=1, max_size=40).map(lambda data: b"\x01" + data.replace(b"\n", b""))
CUT_OFF = st.tuples(PRETTY, st.floats(0, 1)).map(
    lambda cut: cut[0][: 1 + int(cut[1] * (len(cut[0]) - 2))]
)
NO_TEXT = st.sampled_from([
    b'{"text": 1}', b'{"text": ' + b"9" * 3000 + b"}", b'{"text": ""}', b'{"text": "\\udc00"}',
    b'{"text": "\xed\xa0\x80"}', b'{"text": "a\0"}', b'{"text": "a\rb"}', b'{"text": "\xff"}',
    b'{"Text": "a"}', b'"text"', b"[" * 2000, b'{"text":' * 400, MARK + MARK + b"{}", b"\0",
    b'{"text": "' + b"a" * 5000 + b'"}',
])  # fmt: skip
LINES = st.one_of(
    GOOD.map(lambda line: ("good", line)),
    st.one_of(NO_OBJECT, CUT_OFF, NO_TEXT).map(lambda line: ("bad", line)),
    st.sampled_from([b"", b"\r", b" \t\r"]).map(lambda line: ("blank", line)),
)


@given(
    st.lists(LINES, min_size=20, max_size=80),
    st.sampled_from(["f.jsonl", "f.jsonl.gz", "f.jsonl.zst"]),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_malformed_rows_are_named_and_good_ones_are_read(folder, lines, name, ended):
    content = b"\n".join(line for _, line in lines) + b"\n" * ended
    path = folder / name
    found = rows(path, content, MAX_ROW_BYTES=4096, PART_BYTES=2048)
    numbered = [(f"{path}, line {i}", *line) for i, line in enumerate(lines, start=1)]
    bad = [place for place, kind, _ in numbered if kind == "bad"]
    assert [row.place for row in found if row.problem] == bad
    good = [(place, line.decode("utf-8-sig")) for place, kind, line in numbered if kind == "good"]
    expected = [(place, json.loads(line)["text"], "") for place, line in good]
    assert [row for row in found if not row.problem] == expected


# ----- reading -----
@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (FileNotFoundError(2, "No such file"), DataError, "^corpus: cannot be read: No such file$"),
        (EOFError("cut off"), DataError, "^corpus: cannot be read: cut off$"),
        (DataError("own"), DataError, "^own$"),
        (KeyError("x"), KeyError, "x"),
    ],
)
def test_reading_names_what_cannot_be_read(error, raised, message):
    with pytest.raises(raised, match=message), reading("corpus", OSError, EOFError, ValueError):
        raise error
