"""Training a tokenizer: its model, its errors, and the command."""

import os
from unittest.mock import Mock

import pytest

from torchtitan_lite.base.errors import ConfigError, DataError, StorageError
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
    (5000, "must be at most 339 for this text"),
    (100, "must be at least 286 for this text"),
])  # fmt: skip
def test_impossible_vocabulary(tmp_path, vocab_size, message):
    with pytest.raises(DataError, match=f"^SIZE = {vocab_size} {message}"):
        train_tokenizer(TEXTS, vocab_size=vocab_size, output=tmp_path / "m")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "\n\n\n", "\0\n"])
def test_text_without_a_character_is_refused(text, tmp_path):
    with pytest.raises(DataError, match="^SOURCE holds no text, only blank lines; name another$"):
        train_tokenizer([text, "\n"], vocab_size=300, output=tmp_path / "m")


def test_output_is_not_overwritten_unasked_and_must_be_writable(tmp_path):
    output = tmp_path / "m"
    output.write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"OUTPUT = .* exists; .* --force"):
        train_tokenizer(TEXTS, vocab_size=300, output=output)
    assert output.read_bytes() == b"mine"
    train_tokenizer(TEXTS, vocab_size=300, output=output, overwrite=True)
    assert build_tokenizer(str(output)).vocab_size == 300
    message = "OUTPUT = .*/m/m cannot be written: .*/m is no folder"
    with pytest.raises(ConfigError, match=message):
        train_tokenizer(iter(()), vocab_size=300, output=output / "m")  # before any text is read


def test_a_full_disk_leaves_the_tokenizer_that_is_there(tmp_path, monkeypatch):
    (tmp_path / "m").write_bytes(b"mine")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    message = "OUTPUT = .* cannot be written: No space left on device; make room, or name another"
    with pytest.raises(StorageError, match=message):
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
    with pytest.raises(ConfigError, match="exists"):
        run(*arguments)
    run(*arguments, "--force")


def test_the_standard_library_with_2256_ids(tmp_path):
    run("pystdlib", tmp_path / "t.model", 2256)
    assert build_tokenizer(str(tmp_path / "t.model")).vocab_size == 2256


@pytest.mark.parametrize(("source", "words", "message"), [
    ("missing", "280", "/missing: does not exist; name a folder, or a file of"),
    ("", "9999 --text-field body", "SIZE = 9999 must be at most "),
    ("", "280", r"rows.jsonl, line 1: no field \"text\" among \['body'\]"),
])  # fmt: skip
def test_errors_are_one_line(rows, tmp_path, capfd, source, words, message):
    with pytest.raises(DataError, match=message) as raised:
        run(source or rows, tmp_path / "t.model", *words.split())
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("size", ["3", "-5", "1e3", "2147483648"])
def test_a_size_is_a_whole_number(rows, tmp_path, size):
    message = f"SIZE: {size} must be a whole number from 4 to 2147483647"
    with pytest.raises(ConfigError, match=message):
        run(rows, tmp_path / "t.model", size)


@pytest.mark.parametrize("output", ["rows.jsonl", "new.txt", "model"])
def test_the_source_is_not_overwritten(rows, output, tmp_path):
    with pytest.raises(ConfigError, match=f"OUTPUT = .*{output} must end in .model, .*; rename it"):
        run(rows, tmp_path / output, 280, "--force")


def test_a_link_to_the_source_is_replaced_not_followed(rows, tmp_path):
    (tmp_path / "rows.model").symlink_to(rows)
    text = rows.read_text()
    run(tmp_path, tmp_path / "rows.model", 280, "--text-field", "body", "--force")
    assert rows.read_text() == text and not (tmp_path / "rows.model").is_symlink()
