"""Tokenizers: the shipped one, lossless round trips, training, and what is refused."""

import io
import re

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_lite.data.tokenizer import SHIPPED_MODEL, build_tokenizer, train_tokenizer
from torchtitan_lite.errors import DataError

TEXTS = ["def f(x):\n\treturn x + 1\n", "class A:\n    value = 1234\n", "the return of the value\n"] * 3


@pytest.fixture(scope="module")
def shipped():
    return build_tokenizer("")


def test_shipped_model(shipped):
    assert (shipped.vocab_size, shipped.bos_id, shipped.eos_id) == (2256, 1, 2)
    assert SHIPPED_MODEL.stat().st_size < 100_000
    assert len(shipped.encode("    return self.value\n")) <= 6
    assert shipped.fingerprint == build_tokenizer(str(SHIPPED_MODEL)).fingerprint


def test_python_source_survives(shipped):
    source = 'def f():\r\n\t\t\tif x:\n    y = "é 日本 😀"   \n\n\n  # <s> </s> <0x0A> trailing \x0c\x00 '
    assert shipped.decode(shipped.encode(source)) == source


@settings(max_examples=200)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_any_text_survives(text):
    tokenizer = build_tokenizer("")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {0, 1, 2} & set(ids)


def test_documents_are_framed(shipped):
    assert shipped.encode_documents(["a b", "</s>"]) == [
        [1, *shipped.encode("a b"), 2],
        [1, *shipped.encode("</s>"), 2],
    ]


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


def test_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "t.model").write_bytes(SHIPPED_MODEL.read_bytes())
    assert build_tokenizer("~/t.model").vocab_size == 2256


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is not a sentencepiece model"),
        (b"no model" * 100, "is not a sentencepiece model"),
        (SHIPPED_MODEL.read_bytes()[:1000], "is not a sentencepiece model"),
    ],
)
def test_refused_model_files(tmp_path, content, message):
    path = tmp_path / "bad.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=rf'^\[model\] tokenizer_path = "{re.escape(str(path))}" {message}'):
        build_tokenizer(str(path))


def test_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read: Is a directory; name a sentencepiece model file"):
        build_tokenizer(str(tmp_path))


def test_model_without_bos_is_refused(tmp_path):

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=30, bos_id=-1, model_type="bpe", minloglevel=2
    )
    (tmp_path / "m").write_bytes(model.getvalue())
    with pytest.raises(DataError, match=r"has BOS id -1 and EOS id 2, where -1 is none; documents need both"):
        build_tokenizer(str(tmp_path / "m"))


@pytest.mark.parametrize(
    ("vocab_size", "message"),
    [
        (5000, r"too high \(5000\). Please set it to a value <= \d+"),
        (100, r"100 vs \d+"),
        (-4, r"vocab_size.* > \(0\)"),
    ],
)
def test_impossible_vocabulary(tmp_path, vocab_size, message):
    with pytest.raises(DataError, match=rf"--vocab-size = {vocab_size} does not suit this text: .*{message}"):
        train_tokenizer(TEXTS, vocab_size=vocab_size, output=tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_output_is_not_overwritten_unasked(tmp_path):
    output = tmp_path / "m"
    output.write_bytes(b"mine")
    with pytest.raises(DataError, match=r"--output = .* exists; .* --force"):
        train_tokenizer(TEXTS, vocab_size=300, output=output)
    assert output.read_bytes() == b"mine"
    train_tokenizer(TEXTS, vocab_size=300, output=output, overwrite=True)
    assert build_tokenizer(str(output)).vocab_size == 300


def test_output_that_cannot_be_written(tmp_path):
    with pytest.raises(DataError, match=r"--output = .* cannot be written: No such file or directory"):
        train_tokenizer(TEXTS, vocab_size=300, output=tmp_path / "missing" / "m")


def test_an_error_of_the_documents_stays_itself(tmp_path):
    def documents():
        yield "text"
        raise DataError("line 7 is broken")

    with pytest.raises(DataError, match="^line 7 is broken$"):
        train_tokenizer(documents(), vocab_size=300, output=tmp_path / "m")
