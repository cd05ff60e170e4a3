"""Vocabulary files: their ids against the packages' own and against each other's, specials, long
runs, broken files."""

import argparse
import base64
import inspect
import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_lite.data.tokenizer import (
    LLAMA3_PATTERN,
    SHIPPED_MODEL,
    Vocabulary,
    _pieces,
    read_json,
    read_tiktoken,
    read_vocabulary,
)

tiktoken = pytest.importorskip("tiktoken")
tokenizers = pytest.importorskip("tokenizers")
converting = pytest.importorskip("transformers.convert_slow_tokenizer")

BYTES = [bytes([byte]) for byte in range(256)]
SPECIAL_TOKENS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(254)),
]
NOWHERE = Path("nowhere")
LEARNT = (
    inspect.getsource(argparse) + "Größe 日本語 日本 12345 123 2024 \r\n \t\t 😀 😀 it's IT'S\n"
)
TEXTS = [
    "",
    " ",
    "def f(x):\n    return x + 1234567\n\n\n\tpass  \r\n",
    "It's, WE'LL, they'Re; 1 12 123 1234 1234567890  ٣٤٥٦",
    "Größe 日本語のテキスト 😀😀 e\u0301 \u00a0\u3000 \u200b",
    " leading,  trailing   \n \n  \n",
    "<|begin_of_text|><|end_of_text|><|reserved_special_token_0|> <s></s>",
    "!!!\n???\r\n...---",
    LEARNT,
]


