"""The manifest: what it takes for damage, and what its fingerprint follows."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_stores import RECIPE, write_store

from torchtitan_lite.data import manifest
from torchtitan_lite.data.manifest import (
    Shard,
    check_sizes,
    fingerprint_of,
    read_manifest,
    wrong_sizes,
)
from torchtitan_lite.errors import DataError

DOCUMENTS = [[10, 11, 12], [20], [30, 31, 32, 33, 34, 35], []]


@pytest.fixture
def store(tmp_path):
    return write_store(tmp_path / "store", DOCUMENTS)


def change(folder, **fields):
    path = folder / "manifest.json"
    fields = json.loads(path.read_text()) | fields
    fields.pop("sha256")
    path.write_text(json.dumps(fields | {"sha256": manifest._hash(fields)}))


def test_what_a_store_says_of_itself(store):
    found = read_manifest(store)
    assert (found.recipe, found.tokens, found.documents) == (RECIPE, 18, 4)
    assert (found.max_token_id, found.skipped_rows) == (35, 0)
    assert [(shard.tokens, shard.documents) for shard in found.shards] == [(10, 3), (8, 1)]
    assert sorted(path.name for path in store.iterdir()) == [
        "documents-00000.bin", "documents-00001.bin", "manifest.json", "tokens-00000.bin", "tokens-00001.bin"
    ]  # fmt: skip


def test_the_fingerprint_follows_ids_and_nothing_else(tmp_path, store):
    same = write_store(
        tmp_path / "same", DOCUMENTS, replace(RECIPE, source="elsewhere", source_fingerprint="x")
    )
    other = write_store(tmp_path / "other", [*DOCUMENTS[:-1], [7]])
    fingerprint = read_manifest(store).fingerprint
    assert read_manifest(same).fingerprint == fingerprint
    assert read_manifest(other).fingerprint != fingerprint
    shard = Shard(1, 1, "a", "b")
    assert fingerprint_of(RECIPE, (shard,)) != fingerprint_of(
        replace(RECIPE, tokenizer_fingerprint="u"), (shard,)
    )
    assert fingerprint_of(RECIPE, (shard,)) != fingerprint_of(RECIPE, (shard, shard))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"recipe": vars(RECIPE) | {"dtype": "O"}},
            r"recipe\.dtype: Input should be '<u2' or '<u4'",
        ),
        ({"recipe": {"format": 1}}, r"its format is 1, this version reads 2; make it anew"),
        ({"surplus": 1}, r"surplus: Unexpected keyword argument"),
        ({"shards": [{}]}, r"shards\.0\.tokens: Field required"),
        ({"shards": 5}, r"shards: Input should be a valid array"),
        ({"recipe": None}, r"'NoneType' object is not subscriptable"),
        (
            {"recipe": vars(RECIPE) | {"shard_tokens": 0}},
            r"recipe\.shard_tokens: Input should be greater than or equal",
        ),
        (
            {"recipe": vars(RECIPE) | {"shard_tokens": 2**33}},
            r"recipe\.shard_tokens: Input should be less than or equal",
        ),
        (
            {"recipe": vars(RECIPE) | {"shard_tokens": "x"}},
            r"recipe\.shard_tokens: Input should be a valid integer",
        ),
        (
            {"recipe": vars(RECIPE) | {"shard_tokens": 9}},
            r"its shards do not have 9 tokens each, the last one at most",
        ),
        (
            {"recipe": vars(RECIPE) | {"shard_tokens": 12}},
            r"its shards do not have 12 tokens each, the last one at m",
        ),
        (
            {"recipe": vars(RECIPE) | {"vocab_size": 2**16 + 1}},
            r"its tokenizer has 65537 ids, more than type '<u2'",
        ),
        (
            {"recipe": vars(RECIPE) | {"vocab_size": 10**12, "dtype": "<u4"}},
            r"its tokenizer has 10{12} ids, more than",
        ),
        ({"max_token_id": -1}, r"max_token_id: Input should be greater than or equal to 0"),
        ({"documents": True}, r"documents: Input should be a valid integer"),
        ({"documents": 5}, r"its shards have 18 tokens and 4 documents, not 18 and 5"),
        (
            {"tokens": 2**62},
            r"its shards have 18 tokens and 4 documents, not 4611686018427387904 and 4",
        ),
    ],
)
def test_a_manifest_that_is_not_right(store, fields, message):
    change(store, **fields)
    with pytest.raises(
        DataError, match=rf"^token store {store} is damaged: manifest.json: .*{message}"
    ):
        read_manifest(store)


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_manifest_is_found(tmp_path_factory, at, bit):
    folder = write_store(tmp_path_factory.mktemp("flip") / "store", DOCUMENTS)
    path = folder / "manifest.json"
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1 << bit
    path.write_bytes(content)
    try:
        assert read_manifest(folder) == read_manifest(
            write_store(folder.parent / "sound", DOCUMENTS)
        )  # of white space
    except DataError as error:
        assert "is damaged: manifest.json: " in str(error)


def test_a_manifest_that_is_missing_or_cut_off(store):
    path = store / "manifest.json"
    path.write_text(path.read_text()[:50])
    with pytest.raises(
        DataError,
        match="is damaged: manifest.json: Unterminated string|is damaged: manifest.json: Expecting",
    ):
        read_manifest(store)
    path.write_text("{}")
    with pytest.raises(DataError, match="is damaged: manifest.json: no field 'recipe'"):
        read_manifest(store)
    path.write_text("[" * 200_000)
    with pytest.raises(DataError, match="is damaged: manifest.json: maximum recursion depth"):
        read_manifest(store)
    path.unlink()
    with pytest.raises(DataError, match="is damaged: manifest.json: .*No such file"):
        read_manifest(store)


def test_files_of_wrong_sizes(store):
    found = read_manifest(store)
    check_sizes(store, found)
    with (store / "tokens-00001.bin").open("ab") as file:
        file.write(b"\0")
    (store / "documents-00000.bin").unlink()
    assert wrong_sizes(store, RECIPE, found.shards) == [
        "documents-00000.bin: No such file or directory", "tokens-00001.bin has 17 bytes, not 16"
    ]  # fmt: skip
    with pytest.raises(
        DataError, match=f"^token store {store} is damaged: documents-00000.bin: No such file"
    ):
        check_sizes(store, found)
