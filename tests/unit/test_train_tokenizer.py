"""Training a tokenizer: its model, its errors, and the command."""

import os
from unittest.mock import Mock

import pytest

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.cli import run_command
from torchtitan_lite.data.tokenizer import build_tokenizer
from torchtitan_lite.data.train_tokenizer import train_tokenizer

TEXTS = [
    "def f(x):\n\treturn x + 1\n",
    "class A:\n    value = 1234\n",
    "the return of the value",
] * 3


# ----- train_tokenizer -----


def test_training_is_exact_deterministic_and_lossless(tmp_path):
    for name in ("a.model", "b.model"):
        train_tokenizer(TEXTS, vocab_size=300, output=tmp_path / name)
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()
    tokenizer = build_tokenizer(str(tmp_path / "a.model"))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (300, 1, 2)
    assert tokenizer.decode(tokenizer.encode(" new\twords 78\n  ")) == " new\twords 78\n  "
    digits = tokenizer.encode("12341234")
    assert len(digits) == 8, "numbers are split into digits"


def test_a_very_long_line_is_trained_on(tmp_path):
    train_tokenizer(["quixotic " * 1000], vocab_size=270, output=tmp_path / "m")
    assert len(build_tokenizer(str(tmp_path / "m")).encode(" quixotic")) < 9


@pytest.mark.parametrize(("vocab_size", "message"), [
    (5000, r"too high \(5000\). Please set it to a value <= \d+"),
    (100, r"100 vs \d+"),
    (-4, r"vocab_size.* > \(0\)"),
    (2**31, r"cannot parse \"2147483648\" as int"),
])  # fmt: skip
def test_impossible_vocabulary(tmp_path, vocab_size, message):
    start = f"SIZE = {vocab_size} does not suit this text: "
    with pytest.raises(DataError, match=f"{start}.*{message}"):
        train_tokenizer(TEXTS, vocab_size=vocab_size, output=tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_output_is_not_overwritten_unasked_and_must_be_writable(tmp_path):
    output = tmp_path / "m"
    output.write_bytes(b"mine")
    with pytest.raises(DataError, match=r"OUTPUT = .* exists; .* --force"):
        train_tokenizer(TEXTS, vocab_size=300, output=output)
    assert output.read_bytes() == b"mine"
    train_tokenizer(TEXTS, vocab_size=300, output=output, overwrite=True)
    assert build_tokenizer(str(output)).vocab_size == 300
    message = "OUTPUT = .*/m/m cannot be written: .*/m is no folder"
    with pytest.raises(DataError, match=message):
        train_tokenizer(iter(()), vocab_size=300, output=output / "m")  # before any text is read


def test_a_full_disk_leaves_the_tokenizer_that_is_there(tmp_path, monkeypatch):
    (tmp_path / "m").write_bytes(b"mine")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(DataError, match="OUTPUT = .* cannot be written: No space left on device"):
        train_tokenizer(TEXTS, vocab_size=300, output=tmp_path / "m", overwrite=True)
    assert (tmp_path / "m").read_bytes() == b"mine"


def test_an_error_of_the_documents_stays_itself(tmp_path):
    def documents():
        yield "text"
        raise DataError("line 7 is broken")

    with pytest.raises(DataError, match="^line 7 is broken$"):
        train_tokenizer(documents(), vocab_size=300, output=tmp_path / "m")


# ----- tokenizer, the command -----


def run(*arguments: object) -> None:
    run_command(["tokenizer", *map(str, arguments)])


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"body": "one text and another text and one more"}\n' * 3)
    return path


def test_model_from_rows(rows, tmp_path, capfd):
    output = tmp_path / "t.model"
    arguments = (rows, output, 280, "--text-field", "body")
    run(*arguments)
    printed = f"{output}: 280 ids, {output.stat().st_size} bytes\n"
    assert capfd.readouterr() == (printed, "")
    assert build_tokenizer(str(output)).vocab_size == 280
    with pytest.raises(DataError, match="exists"):
        run(*arguments)
    run(*arguments, "--force")


def test_the_standard_library_with_2256_ids(tmp_path):
    run("pystdlib", tmp_path / "t.model", 2256)
    assert build_tokenizer(str(tmp_path / "t.model")).vocab_size == 2256


@pytest.mark.parametrize(("source", "words", "message"), [
    ("missing", "280", "/missing: does not exist; name a folder, or a file of"),
    ("", "9999 --text-field body", "SIZE = 9999 does not suit this text: "),
    ("", "280", r"rows.jsonl, line 1: no field \"text\" among \['body'\]"),
])  # fmt: skip
def test_errors_are_one_line(rows, tmp_path, capfd, source, words, message):
    with pytest.raises(DataError, match=message) as raised:
        run(source or rows, tmp_path / "t.model", *words.split())
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")
