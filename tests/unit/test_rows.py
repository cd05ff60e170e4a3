"""Rows: the text of a row, and the message for a row that has none."""

import pickle
import subprocess
import sys

import pytest

from torchtitan_lite.data.rows import BadRow, Parser, TextRow, reading
from torchtitan_lite.errors import DataError


def row(data: bytes, form: str = "jsonl", *, line: int = 3, problem: str = "") -> TextRow:
    return TextRow("corpus", 0, line, form, data, problem)


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


def test_text_of_a_text_row_is_all_of_it():
    text = '\tcafé\r\n{"text": 1}\n'
    assert Parser("text")(row(text.encode(), "text")) == text


def test_text_field_is_chosen():
    assert Parser("body")(row(b'{"body": "x", "text": 1}')) == "x"


BAD = {
    b'{"text": "a"': "not JSON: Expecting ',' delimiter at character 13",
    b'{"text": "a"} {}': "not JSON: Extra data at character 15",
    b'{"text": "a\0"}': "not JSON: Invalid control character at at character 12",
    b'{"text": "a\xffb"}': "not UTF-8: byte 0xff, invalid start byte",
    b"[" * 100_000: "nested too deep",
    b'["text"]': "a JSON list, not an object",
    b"7": "a JSON int, not an object",
    b'{"body": "a", "id": 7}': "no field \"text\" among ['body', 'id']",
    b'{"\\ud800": "a"}': "no field \"text\" among ['\\ud800']",
    b'{"text": null}': 'field "text" holds NoneType, not a string',
    b'{"text": {"text": "a"}}': 'field "text" holds dict, not a string',
    b'{"text": "\\ud800"}': "'utf-8' codec can't encode character '\\ud800' in position 0: "
    "surrogates not allowed",
    b'{"text": ""}': "empty text",
}


@pytest.mark.parametrize("data", BAD, ids=[data[:20].decode(errors="replace") for data in BAD])
def test_bad_row(data):
    with pytest.raises(BadRow) as error:
        Parser("text")(row(data))
    assert str(error.value) == f"corpus, line 3: {BAD[data]}"


def test_many_fields_are_named_in_short():
    data = b'{"a": 1' + b"".join(b', "field %d": 1' % i for i in range(1000)) + b"}"
    with pytest.raises(BadRow, match="no field \"text\" among \\['a', 'field 0', ") as error:
        Parser("text")(row(data))
    assert len(str(error.value)) < 200


def test_an_integer_too_long_for_python_is_a_bad_row():
    with pytest.raises(BadRow, match="corpus, line 3: "):
        Parser("text")(row(b'{"text": ' + b"1" * 10_000 + b"}"))


def test_the_line_within_a_text_is_named():
    with pytest.raises(
        BadRow, match="^corpus, line 12: not UTF-8: byte 0xe9, unexpected end of data$"
    ):
        Parser("text")(row(b"one\ntwo\nthr\xe9", "text", line=10))


def test_lines_before_a_chunk_are_counted_in_its_file(tmp_path):
    path = tmp_path / "corpus"
    path.write_bytes(b"1\n2\n\n4\n5\n")
    bad = TextRow(str(path), 5, 2, "text", b"", "too long")
    with pytest.raises(BadRow) as error:
        Parser("text")(bad)
    assert str(error.value) == f"{path}, line 5: too long"
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_bytes_that_are_not_utf_8_can_be_left_out():
    assert Parser("text", decode_errors="ignore")(row(b"caf\xe9s", "text")) == "cafs"


@pytest.mark.parametrize("form", ["text", "jsonl"])
def test_problem_of_the_reader_is_the_reason(form):
    with pytest.raises(BadRow, match="^corpus, line 3: too long$"):
        Parser("text")(row(b"", form, problem="too long"))


def test_parser_and_bad_row_go_to_other_processes():
    parser = Parser("body", decode_errors="ignore")
    assert pickle.loads(pickle.dumps(parser)) == parser
    assert (
        str(pickle.loads(pickle.dumps(BadRow("corpus", 0, 3, "empty text"))))
        == "corpus, line 3: empty text"
    )


def test_workers_import_little():
    code = (
        "import sys, torchtitan_lite.data.rows, torchtitan_lite.data.sources\n"
        "print({'torch', 'numpy', 'pyarrow', 'datasets', 'zstandard'} & sys.modules.keys())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "set()\n"


def test_reading_names_what_cannot_be_read(tmp_path):
    with (
        pytest.raises(DataError, match="^corpus: cannot be read: No such file or directory$"),
        reading("corpus", OSError),
    ):
        (tmp_path / "none").open()
    with (
        pytest.raises(DataError, match="^corpus: cannot be read: cut off$"),
        reading("corpus", OSError, EOFError),
    ):
        raise EOFError("cut off")
    with pytest.raises(KeyError), reading("corpus", OSError, EOFError):
        raise KeyError