def tiktoken_file(tokens: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


@pytest.fixture(scope="module")
def tokens() -> list[bytes]:
    """600 tokens, by rank, of a byte-level BPE learnt from LEARNT. The package tokenizers breaks
    ties in a random order, and of some orders its ids of a text are not tiktoken's."""
    learnt = [*BYTES]
    words = Counter(
        tuple(bytes([byte]) for byte in word.encode())
        for word in re.findall(r"\s*\S+", LEARNT[-20_000:])
    )
    while len(learnt) < 600:
        pairs = Counter[tuple[bytes, bytes]]()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        words = Counter({merge(word, best): count for word, count in words.items()})
        learnt.append(b"".join(best))
    return learnt


def merge(word: tuple[bytes, ...], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    """Join each `pair` in `word`, from the left."""
    merged: list[bytes] = []
    for token in word:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return tuple(merged)


@pytest.fixture(scope="module")
def json_content(tokens: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The tokenizer.json that transformers makes of the tiktoken file, by its own way to split
    text."""
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.model"
    path.write_bytes(tiktoken_file(tokens))
    converter = converting.TikTokenConverter(
        vocab_file=str(path), extra_special_tokens=SPECIAL_TOKENS
    )
    return converter.converted().to_str().encode()


@pytest.fixture(scope="module")
def by_tiktoken(tokens: list[bytes]) -> Vocabulary:
    return read_vocabulary(tiktoken_file(tokens), NOWHERE)


@pytest.fixture(scope="module")
def by_json(json_content: bytes) -> Vocabulary:
    return read_vocabulary(json_content, NOWHERE)


@pytest.fixture(params=["by_tiktoken", "by_json"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return request.getfixturevalue(request.param)


# ----- read_vocabulary, Vocabulary -----


def test_read_vocabulary_recognizes_a_sentencepiece_model():
    assert read_vocabulary(SHIPPED_MODEL.read_bytes(), NOWHERE).size == 2256


def test_size_and_special_ids_are_llama_3s(vocabulary):
    assert (vocabulary.size, vocabulary.bos_id, vocabulary.eos_id) == (600 + 256, 600, 601)


@pytest.mark.parametrize("characters", [" ", "日"])
def test_many_characters_of_a_kind_survive(vocabulary, characters):
    text = characters * 300_000
    assert vocabulary.decode(vocabulary.encode([text])[0]) == text


def test_both_forms_and_the_packages_agree(tokens, json_content, by_tiktoken, by_json):
    ranks = {token: rank for rank, token in enumerate(tokens)}
    special = {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
    own = tiktoken.Encoding(
        "own", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
    hugging_face = tokenizers.Tokenizer.from_str(json_content.decode())
    ids = by_tiktoken.encode(TEXTS)
    assert by_json.encode(TEXTS) == ids
    assert [own.encode(text, disallowed_special=()) for text in TEXTS] == ids
    plain = [text for text in TEXTS if "<|" not in text]
    assert [hugging_face.encode(text).ids for text in plain] == by_json.encode(plain)
    assert len(ids[-1]) < len(LEARNT) / 2, "a vocabulary that merges nothing shows no order"


@settings(max_examples=150)
@given(
    text=st.text(st.characters(exclude_categories=["Cs", "Cn"]))
    | st.text("aAsStT'lL1 \n\r\t.é日😀<|>_")
)
def test_any_text_has_the_same_ids_in_both_forms_and_survives(text, by_tiktoken, by_json):
    [ids] = by_tiktoken.encode([text])
    assert by_json.encode([text]) == [ids]
    assert max(ids, default=0) < 600
    assert by_tiktoken.decode(ids) == by_json.decode(ids) == text
    assert by_json.decode([600, *ids, 601]) == text  # without BOS and EOS


# ----- _pieces, MAX_TEXT, MAX_RUN -----
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("a" * 25_000, [25_000]),
        ("a" * 25_001, [25_000, 1]),
        (" \t" * 12_501, [25_000, 2]),
        ("x " + "a" * 60_000 + " b", [25_002, 25_000, 10_002]),
        ("ab " * 9_000 + "a" * 25_001, [52_000, 1]),
        (("a" * 25_000 + " " * 25_000) * 9, [400_000, 50_000]),
        ("ab " * 300_000, [400_000, 400_000, 100_000]),
        ("x " * 199_990 + "a" * 25_010, [400_000, 24_990]),  # a run is counted in each text
    ],
)
def test_pieces_have_at_most_so_long_texts_and_runs(text, pieces):
    assert [len(piece) for piece in _pieces(text)] == pieces
    assert "".join(_pieces(text)) == text


# ----- read_json -----


def test_read_json_uses_no_truncation_padding_or_frame(json_content):
    tokenizer = tokenizers.Tokenizer.from_str(json_content.decode())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 600)]
    )
    texts = ["12345678", LEARNT]
    assert len(tokenizer.encode(texts[0]).ids) == 9
    framing, plain = tokenizer.to_str().encode(), json_content
    ids = [read_json(content, NOWHERE).encode(texts) for content in (framing, plain)]
    assert ids[0] == ids[1]


def test_read_json_gives_a_text_the_same_ids_each_time(json_content):
    fields = json.loads(json_content)
    fields["model"]["dropout"] = 0.5
    encode = read_json(json.dumps(fields).encode(), NOWHERE).encode
    assert encode([LEARNT] * 9) == read_json(json_content, NOWHERE).encode([LEARNT] * 9)


ADDED = {"__type": "AddedToken", "content": "<|reserved_special_token_0|>"}


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({}, (600, 601)),
        ({"bos_token": None, "eos_token": ""}, (600, 601)),
        ({"bos_token": "<|reserved_special_token_3|>"}, (605, 601)),
        ({"eos_token": ADDED}, (600, 602)),
        ({"bos_token": "unheard of", "eos_token": "<s>"}, (-1, -1)),
    ],
)
def test_read_json_takes_bos_and_eos_of_the_config(json_content, tmp_path, config, ids):
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(config))
    vocabulary = read_json(json_content, path)
    assert (vocabulary.bos_id, vocabulary.eos_id) == ids


@pytest.mark.parametrize("config", ["", "[]", '{"bos_token": {}}', '{"eos_token": 5}'])
def test_read_json_refuses_a_broken_config(json_content, tmp_path, config):
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ValueError, match="broken tokenizer_config.json beside it: "):
        read_vocabulary(json_content, tmp_path)


def test_read_json_counts_the_size_from_the_highest_id():
    words = {"<s>": 1, "</s>": 7, "word": 40}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    vocabulary = read_json(tokenizer.to_str().encode(), NOWHERE)
    assert (vocabulary.size, vocabulary.bos_id, vocabulary.eos_id) == (41, 1, 7)


# ----- read_tiktoken -----

WHOLE = tiktoken_file([*BYTES, b"ab", b"abc"])


def test_read_tiktoken_of_a_small_vocabulary():
    vocabulary = read_tiktoken(tiktoken_file([*BYTES, b"ab", b"abc", b" ab", b"12", b"123", b"SA"]))
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.size) == (262, 263, 518)
    assert vocabulary.encode(["abc ab", "12345", "a\n"]) == [[257, 258], [260, 52, 53], [97, 10]]
    # A contraction ends in any case.
    assert vocabulary.encode(["SA", "x'SA"]) == [[261], [120, 39, 83, 65]]
    assert vocabulary.decode([262, 257, 258, 263, 517]) == "abc ab"


def test_read_tiktoken_with_windows_line_ends():
    assert read_tiktoken(WHOLE.replace(b"\n", b"\r\n")).encode(["abc"]) == [[257]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (WHOLE[:-2], "tiktoken file: ranks are missing"),
        (WHOLE[:-5], "tiktoken file: not enough values"),
        (WHOLE + b"cut", "tiktoken file: not enough values"),
        (WHOLE + b"YQ== 258\n", "tiktoken file: .* tokens stand twice"),
        (WHOLE + b"YmFk 257\n", "tiktoken file: ranks are missing"),
        (WHOLE + b"YmFk 259\n", "tiktoken file: ranks are missing"),
        (WHOLE + b"Ym=k 258\n", "tiktoken file: "),
        (WHOLE + b"\xff\xff 258\n", "tiktoken file: "),
        (b"{", "tokenizer.json: .*"),
        (b'{"version": "1.0", "model": {}}', "tokenizer.json: .*"),
        (b"", "sentencepiece model, "),
        (b"no model" * 100, "sentencepiece model, "),
        (SHIPPED_MODEL.read_bytes()[:1000], "sentencepiece model, "),
    ],
)
def test_read_vocabulary_refuses_broken_files(content, message):
    with pytest.raises(ValueError, match=f"^is not a whole {message}"):
        read_vocabulary(content, NOWHERE)
