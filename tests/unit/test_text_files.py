"""Text files: what a row is, whole or compressed, short or long, sound or broken."""

import gzip
import json
import tracemalloc
from io import BytesIO
from pathlib import Path
from random import Random

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.data import rows as row_module
from torchtitan_lite.data.rows import BadRow, Parser, Span, TextRow, read_text_span, split_file

COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}
MARK = b"\xef\xbb\xbf"
SMALL = {"PART_BYTES": 8, "MAX_ROW_BYTES": 20, "READ_BYTES": 7}
"""Limits so small that short files meet them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("text")


def whole_span(path: Path) -> Span:
    return Span(path, 0, path.stat().st_size)


def rows(path: Path, content: bytes, **limits: int) -> list[TextRow]:
    """Write a file, compressed as its name says, and read its rows within some limits."""
    path.write_bytes(COMPRESS.get(path.suffix, bytes)(content))
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(row_module, name, limit)
        return list(read_text_span(whole_span(path)))


def lines_and_data(path: Path, content: bytes, **limits: int) -> list[tuple[int, bytes]]:
    return [(row.line, row.data or row.problem.encode()) for row in rows(path, content, **limits)]


# ----- read_text_span -----


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_text_file_is_a_row_and_so_is_a_line_of_jsonl(folder, ending):
    path = folder / f"a.TXT{ending}"
    assert rows(path, b"one\r\n\ntwo\n") == [TextRow(str(path), 0, 1, "text", b"one\r\n\ntwo\n")]
    assert rows(path, b"") == []
    assert lines_and_data(path, b" \n") == [(1, b" \n")]
    path = folder / f"a.JSONL{ending}"
    assert rows(path, b"\n{1}\r\n  \n\n{2}") == [
        TextRow(str(path), 0, 2, "jsonl", b"{1}\r\n"),
        TextRow(str(path), 0, 5, "jsonl", b"{2}"),
    ]


def test_only_a_line_feed_ends_a_line(folder):
    content = b"\xc2\x85 \xe2\x80\xa8 \r \x0b \x0c \x1c\n2"
    assert lines_and_data(folder / "a.jsonl", content) == [(1, content[:-1]), (2, b"2")]


@pytest.mark.parametrize(("name", "content", "expected"), [
    ("a.txt", MARK, []),
    ("a.jsonl", MARK + b"\n", []),
    ("a.txt", MARK + b"a2345\n" + MARK + b"b", [(1, b"a2345\n"), (2, MARK + b"b")]),
    ("a.jsonl", MARK + b"{1}\n" + MARK + b"{2}\n", [(1, b"{1}\n"), (2, b"{2}\n")]),
])  # fmt: skip
def test_byte_order_marks_are_left_out(folder, name, content, expected):
    assert lines_and_data(folder / name, content, **SMALL) == expected


@given(st.lists(st.binary(max_size=12)), st.integers(1, 20))
@settings(max_examples=300, deadline=None)
def test_a_long_text_is_cut_at_the_first_line_end_past_part_bytes(folder, lines, part_bytes):
    content, parts, part = b"\n".join(lines), [], b""
    for line in BytesIO(content):  # a reference that goes line by line
        part += line
        if len(part) > part_bytes:
            parts.append(part)
            part = b""
    parts += [part] if part else []
    found = rows(folder / "parts.rst", content, PART_BYTES=part_bytes)
    assert [row.data for row in found] == parts
    before = [b"".join(parts[:i]) for i in range(len(parts))]
    assert [row.line for row in found] == [1 + text.count(b"\n") for text in before]


LONG, PROBLEM = b"x" * 20, b"longer than 20 bytes"


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize(("kind", "content", "expected"), [
    (".jsonl", LONG[1:] + b"\n2", [(1, LONG[1:] + b"\n"), (2, b"2")]),
    (".jsonl", LONG + b"\n2", [(1, PROBLEM), (2, b"2")]),
    (".jsonl", b"1\n" + LONG * 9 + b"\n\n4", [(1, b"1\n"), (2, PROBLEM), (4, b"4")]),
    (".jsonl", b"1\n" + LONG * 9, [(1, b"1\n"), (2, PROBLEM)]),
    (".md", b"1\n2\n" + LONG[1:] + b"\n4", [(1, b"1\n2\n" + LONG[1:] + b"\n"), (4, b"4")]),
    (".md", b"1\n2\n" + LONG * 9 + b"\n4", [(1, b"1\n2\n"), (3, PROBLEM), (4, b"4")]),
    (".md", LONG + b"\n2", [(1, PROBLEM), (2, b"2")]),
])  # fmt: skip
def test_a_row_that_is_too_long_is_passed_over(folder, ending, kind, content, expected):
    assert lines_and_data(folder / f"long{kind}{ending}", content, **SMALL) == expected


@pytest.mark.parametrize("name", ["long.txt", "long.jsonl", "long.txt.gz", "long.jsonl.zst"])
def test_a_row_that_is_too_long_is_not_held_in_memory(folder, monkeypatch, name):
    monkeypatch.setattr(row_module, "PART_BYTES", 2**16)
    monkeypatch.setattr(row_module, "MAX_ROW_BYTES", 2**17)
    path = folder / name
    content = Random(0).randbytes(2**23).hex().encode() + b"\n2"
    path.write_bytes(COMPRESS.get(path.suffix, bytes)(content))
    tracemalloc.start()
    found = [row.line for row in read_text_span(whole_span(path))]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [1, 2]
    assert peak < 2**23  # half the row


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_files_can_be_joined_but_not_cut_off(folder, ending):
    compress, path = COMPRESS[ending], folder / f"a.jsonl{ending}"
    path.write_bytes(compress(b"1\n2") + compress(b"") + compress(b"0\n3\n"))
    assert [row.data for row in read_text_span(whole_span(path))] == [b"1\n", b"20\n", b"3\n"]

    lines = [b"%d\n" % i**5 for i in range(300)]
    whole = compress(b"".join(lines))
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        found = []
        with pytest.raises(DataError, match=rf"a\.jsonl{ending}: cannot be read: "):
            found.extend(row.data for row in read_text_span(whole_span(path)))
        assert found == lines[: len(found)]


BROKEN = (b"no such format", b"\x1f\x8b\x08\0\0\0\0\0\0\0\xff\xff\xff", b"\x28\xb5\x2f\xfd\xff")


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("content", BROKEN)
def test_a_compressed_file_that_is_broken_is_refused(folder, ending, content):
    path = folder / f"broken.txt{ending}"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"broken\.txt{ending}: cannot be read: \S+"):
        list(read_text_span(whole_span(path)))


def test_a_file_that_is_not_there_is_refused(folder):
    with pytest.raises(DataError, match=r"none\.txt: cannot be read: No such file or directory"):
        list(read_text_span(Span(folder / "none.txt", 0, 1)))


# ----- split_file, read_text_span -----


PIECES = (b"", b"1", b"  ", b"{22}", b"333\r", b"x" * 19, b"x" * 20, b"x" * 50, MARK)


@pytest.mark.parametrize("name", ["on.txt", "on.jsonl"])
@given(st.lists(st.sampled_from(PIECES)), st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_spans_have_the_rows_of_the_whole_file(folder, name, lines, span_bytes):
    path, content = folder / name, b"\n".join(lines)
    found = rows(path, content, **SMALL)
    with pytest.MonkeyPatch.context() as patch:
        for limit, value in SMALL.items():
            patch.setattr(row_module, limit, value)
        spans = split_file(path, span_bytes)
        parts = [row for span in spans for row in read_text_span(span)]
    assert [(row.data, row.problem) for row in parts] == [(row.data, row.problem) for row in found]
    numbers = [row.line + content[: row.begin].count(b"\n") for row in parts]
    assert numbers == [row.line for row in found]
    assert [span.begin for span in spans[1:]] == [span.end for span in spans[:-1]]
    assert all(span.end - span.begin >= span_bytes for span in spans[:-1])


# ----- Parser, BadRow, read_text_span -----


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
    parser, texts, bad_lines = Parser("text"), [], []
    content = b"\n".join(line for _, line in lines) + b"\n" * ended
    for row in rows(folder / name, content, MAX_ROW_BYTES=4096, PART_BYTES=2048):
        try:
            texts.append((row.line, parser(row)))
        except BadRow as error:
            assert str(error).startswith(f"{folder / name}, line {row.line}: ")
            bad_lines.append(row.line)
    numbered = [(i, kind, line) for i, (kind, line) in enumerate(lines, start=1)]
    assert bad_lines == [i for i, kind, _ in numbered if kind == "bad"]
    good = [(i, line.decode("utf-8-sig")) for i, kind, line in numbered if kind == "good"]
    assert texts == [(i, json.loads(line)["text"]) for i, line in good]
