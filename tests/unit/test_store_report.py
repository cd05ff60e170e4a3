"""The description of a store: its counts, and a window's text."""

import pytest

from torchtitan_lite.data.prepare import make_store
from torchtitan_lite.data.sources import open_source
from torchtitan_lite.data.store_report import format_window
from torchtitan_lite.data.token_store import TokenStore
from torchtitan_lite.data.tokenizer import build_tokenizer
from torchtitan_lite.errors import DataError

TOKENIZER = build_tokenizer("")
TEXTS = ["import os\n", "x = 1\n"]


@pytest.fixture
def store(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i, text in enumerate(TEXTS):
        (corpus / f"{i}.py").write_text(text)
    make_store(tmp_path / "store", open_source(str(corpus)), TOKENIZER, workers=1)
    return TokenStore(tmp_path / "store")


def test_a_window_is_a_line_a_document(store):
    whole = format_window(store, TOKENIZER, window=0, seq_len=100)
    assert whole.splitlines() == [
        f"{store.folder}: {store.tokens} tokens in 2 documents of {store.manifest.recipe.source}",
        f"window 0, tokens 0 to {store.tokens - 1}:",
        repr(TEXTS[0]),
        repr(TEXTS[1]),
    ]
    first = len(TOKENIZER.encode(TEXTS[0])) + 2
    assert format_window(store, TOKENIZER, window=1, seq_len=first).splitlines()[1:] == [
        f"window 1, tokens {first} to {2 * first - 1}:", repr(TEXTS[1][:5])
    ]  # fmt: skip


def test_windows_that_are_not_there(store):
    with pytest.raises(
        DataError, match=rf"^--window 1: {store.folder} has windows 0 to 0 of 100 tokens$"
    ):
        format_window(store, TOKENIZER, window=1, seq_len=100)


def test_text_needs_the_tokenizer(store):
    other = build_tokenizer("")
    other.fingerprint = "other"
    with pytest.raises(
        DataError,
        match="is not the one that .* was made with: pystdlib-2256.model, .*; name that",
    ):
        format_window(store, other, window=0, seq_len=100)
