"""The manifest: which damage it finds, and which formats it reads."""

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_stores import OLD_RECIPE, RECIPE, write_store

from torchtitan_lite.data.token_store import DamagedStoreError, read_manifest, wrong_sizes
from torchtitan_lite.documents import write_document
from torchtitan_lite.errors import DataError

DOCUMENTS = [[10, 11, 12], [20], [30, 31, 32, 33, 34, 35], []]


@pytest.fixture
def store(tmp_path):
    return write_store(tmp_path / "store", DOCUMENTS)


@pytest.fixture
def old_store(tmp_path):
    return write_store(tmp_path / "old", DOCUMENTS, OLD_RECIPE)


def change(folder, **fields):
    path = folder / "manifest.json"
    fields = json.loads(path.read_text()) | fields
    fields.pop("sha256")
    write_document(path, fields)


def test_what_a_store_says_of_itself(store):
    found = read_manifest(store)
    assert (found.recipe, found.tokens, found.documents) == (RECIPE, 18, 4)
    assert (found.max_token_id, found.skipped_rows) == (35, 0)
    assert [(shard.tokens, shard.documents) for shard in found.shards] == [(10, 3), (8, 1)]
    assert sorted(path.name for path in store.iterdir()) == [
        "documents-00000.bin",
        "documents-00001.bin",
        "manifest.json",
        "tokens-00000.bin",
        "tokens-00001.bin",
    ]


def test_both_formats_are_read_and_names_are_no_difference(store, old_store):
    new, old = read_manifest(store), read_manifest(old_store)
    assert (new.recipe.format, old.recipe.format, old.recipe.shard_tokens) == (3, 2, 10)
    assert new.recipe == old.recipe == replace(RECIPE, source="elsewhere", tokenizer="renamed")
    assert new.recipe != replace(RECIPE, source_fingerprint="x")
    assert new.fingerprint == old.fingerprint


@pytest.mark.parametrize("found", [1, 4])
def test_other_formats_are_refused_but_not_taken_for_damage(store, found):
    change(store, recipe=vars(RECIPE) | {"format": found})
    message = f"its format is {found}, this version reads 2 and 3"
    with pytest.raises(DataError, match=message) as caught:
        read_manifest(store)
    assert not isinstance(caught.value, DamagedStoreError)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"recipe": vars(RECIPE) | {"dtype": "O"}},
            r"recipe\.dtype: Input should be '<u2' or '<u4'",
        ),
        ({"surplus": 1}, r"surplus: Unexpected keyword argument"),
        ({"shards": [{}]}, r"shards\.0\.tokens: Field required"),
        ({"shards": 5}, r"shards: Input should be a valid array"),
        ({"recipe": None}, r"recipe: Input should be an object"),
        (
            {"recipe": vars(OLD_RECIPE) | {"shard_tokens": -1}},
            r"recipe\.shard_tokens: Input should be greater than or equal",
        ),
        (
            {"recipe": vars(OLD_RECIPE) | {"shard_tokens": "x"}},
            r"recipe\.shard_tokens: Input should be a valid integer",
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
        ({"max_token_id": 1000}, r"its highest id is 1000, and its tokenizer has 1000 ids"),
        (
            {"tokens": 2**62},
            r"its shards have 18 tokens and 4 documents, not 4611686018427387904 and 4",
        ),
    ],
)
def test_a_manifest_with_wrong_fields(store, fields, message):
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
        damaged = "is damaged: manifest.json: " in str(error)
        assert damaged or "manifest.json: its format is " in str(error)


def test_a_missing_folder_is_missing_and_not_damaged(tmp_path):
    message = f"^token store {tmp_path}/none is missing; name the folder of a store$"
    with pytest.raises(DataError, match=message) as caught:
        read_manifest(tmp_path / "none")
    assert not isinstance(caught.value, DamagedStoreError)


@pytest.mark.timeout(20)
def test_pipes_are_named_and_not_waited_for(store):
    (store / "tokens-00001.bin").unlink()
    os.mkfifo(store / "tokens-00001.bin")
    problem = "tokens-00001.bin is not a regular file"
    assert list(wrong_sizes(store, read_manifest(store)).values()) == [problem]
    (store / "manifest.json").unlink()
    os.mkfifo(store / "manifest.json")
    with pytest.raises(DataError, match="is damaged: manifest.json: is not a regular file"):
        read_manifest(store)


def test_numbers_of_many_digits_are_refused(store):
    change(store, tokens=10**40)
    with pytest.raises(DataError, match=r"manifest.json: tokens: Input should be"):
        read_manifest(store)
    change(store, tokens=10**400)
    with pytest.raises(DataError, match="holds a number of more than 100 digits"):
        read_manifest(store)
    path = store / "manifest.json"
    path.write_text(path.read_text().replace('"tokens": 1', f'"tokens": {"1" * 5000}', 1))
    with pytest.raises(DataError, match="is damaged: manifest.json: not JSON: .*4300 digits"):
        read_manifest(store)


def test_a_manifest_that_is_missing_or_cut_off(store):
    path = store / "manifest.json"
    path.write_text(path.read_text()[:50])
    with pytest.raises(
        DataError,
        match="is damaged: manifest.json: not JSON: (Unterminated string|Expecting)",
    ):
        read_manifest(store)
    path.write_text("{}")
    with pytest.raises(DataError, match="is damaged: manifest.json: its contents have changed"):
        read_manifest(store)
    path.write_text("[" * 200_000)
    with pytest.raises(
        DataError, match="is damaged: manifest.json: not JSON: maximum recursion depth"
    ):
        read_manifest(store)
    path.unlink()
    with pytest.raises(DataError, match="is damaged: manifest.json: .*No such file"):
        read_manifest(store)


@pytest.mark.parametrize("kind", ["store", "old_store"])
def test_files_of_wrong_sizes(kind, request):
    folder = request.getfixturevalue(kind)
    found = read_manifest(folder)

    def problems() -> list[str]:
        return list(wrong_sizes(folder, found).values())

    assert problems() == []
    with (folder / "tokens-00001.bin").open("ab") as file:
        file.write(b"\0")
    (folder / "documents-00000.bin").unlink()
    assert problems() == [
        "documents-00000.bin: No such file or directory",
        "tokens-00001.bin has 17 bytes, not 16",
    ]
