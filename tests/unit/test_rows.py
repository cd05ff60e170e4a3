"""Rows: the text of a row, and the message for a row that has none."""

import pickle
import subprocess
import sys

import pytest

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.data.rows import BadRow, Parser, TextRow, reading


def row(data: bytes, form: str = "jsonl", *, line: int = 3) -> TextRow:
    return TextRow("corpus", 0, line, form, data)


# ----- Parser, TextRow -----


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b'{"text": "a"}', "a"),
        (b' \t{"id": 7, "text": "a\\nb"} \r\n', "a\nb"),
        (b'{"text": " "}', " "),
        (b'{"text": "\\u0000\\ud83d\\ude00"}', "\0\N{GRINNING FACE}"),
        ('{"text": "\x85\u2028"}'.encode(), "\x85\u2028"),
        (b'{"text": "a", "other": "\\ud800", "float": NaN}', "a"),
        (b'{"text": 1, "text": "the last counts"}', "the last counts"),
    ],
)
def test_text_of_a_jsonl_row(data, text):
    assert Parser("text")(row(data)) == text


def test_text_of_a_parser_with_options():
    text = '\tcafé\r\n{"text": 1}\n'
    assert Parser("text")(row(text.encode(), "text")) == text
    assert Parser("body")(row(b'{"body": "x", "text": 1}')) == "x"
    parser = Parser("text", decode_errors="ignore")
    assert parser(row(b"caf\xe9s", "text")) == "cafs"
    assert pickle.loads(pickle.dumps(parser)) == parser


# ----- BadRow -----

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
def test_bad_row(data):
    with pytest.raises(BadRow, match=f"^corpus, line 3: {BAD[data]}"):
        Parser("text")(row(data))


def test_bad_row_names_the_line_and_the_fields_in_short():
    data = b'{"a": 1' + b"".join(b', "field %d": 1' % i for i in range(1000)) + b"}"
    with pytest.raises(BadRow, match="no field \"text\" among \\['a', 'field 0', ") as error:
        Parser("text")(row(data))
    assert len(str(error.value)) < 200
    with pytest.raises(BadRow, match="^corpus, line 12: not UTF-8: byte 0xe9, unexpected end"):
        Parser("text")(row(b"one\ntwo\nthr\xe9", "text", line=10))


@pytest.mark.parametrize("form", ["text", "jsonl"])
def test_bad_row_has_the_problem_of_the_reader_and_its_line_in_the_file(tmp_path, form):
    path = tmp_path / "corpus"
    path.write_bytes(b"1\n2\n\n4\n5\n")
    with pytest.raises(BadRow) as error:
        Parser("text")(TextRow(str(path), 5, 2, form, b"", "too long"))
    assert str(error.value) == f"{path}, line 5: too long"
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


# ----- rows.py in worker processes -----
def test_workers_import_little():
    code = (
        "import sys, torchtitan_lite.data.rows, torchtitan_lite.data.sources\n"
        "print({'torch', 'numpy', 'pyarrow', 'datasets', 'zstandard'} & sys.modules.keys())"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


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
