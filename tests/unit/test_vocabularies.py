"""Vocabulary files: their ids against the packages' own and against each other's, specials, long
runs, broken files."""

import argparse
import base64
import inspect
import json
import os
import textwrap
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
    read_sentencepiece,
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
    inspect.getsource(argparse)
    + inspect.getsource(textwrap)
    + "Größe 日本語 日本 12345 123 2024 \r\n \t\t 😀 😀 it's IT'S\n"
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
]


def tiktoken_file(tokens: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


@pytest.fixture(scope="module")
def tokens() -> list[bytes]:
    """600 tokens, by rank, of a byte-level BPE learnt from LEARNT."""
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        LEARNT.splitlines(keepends=True),
        tokenizers.trainers.BpeTrainer(
            vocab_size=600, initial_alphabet=letters, show_progress=False
        ),
    )
    byte_of = {letter: byte for byte, letter in converting.bytes_to_unicode().items()}
    vocab = tokenizer.get_vocab()
    return [
        bytes(byte_of[letter] for letter in token) for token in sorted(vocab, key=vocab.__getitem__)
    ]


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


def test_the_form_is_recognized_by_the_content(
    by_tiktoken: Vocabulary, by_json: Vocabulary
) -> None:
    shipped = read_vocabulary(SHIPPED_MODEL.read_bytes(), NOWHERE)
    assert [v.size for v in (shipped, by_tiktoken, by_json)] == [2256, 600 + 256, 600 + 256]


def test_size_and_special_ids_are_llama_3s(by_tiktoken: Vocabulary, by_json: Vocabulary) -> None:
    for vocabulary in (by_tiktoken, by_json):
        assert (vocabulary.size, vocabulary.bos_id, vocabulary.eos_id) == (600 + 256, 600, 601)


def test_ids_of_a_small_vocabulary() -> None:
    vocabulary = read_tiktoken(tiktoken_file([*BYTES, b"ab", b"abc", b" ab", b"12", b"123", b"SA"]))
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.size) == (262, 263, 518)
    assert vocabulary.encode(["abc ab", "12345", "a\n"]) == [[257, 258], [260, 52, 53], [97, 10]]
    assert vocabulary.encode(["SA", "x'SA"]) == [[261], [120, 39, 83, 65]], (
        "a contraction ends in any case"
    )
    assert vocabulary.decode([262, 257, 258, 263, 517]) == "abc ab"


def test_both_forms_and_the_packages_agree(
    tokens: list[bytes], json_content: bytes, by_tiktoken: Vocabulary, by_json: Vocabulary
) -> None:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    special = {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
    own = tiktoken.Encoding(
        "own", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
    hugging_face = tokenizers.Tokenizer.from_str(json_content.decode())
    documents = [*TEXTS, LEARNT]
    ids = by_tiktoken.encode(documents)
    assert by_json.encode(documents) == ids
    assert [own.encode(text, disallowed_special=()) for text in documents] == ids
    plain = [text for text in documents if "<|" not in text]
    assert [hugging_face.encode(text).ids for text in plain] == by_json.encode(plain)
    assert len(ids[-1]) < len(LEARNT) / 2, (
        "a vocabulary that merges nothing would not show an order of merges"
    )


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs", "Cn"]))
    | st.text("aAsStT'lL1 \n\r\t.é日😀<|>_")
)
def test_any_text_has_the_same_ids_in_both_forms_and_survives(
    text: str, by_tiktoken: Vocabulary, by_json: Vocabulary
) -> None:
    [ids] = by_tiktoken.encode([text])
    assert by_json.encode([text]) == [ids]
    assert max(ids, default=0) < 600
    assert by_tiktoken.decode(ids) == by_json.decode(ids) == text


@pytest.mark.parametrize("form", ["by_tiktoken", "by_json"])
def test_special_tokens_in_a_text_are_text(form: str, request: pytest.FixtureRequest) -> None:
    vocabulary: Vocabulary = request.getfixturevalue(form)
    [ids] = vocabulary.encode(["".join(SPECIAL_TOKENS)])
    assert max(ids) < 600
    assert vocabulary.decode([600, *ids, 601]) == "".join(SPECIAL_TOKENS)


@pytest.mark.parametrize("form", ["by_tiktoken", "by_json"])
def test_numbers_are_split_into_threes(form: str, request: pytest.FixtureRequest) -> None:
    whole, *parts = request.getfixturevalue(form).encode(["12345678", "123", "456", "78"])
    assert whole == [token for part in parts for token in part]


@pytest.mark.parametrize("characters", [" ", "a", " \t", "日"])
@pytest.mark.parametrize("form", ["by_tiktoken", "by_json"])
def test_a_million_characters_of_a_kind_survive(
    form: str, characters: str, request: pytest.FixtureRequest
) -> None:
    vocabulary: Vocabulary = request.getfixturevalue(form)
    text = characters * (10**6 // len(characters))
    assert vocabulary.decode(vocabulary.encode([text])[0]) == text


@settings(max_examples=25, deadline=None)
@given(
    runs=st.lists(
        st.tuples(
            st.sampled_from(["  \t", "abc"]),
            st.sampled_from([1, 12_499, 25_000, 25_001, 50_000, 90_000]),
        ),
        max_size=12,
    )
)
def test_long_texts_and_runs_are_cut_as_the_reference_does(runs: list[tuple[str, int]]) -> None:
    """Against a count over every character."""
    text = "".join((kind * length)[:length] for kind, length in runs)
    expected = []
    for start in range(0, len(text), 400_000):
        part = text[start : start + 400_000]
        cut, length = 0, 0
        for at, character in enumerate(part):
            length = length + 1 if at and character.isspace() == part[at - 1].isspace() else 1
            if length > 25_000:
                expected.append(part[cut:at])
                cut, length = at, 1
        expected.append(part[cut:])
    assert list(_pieces(text)) == expected


def test_runs_are_cut_at_their_own_limit() -> None:
    text = "x " + "a" * 60_000 + " b"
    assert [len(piece) for piece in _pieces(text)] == [25_002, 25_000, 10_002]
    assert [len(piece) for piece in _pieces("ab " * 300_000)] == [
        400_000,
        400_000,
        100_000,
    ]


def test_a_tokenizer_jsons_truncation_padding_and_frame_are_not_used(json_content: bytes) -> None:
    tokenizer = tokenizers.Tokenizer.from_str(json_content.decode())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 600)]
    )
    assert len(tokenizer.encode("12345678").ids) == 9
    framing = read_json(tokenizer.to_str().encode(), NOWHERE)
    assert framing.encode(["12345678", LEARNT]) == read_json(json_content, NOWHERE).encode(
        ["12345678", LEARNT]
    )


