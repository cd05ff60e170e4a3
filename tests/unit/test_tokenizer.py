"""Tokenizers: the shipped one, framed documents, folders and files of each form, and what is
refused."""

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import sentencepiece
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.data.tokenizer import SHIPPED_MODEL, build_tokenizer
from torchtitan_lite.metrics.flops import document_squares
from torchtitan_lite.models.llama3 import document_starts

ROOT = Path(__file__).parents[2]
BYTES = {chr(i): i for i in range(256)}
SHIPPED = build_tokenizer("")


def json_file(path: Path, *special: str) -> Path:
    """A tokenizer.json of the bytes and `special` tokens, the first of which is 256."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(BYTES, []))
    tokenizer.add_special_tokens(list(special))
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path


def model_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(SHIPPED_MODEL.read_bytes())
    return path


# ----- build_tokenizer, encode, decode, encode_documents -----


def test_shipped_model():
    assert (SHIPPED.vocab_size, SHIPPED.bos_id, SHIPPED.eos_id) == (2256, 1, 2)
    assert (SHIPPED.path, SHIPPED.name) == (SHIPPED_MODEL, "pystdlib-2256.model")
    assert SHIPPED_MODEL.stat().st_size < 100_000
    assert len(SHIPPED.encode("    return self.value\n")) <= 6


def test_the_documented_training_loses_nothing(tmp_path, monkeypatch):
    page = (ROOT / "docs/small_llama.md").read_text()
    (program,) = re.findall(r"^```python\n(# my_tokenizer\.py\n.*?)^```$", page, re.M | re.S)
    (tmp_path / "my_texts").mkdir()
    text = "def f(x):\n\treturn x + 1\nclass A:\n    value = 1234\n" * 3
    (tmp_path / "my_texts/a.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    exec(program.replace("32000", "300"))
    tokenizer = build_tokenizer("small.model")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (300, 1, 2)
    for text in (" new\twords 78\n  ", 'é 日本 😀"   \r\n\n  '):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("12341234")) == 8, "numbers are split into digits"


@settings(max_examples=200)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
@example('def f():\r\n\t\t\tif x:\n    y = "é 日本 😀"   \n\n\n  ')
@example("# <s> </s> <0x0A> trailing \x0c\x00 ")
def test_any_text_survives(text):
    tokenizer = build_tokenizer("")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {0, 1, 2} & set(ids)


def test_documents_are_framed():
    texts = ["a b", "", "</s>"]
    assert SHIPPED.encode_documents(texts) == [[1, *SHIPPED.encode(text), 2] for text in texts]
    assert SHIPPED.encode("") == []
    assert SHIPPED.decode([1, *SHIPPED.encode("a b"), 2]) == "a b"


def test_where_bos_is_eos_documents_are_told_apart_by_one_id(tmp_path):
    path = json_file(tmp_path / "tokenizer.json", "<x>")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<x>", "eos_token": "<x>"}')
    tokenizer = build_tokenizer(str(path))
    texts = ["ab", "", "<x>"]
    documents = tokenizer.encode_documents(texts)
    assert documents == [[256, 97, 98], [256], [256, *b"<x>"]]
    assert [tokenizer.decode(ids) for ids in documents] == ["a b", "", "< x >"]
    assert tokenizer.encode("ab") == [97, 98]

    # Masks and the count of documents see three documents.
    stream = torch.tensor([[i for ids in documents for i in ids]])
    starts = document_starts(stream, bos_id=tokenizer.bos_id)
    assert starts.tolist() == [[0, 0, 0, 3, 4, 4, 4, 4]]
    squares = document_squares(stream, bos_id=256, shard_sequence=lambda tensor, _: tensor)
    assert squares == 3**2 + 1 + 4**2


# ----- Tokenizer, fingerprint, FILES_OF_A_FOLDER -----


def test_the_fingerprint_is_of_the_content_and_of_what_frames_it(tmp_path):
    assert build_tokenizer(str(model_file(tmp_path / "copy"))).fingerprint == SHIPPED.fingerprint
    path = json_file(tmp_path / "tokenizer.json", "<s>", "</s>", "<end>")
    first = build_tokenizer(str(path))
    assert (first.bos_id, first.eos_id) == (256, 257)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    second = build_tokenizer(str(path))
    assert (second.bos_id, second.eos_id) == (256, 258)
    assert len({SHIPPED.fingerprint, first.fingerprint, second.fingerprint}) == 3


def test_a_folders_first_file_is_taken(tmp_path, monkeypatch):
    folder = tmp_path / "Llama-3"
    model_file(folder / "original" / "tokenizer.model")
    assert build_tokenizer(str(folder)).name == "Llama-3/original/tokenizer.model"
    model_file(folder / "tokenizer.model")
    assert build_tokenizer(str(folder)).name == "Llama-3/tokenizer.model"
    json_file(folder / "tokenizer.json", "<s>", "</s>")
    tokenizer = build_tokenizer(str(folder))
    assert (tokenizer.name, tokenizer.path) == ("Llama-3/tokenizer.json", folder / "tokenizer.json")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build_tokenizer("~/Llama-3/tokenizer.json").name == "tokenizer.json"


def test_the_optional_packages_are_not_needed_and_torch_is_not_imported():
    code = (
        "import sys; from torchtitan_lite.data.tokenizer import build_tokenizer\n"
        "build_tokenizer(''); print({'torch', 'tiktoken', 'tokenizers'} & sys.modules.keys())"
    )
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT) == b"set()\n"


# ----- Tokenizer: DataError -----


def refused(path: Path, reason: str) -> None:
    """Assert that `path` is refused: `reason`, a pattern, follows the setting."""
    start = rf'^\[model\] tokenizer_path = "{re.escape(str(path))}" '
    with pytest.raises(DataError, match=start + reason):
        build_tokenizer(str(path))


def test_what_is_no_tokenizer_is_refused(tmp_path):
    missing = 'cannot be read: No such file or directory; name .*, or "" for the included one$'
    refused(tmp_path / "none", missing)
    names = "tokenizer.json, tokenizer.model, original/tokenizer.model"
    refused(tmp_path, f"is a folder with none of {names}; name the whole file")
    (tmp_path / "empty").write_bytes(b"")
    refused(tmp_path / "empty", "is not a whole sentencepiece model")


@pytest.mark.timeout(20)
def test_pipes_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "is not a regular file; name")
    path = json_file(tmp_path / "tokenizer.json", "<s>", "</s>")
    os.mkfifo(tmp_path / "tokenizer_config.json")
    refused(path, "has a broken tokenizer_config.json beside it: is not a regular file; name")


class PanicException(BaseException):
    """What packages written in Rust raise; they do not let it be imported."""


@pytest.mark.parametrize("error", [PanicException, RuntimeError])
def test_a_vocabulary_that_fails_on_a_text_is_named(error, monkeypatch):
    def fail(texts: list[str]) -> list[list[int]]:
        raise error("index out of bounds")

    tokenizer = build_tokenizer("")
    monkeypatch.setattr(tokenizer, "_vocabulary", replace(tokenizer._vocabulary, encode=fail))
    with pytest.raises(DataError, match=r"^tokenizer .*\.model fails: .*index out of bounds; use"):
        tokenizer.encode("text")


@pytest.mark.parametrize(("package", "content"), [("tiktoken", b"AA== 0\n"), ("tokenizers", b"{}")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, package, content):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "t").write_bytes(content)
    fix = r'pip install "torchtitan-lite\[llama\]"'
    refused(tmp_path / "t", f"needs the package {package}; {fix}$")


def test_a_model_without_bos_is_refused(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["def f(x):\n\treturn x + 1\n", "class A:\n    value = 1234\n"] * 3),
        model_writer=model,
        vocab_size=30,
        bos_id=-1,
        model_type="bpe",
        minloglevel=2,
    )
    (tmp_path / "m").write_bytes(model.getvalue())
    refused(tmp_path / "m", "has BOS id -1 and EOS id 2, .* need both: name")


@pytest.mark.parametrize(("special", "config", "ids"), [
    ((), {}, (-1, -1)),
    (("<s>",), {}, (256, -1)),
    (("<s>", "</s>"), {"bos_token": "[BOS]"}, (-1, 257)),
])  # fmt: skip
def test_a_json_file_without_bos_or_eos_is_refused(tmp_path, special, config, ids):
    path = json_file(tmp_path / "tokenizer.json", *special)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    refused(path, f"has BOS id {ids[0]} and EOS id {ids[1]}, .* in a tokenizer_config.json")
