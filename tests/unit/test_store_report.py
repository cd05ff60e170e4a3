"""Damage to a token store is found and named; a store is described, with a window's text."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_stores import OLD_RECIPE, RECIPE, write_store

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.data.sources import open_source
from torchtitan_lite.data.store_report import format_window, verify_store
from torchtitan_lite.data.store_writer import make_store
from torchtitan_lite.data.token_store import TokenStore
from torchtitan_lite.data.tokenizer import build_tokenizer

DOCUMENTS = [[10, 11, 12], [20], list(range(30, 60)), [], [5]]
TOKENIZER = build_tokenizer("")
TEXTS = ["import os\n", "x = 1\n"]

# ----- verify_store -----


@pytest.fixture(params=[RECIPE, OLD_RECIPE], ids=["format 3", "format 2"])
def store(tmp_path, request):
    return write_store(tmp_path / "store", DOCUMENTS, request.param)


def test_a_store_as_it_was_made(store):
    assert verify_store(store) == []


@given(data=st.data())
def test_any_flipped_bit_is_found_and_its_file_named(tmp_path_factory, data):
    folder = write_store(tmp_path_factory.mktemp("flip") / "store", DOCUMENTS)
    path = data.draw(st.sampled_from(sorted(p for p in folder.glob("*.bin") if p.stat().st_size)))
    bit = data.draw(st.integers(0, 8 * path.stat().st_size - 1))
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    assert verify_store(folder) == [f"{path.name}: its contents have changed"]


def test_swapped_shards_are_named(store):
    names = ["tokens-00001.bin", "tokens-00002.bin"]
    contents = [(store / name).read_bytes() for name in names]
    for name, content in zip(names, reversed(contents), strict=True):
        (store / name).write_bytes(content)
    assert verify_store(store) == [f"{name}: its contents have changed" for name in names]


def test_wrong_sizes_are_named(store):
    os.truncate(store / "tokens-00001.bin", 10)
    (store / "documents-00000.bin").unlink()
    assert verify_store(store) == [
        "documents-00000.bin: No such file or directory",
        "tokens-00001.bin has 10 bytes, not 20",
    ]


def test_a_manifest_that_changed_or_is_missing_is_refused(store):
    path = store / "manifest.json"
    path.write_text(path.read_text().replace('"fingerprint": "', '"fingerprint": "0'))
    message = f"^token store {store} is damaged: manifest.json: its contents have changed; "
    with pytest.raises(DataError, match=message):
        verify_store(store)
    path.unlink()
    with pytest.raises(DataError, match="manifest.json: .*No such file"):
        verify_store(store)


# ----- format_window -----


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A store of TEXTS."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "corpus").mkdir()
    for i, text in enumerate(TEXTS):
        (folder / f"corpus/{i}.py").write_text(text)
    make_store(folder / "store", open_source(str(folder / "corpus")), TOKENIZER)
    return TokenStore(folder / "store")


def test_a_window_is_a_line_a_document(texts):
    whole = format_window(texts, TOKENIZER, window=0, seq_len=100)
    assert whole.splitlines() == [
        f"{texts.folder}: {texts.tokens} tokens in 2 documents of {texts.manifest.recipe.source}",
        f"window 0, tokens 0 to {texts.tokens - 1}:",
        *map(repr, TEXTS),
    ]
    first = len(TOKENIZER.encode(TEXTS[0])) + 2
    second = format_window(texts, TOKENIZER, window=1, seq_len=first).splitlines()[1:]
    assert second == [f"window 1, tokens {first} to {2 * first - 1}:", repr(TEXTS[1][:5])]


def test_other_windows_and_other_tokenizers_are_refused(texts):
    for window in (-1, 1):
        with pytest.raises(DataError, match=rf"^--window {window}: .* 0 to 0 of 100 tokens$"):
            format_window(texts, TOKENIZER, window=window, seq_len=100)
    other = build_tokenizer("")
    other.fingerprint = "other"
    with pytest.raises(DataError, match="not the one .* made with: pystdlib-2256.model, .*"):
        format_window(texts, other, window=0, seq_len=100)
