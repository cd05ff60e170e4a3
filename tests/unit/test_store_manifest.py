"""The manifest of a token store: which damage it finds, and which formats it reads."""

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_stores import OLD_RECIPE, RECIPE, write_store

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.base.jsonfile import write_hashed_json
from torchtitan_lite.data.token_store import read_manifest, verify_store, wrong_sizes

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
    write_hashed_json(path, fields)


# ----- read_manifest -----


def test_manifest_of_a_store(store):
    found = read_manifest(store)
    assert (found.recipe, found.tokens, found.documents) == (RECIPE, 18, 4)
    assert (found.max_token_id, found.skipped_rows) == (35, 0)
    assert [(shard.tokens, shard.documents) for shard in found.shards] == [(10, 3), (8, 1)]
    files = [f"{kind}-0000{number}.bin" for kind in ("documents", "tokens") for number in (0, 1)]
    assert sorted(path.name for path in store.iterdir()) == sorted([*files, "manifest.json"])


def test_both_formats_are_read_and_names_are_no_difference(store, old_store):
    new, old = read_manifest(store), read_manifest(old_store)
    assert (new.recipe.format, old.recipe.format, old.recipe.shard_tokens) == (3, 2, 10)
    assert new.recipe == old.recipe == replace(RECIPE, source="elsewhere", tokenizer="renamed")
    assert new.recipe != replace(RECIPE, source_fingerprint="x")
    assert new.fingerprint == old.fingerprint


@pytest.mark.parametrize("found", [1, 4])
def test_other_formats_are_refused_with_the_command_that_makes_them_again(store, found):
    change(store, recipe=vars(RECIPE) | {"format": found})
    message = f"its format is {found}, this version reads 2 and 3; .*: torchtitan-lite data make$"
    with pytest.raises(DataError, match=message):
        read_manifest(store)


def recipe(base=RECIPE, **fields):
    return {"recipe": vars(base) | fields}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (recipe(dtype="O"), r"recipe\.dtype: Input should be '<u2' or '<u4'"),
        ({"surplus": 1}, "surplus: Unexpected keyword argument"),
        ({"shards": [{}]}, r"shards\.0\.tokens: Field required"),
        ({"shards": 5}, "shards: .*valid array"),
        ({"recipe": None}, "recipe: .*object"),
        (recipe(OLD_RECIPE, shard_tokens=-1), r"recipe\.shard_tokens: .*greater than or equal"),
        (recipe(OLD_RECIPE, shard_tokens="x"), r"recipe\.shard_tokens: .*valid integer"),
        (recipe(vocab_size=2**16 + 1), "its highest id is 35, of 65537 ids in type '<u2'"),
        (recipe(vocab_size=10**12, dtype="<u4"), "its highest id is 35, of 10{12} ids in"),
        ({"max_token_id": -1}, "max_token_id: .*greater than or equal to 0"),
        ({"documents": True}, "documents: .*valid integer"),
        ({"max_token_id": 1000}, "its highest id is 1000, of 1000 ids"),
        ({"tokens": 10**40}, "tokens: Input should be"),
        ({"tokens": 10**400}, "holds a number of more than 100 digits"),
    ],
)
def test_wrong_fields_are_damage(store, fields, message):
    change(store, **fields)
    found = rf"^token store {store}: manifest.json: .*{message}"
    with pytest.raises(DataError, match=found):
        read_manifest(store)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, ".*No such file"), ('{"rec', "not JSON: "), ("{}", "its contents have changed")],
)
def test_what_is_no_manifest_is_damage(store, text, message):
    (store / "manifest.json").unlink()
    if text is not None:
        (store / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=f"manifest.json: {message}"):
        read_manifest(store)


def test_a_missing_folder_is_missing_and_not_damaged(tmp_path):
    message = f"^token store {tmp_path}/none is missing; name the folder of a store$"
    with pytest.raises(DataError, match=message):
        read_manifest(tmp_path / "none")


# ----- wrong_sizes -----


@pytest.mark.parametrize("kind", ["store", "old_store"])
def test_files_of_wrong_sizes(kind, request):
    folder = request.getfixturevalue(kind)
    found = read_manifest(folder)
    assert wrong_sizes(folder, found) == {} and verify_store(folder) == []
    with (folder / "tokens-00001.bin").open("ab") as file:
        file.write(b"\0")
    (folder / "documents-00000.bin").unlink()
    problems = [
        "documents-00000.bin: No such file or directory",
        "tokens-00001.bin has 17 bytes, not 16",
    ]
    assert list(wrong_sizes(folder, found).values()) == verify_store(folder) == problems


@pytest.mark.timeout(20)
def test_pipes_are_named_and_not_waited_for(store):
    found = read_manifest(store)
    for name in ("tokens-00001.bin", "manifest.json"):
        (store / name).unlink()
        os.mkfifo(store / name)
    assert list(wrong_sizes(store, found).values()) == ["tokens-00001.bin is not a regular file"]
    with pytest.raises(DataError, match="manifest.json: is not a regular file"):
        read_manifest(store)


# ----- verify_store -----


@given(data=st.data())
def test_any_flipped_bit_is_found_and_its_file_named(tmp_path_factory, data):
    folder = write_store(tmp_path_factory.mktemp("flip") / "store", DOCUMENTS)
    path = data.draw(st.sampled_from(sorted(p for p in folder.glob("*.bin") if p.stat().st_size)))
    bit = data.draw(st.integers(0, 8 * path.stat().st_size - 1))
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    assert verify_store(folder) == [f"{path.name}: its contents have changed"]


def test_swapped_shards_are_named(tmp_path):
    store = write_store(tmp_path / "even", DOCUMENTS, shard_tokens=9)
    names = ["tokens-00000.bin", "tokens-00001.bin"]
    contents = [(store / name).read_bytes() for name in names]
    for name, content in zip(names, reversed(contents), strict=True):
        (store / name).write_bytes(content)
    assert verify_store(store) == [f"{name}: its contents have changed" for name in names]
