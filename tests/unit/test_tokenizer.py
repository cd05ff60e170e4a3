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
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_lite.data.tokenizer import SHIPPED_MODEL, Tokenizer, build_tokenizer
from torchtitan_lite.errors import DataError

ROOT = Path(__file__).parents[2]
BYTES = {chr(i): i for i in range(256)}


@pytest.fixture(scope="module")
def shipped() -> Tokenizer:
    return build_tokenizer("")


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


def test_shipped_model(shipped: Tokenizer) -> None:
    assert (shipped.vocab_size, shipped.bos_id, shipped.eos_id) == (2256, 1, 2)
    assert (shipped.path, shipped.name) == (SHIPPED_MODEL, "pystdlib-2256.model")
    assert SHIPPED_MODEL.stat().st_size < 100_000
    assert len(shipped.encode("    return self.value\n")) <= 6


def test_python_source_survives(shipped: Tokenizer) -> None:
    source = 'def f():\r\n\t\t\tif x:\n    y = "é 日本 😀"   \n\n\n  '
    source += "# <s> </s> <0x0A> trailing \x0c\x00 "
    assert shipped.decode(shipped.encode(source)) == source


@settings(max_examples=200)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_any_text_survives(text: str) -> None:
    tokenizer = build_tokenizer("")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {0, 1, 2} & set(ids)


def test_documents_are_framed(shipped: Tokenizer) -> None:
    assert shipped.encode_documents(["a b", "", "</s>"]) == [
        [1, *shipped.encode("a b"), 2],
        [1, 2],
        [1, *shipped.encode("</s>"), 2],
    ]
    assert shipped.decode([1, *shipped.encode("a b"), 2]) == "a b"


def test_the_fingerprint_is_of_the_content_and_of_what_frames_it(
    tmp_path: Path, shipped: Tokenizer
) -> None:
    assert build_tokenizer(str(model_file(tmp_path / "copy"))).fingerprint == shipped.fingerprint
    path = json_file(tmp_path / "tokenizer.json", "<s>", "</s>", "<end>")
    first = build_tokenizer(str(path))
    assert (first.bos_id, first.eos_id) == (256, 257)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    second = build_tokenizer(str(path))
    assert (second.bos_id, second.eos_id) == (256, 258)
    assert len({shipped.fingerprint, first.fingerprint, second.fingerprint}) == 3


def test_a_folders_first_file_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-3"
    model_file(folder / "original" / "tokenizer.model")
    assert build_tokenizer(str(folder)).name == "Llama-3/original/tokenizer.model"
    model_file(folder / "tokenizer.model")
    assert build_tokenizer(str(folder)).name == "Llama-3/tokenizer.model"
    json_file(folder / "tokenizer.json", "<s>", "</s>")
    tokenizer = build_tokenizer(str(folder))
    assert (tokenizer.name, tokenizer.path) == ("Llama-3/tokenizer.json", folder / "tokenizer.json")
    assert build_tokenizer(str(folder / "tokenizer.json")).name == "tokenizer.json"


def test_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model_file(tmp_path / "t.model")
    assert build_tokenizer("~/t.model").vocab_size == 2256


def test_the_optional_packages_are_not_needed_and_torch_is_not_imported() -> None:
    code = (
        "import sys; from torchtitan_lite.data.tokenizer import build_tokenizer\n"
        "build_tokenizer('');"
        "print({'torch', 'tiktoken', 'tokenizers'} & sys.modules.keys())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "set()\n"


def refused(path: Path, reason: str) -> None:
    """See that `path` is refused: `reason`, a pattern, follows the setting."""
    with pytest.raises(
        DataError, match=rf'^\[model\] tokenizer_path = "{re.escape(str(path))}" {reason}'
    ):
        build_tokenizer(str(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    refused(
        tmp_path / "none",
        "cannot be read: No such file or directory; name a tokenizer's file or folder, "
        'or "" for the included one$',
    )


@pytest.mark.timeout(20)
def test_pipes_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "is not a regular file$")
    path = json_file(tmp_path / "tokenizer.json", "<s>", "</s>")
    os.mkfifo(tmp_path / "tokenizer_config.json")
    refused(path, "has a broken tokenizer_config.json beside it: is not a regular file; fix or")


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    refused(tmp_path / "empty", "is not a whole sentencepiece model")


class PanicException(BaseException):
    """What packages written in Rust raise; they do not let it be imported."""


@pytest.mark.parametrize("error", [PanicException, RuntimeError])
def test_a_vocabulary_that_fails_on_a_text_is_named(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(texts: list[str]) -> list[list[int]]:
        raise error("index out of bounds")

    tokenizer = build_tokenizer("")
    monkeypatch.setattr(tokenizer, "_vocabulary", replace(tokenizer._vocabulary, encode=fail))
    with pytest.raises(DataError, match=r"^tokenizer .*\.model fails: .*index out of bounds; get"):
        tokenizer.encode("text")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    names = "tokenizer.json, tokenizer.model, original/tokenizer.model"
    refused(tmp_path, f"is a folder with none of {names}; name a tokenizer's file$")


@pytest.mark.parametrize(("package", "content"), [("tiktoken", b"AA== 0\n"), ("tokenizers", b"{}")])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, content: bytes
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "t").write_bytes(content)
    refused(
        tmp_path / "t",
        rf'is read with the package {package}, .*; pip install "torchtitan-lite\[llama\]"$',
    )


def test_a_model_without_bos_is_refused(tmp_path: Path) -> None:
    model = io.BytesIO()
    texts = ["def f(x):\n\treturn x + 1\n", "class A:\n    value = 1234\n"] * 3
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=30,
        bos_id=-1,
        model_type="bpe",
        minloglevel=2,
    )
    (tmp_path / "m").write_bytes(model.getvalue())
    refused(
        tmp_path / "m",
        "has BOS id -1 and EOS id 2, where -1 is none; documents need both, so train",
    )


@pytest.mark.parametrize(
    ("special", "config", "ids"),
    [
        ((), {}, (-1, -1)),
        (("<s>",), {}, (256, -1)),
        (("<s>", "</s>"), {"bos_token": "[BOS]"}, (-1, 257)),
    ],
)
def test_a_json_file_without_bos_or_eos_is_refused(
    tmp_path: Path, special: tuple[str, ...], config: dict, ids: tuple[int, int]
) -> None:
    path = json_file(tmp_path / "tokenizer.json", *special)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    refused(
        path, f"has BOS id {ids[0]} and EOS id {ids[1]}, .* or name them in a tokenizer_config.json"
    )