def test_a_tokenizer_json_is_encoded_on_one_core(
    json_content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    read_json(json_content, NOWHERE)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({}, (600, 601)),
        ({"bos_token": None, "eos_token": ""}, (600, 601)),
        ({"bos_token": "<|reserved_special_token_3|>"}, (605, 601)),
        (
            {"eos_token": {"__type": "AddedToken", "content": "<|reserved_special_token_0|>"}},
            (600, 602),
        ),
        ({"bos_token": "unheard of", "eos_token": "<s>"}, (-1, -1)),
    ],
)
def test_bos_and_eos_are_the_configs(
    json_content: bytes, tmp_path: Path, config: dict, ids: tuple[int, int]
) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(config))
    vocabulary = read_json(json_content, path)
    assert (vocabulary.bos_id, vocabulary.eos_id) == ids


@pytest.mark.parametrize("config", ["", "[]", '{"bos_token": {}}', '{"eos_token": 5}'])
def test_a_broken_config_is_refused(json_content: bytes, tmp_path: Path, config: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(
        ValueError, match="^has a broken tokenizer_config.json beside it: .*; fix or remove that$"
    ):
        read_vocabulary(json_content, tmp_path)


def test_the_size_counts_from_the_highest_id() -> None:
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<s>": 1, "</s>": 7, "word": 40}, unk_token="<s>")
    )
    vocabulary = read_json(tokenizer.to_str().encode(), NOWHERE)
    assert (vocabulary.size, vocabulary.bos_id, vocabulary.eos_id) == (41, 1, 7)


WHOLE = tiktoken_file([*BYTES, b"ab", b"abc"])
NO_TIKTOKEN = "^is not a whole tiktoken file: line {} is not a new .* and the rank {}; get the file"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (WHOLE[:-2], NO_TIKTOKEN.format(258, 257)),
        (WHOLE[:-5], NO_TIKTOKEN.format(258, 257)),
        (WHOLE + b"cut", NO_TIKTOKEN.format(259, 258)),
        (WHOLE + b"YQ== 258\n", NO_TIKTOKEN.format(259, 258)),
        (WHOLE + b"YmFk 257\n", NO_TIKTOKEN.format(259, 258)),
        (WHOLE + b"YmFk 259\n", NO_TIKTOKEN.format(259, 258)),
        (WHOLE + b"Ym=k 258\n", NO_TIKTOKEN.format(259, 258)),
        (WHOLE + b"\xff\xff 258\n", NO_TIKTOKEN.format(259, 258)),
        (
            tiktoken_file([*BYTES[:200], b"ab"]),
            "^is not a whole tiktoken file: 56 of the 256 bytes are no token; get",
        ),
        (b"{", "^is not a whole tokenizer.json: .*; get the file again$"),
        (b"{}", "^is not a whole tokenizer.json: .*; get the file again$"),
        (
            b'{"version": "1.0", "model": {}}',
            "^is not a whole tokenizer.json: .*; get the file again$",
        ),
        (b"", "^is not a whole sentencepiece model, nor .*; torchtitan-lite tokenizer makes"),
        (b"no model" * 100, "^is not a whole sentencepiece model, nor"),
        (SHIPPED_MODEL.read_bytes()[:1000], "^is not a whole sentencepiece model, nor"),
    ],
)
def test_broken_files_are_refused(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_vocabulary(content, NOWHERE)


def test_windows_line_ends_are_read() -> None:
    assert read_tiktoken(WHOLE.replace(b"\n", b"\r\n")).encode(["abc"]) == [[257]]


@pytest.mark.parametrize("form", ["by_tiktoken", "by_json", "sentencepiece"])
@pytest.mark.parametrize("text", ["def f(x):\n\treturn 12345", "語 and 😀, é", " leading", ""])
def test_bytes_of_ids_add_up_to_the_bytes_of_the_text(
    form: str, text: str, request: pytest.FixtureRequest
) -> None:
    if form == "sentencepiece":
        vocabulary = read_sentencepiece(SHIPPED_MODEL.read_bytes())
    else:
        vocabulary = request.getfixturevalue(form)
    (ids,) = vocabulary.encode([text])
    frame = [vocabulary.bos_id, vocabulary.eos_id]
    assert sum(map(vocabulary.bytes_of, [*frame, *ids])) == len(text.encode())
