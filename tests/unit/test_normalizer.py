"""Normalizers that make a text much longer: refused, or bounded."""

import base64
import json

import pytest

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.data.normalizer import MAX_GROWTH, find_growth
from torchtitan_lite.data.tokenizer import build_tokenizer

tokenizers = pytest.importorskip("tokenizers")
normalizers, Regex = tokenizers.normalizers, tokenizers.Regex


def path_of(tmp_path, normalizer=None, decoder=None) -> str:
    words = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "<s>": 2, "</s>": 3}, []))
    if normalizer:
        words.normalizer = normalizer
    if decoder:
        words.decoder = decoder
    words.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


# ----- find_growth -----

CHARS = (0).to_bytes(4, "little") + b"ab\0" + b"x" * 9 + b"\0"


@pytest.mark.parametrize(("step", "growth"), [
    (normalizers.Replace(" ", "\u2581"), 3),
    (normalizers.Replace("``", '"'), 1),
    (normalizers.Replace(Regex("x*"), "abc"), 4),
    (normalizers.Prepend("\u2581"), 4),
    (normalizers.NFKC(), 11),
    (normalizers.Sequence([normalizers.Replace("a", "bb"), normalizers.NFD()]), 6),
    ({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(CHARS).decode()}, 9),
    (tokenizers.decoders.Sequence([tokenizers.decoders.Replace("a", "bb")]), 2),
])  # fmt: skip
def test_find_growth(step, growth):
    described = step if isinstance(step, dict) else json.loads(step.__getstate__())
    assert find_growth(described) == growth


# ----- check_growth, MAX_NORMALIZED -----


def test_rules_that_make_too_much_are_refused(tmp_path):
    several = normalizers.Sequence([normalizers.Replace("a", "a" * 300)] * 2)
    for parts in (
        {"normalizer": normalizers.Replace("a", "a" * (MAX_GROWTH + 1))},
        {"normalizer": several},
        {"decoder": tokenizers.decoders.Replace("a", "b" * 2**20)},
    ):
        with pytest.raises(DataError, match=r" has rules that make up to [\d,]+ bytes"):
            build_tokenizer(path_of(tmp_path, **parts))


def test_texts_that_become_too_long_are_refused(tmp_path):
    tokenizer = build_tokenizer(path_of(tmp_path, normalizers.Replace("a", "a" * 60_000)))
    assert tokenizer.encode("b" * 2**12) == [1] * 2**12
    with pytest.raises(DataError, match="can make 300,000,000 characters of a text; use another"):
        tokenizer.encode_documents(["b", "a" * 4999])
