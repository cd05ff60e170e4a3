"""The manifest of a token store: which damage it finds, and which formats it reads."""

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_stores import RECIPE, write_store

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.base.jsonfile import write_hashed_json
from torchtitan_lite.data.token_store import find_damage, read_manifest

DOCUMENTS = [[10, 11, 12], [20], [30, 31, 32, 33, 34, 35], []]
OLD = replace(RECIPE, format=2)


@pytest.fixture
def store(tmp_path):
    return write_store(tmp_path / "store", DOCUMENTS)


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
    files = ["manifest.json", "tokens-00000.bin", "tokens-00001.bin"]
    assert sorted(path.name for path in store.iterdir()) == files


def test_both_formats_are_read_and_names_are_no_difference(store, tmp_path):
    new, old = read_manifest(store), read_manifest(write_store(tmp_path / "old", DOCUMENTS, OLD))
    assert (new.recipe.format, old.recipe.format) == (3, 2)
    assert new.recipe == old.recipe == replace(RECIPE, source="elsewhere", tokenizer="renamed")
    assert new.recipe != replace(RECIPE, source_fingerprint="x")
    assert new.fingerprint == old.fingerprint


def test_fields_and_files_of_earlier_versions_are_passed_over(store):
    shards = json.loads((store / "manifest.json").read_text())["shards"]
    shards = [{**shard, "documents_sha256": "x"} for shard in shards]
    before = read_manifest(store)
    change(store, tokens=18, documents=4, recipe=vars(RECIPE) | {"shard_tokens": 9}, shards=shards)
    (store / "documents-00000.bin").write_bytes(b"starts")
    assert read_manifest(store) == before and find_damage(store, before, read=True) == []


@pytest.mark.parametrize("found", [1, 4])
def test_other_formats_are_refused_with_the_command_that_makes_them_again(store, found):
    change(store, recipe=vars(RECIPE) | {"format": found})
    message = "recipe.format: Input should be 2 or 3; .*: torchtitan-lite data make$"
    with pytest.raises(DataError, match=message):
        read_manifest(store)


def recipe(**fields):
    return {"recipe": vars(RECIPE) | fields}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (recipe(dtype="O"), r"recipe\.dtype: Input should be '<u2' or '<u4'"),
        ({"shards": [{}]}, r"shards\.0\.tokens: Field required"),
        ({"shards": 5}, "shards: .*valid array"),
        ({"recipe": None}, "recipe: .*object"),
        (recipe(vocab_size=2**16 + 1), "its highest id is 35, of 65537 ids in type '<u2'"),
        (recipe(vocab_size=10**12, dtype="<u4"), "its highest id is 35, of 10{12} ids in"),
        ({"max_token_id": -1}, "max_token_id: .*greater than or equal to 0"),
        ({"skipped_rows": True}, "skipped_rows: .*valid integer"),
        ({"max_token_id": 1000}, "its highest id is 1000, of 1000 ids"),
        ({"skipped_rows": 10**40}, "skipped_rows: Input should be"),
        ({"skipped_rows": 10**400}, "holds a number of more than 100 digits"),
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


# ----- find_damage -----


def test_files_of_wrong_sizes(store):
    found = read_manifest(store)
    assert find_damage(store, found) == find_damage(store, found, read=True) == []
    with (store / "tokens-00001.bin").open("ab") as file:
        file.write(b"\0")
    (store / "tokens-00000.bin").unlink()
    problems = [
        "tokens-00000.bin: No such file or directory",
        "tokens-00001.bin has 17 bytes, not 16",
    ]
    assert find_damage(store, found) == find_damage(store, found, read=True) == problems


@pytest.mark.timeout(20)
def test_pipes_are_named_and_not_waited_for(store):
    found = read_manifest(store)
    for name in ("tokens-00001.bin", "manifest.json"):
        (store / name).unlink()
        os.mkfifo(store / name)
    assert find_damage(store, found) == ["tokens-00001.bin is not a regular file"]
    with pytest.raises(DataError, match="manifest.json: is not a regular file"):
        read_manifest(store)


@given(data=st.data())
def test_any_flipped_bit_is_found_and_its_file_named(tmp_path_factory, data):
    folder = write_store(tmp_path_factory.mktemp("flip") / "store", DOCUMENTS)
    path = data.draw(st.sampled_from(sorted(p for p in folder.glob("*.bin") if p.stat().st_size)))
    bit = data.draw(st.integers(0, 8 * path.stat().st_size - 1))
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    damage = find_damage(folder, read_manifest(folder), read=True)
    assert damage == [f"{path.name}: its contents have changed"]


def test_swapped_shards_are_named(tmp_path):
    store = write_store(tmp_path / "even", DOCUMENTS, shard_tokens=9)
    names = ["tokens-00000.bin", "tokens-00001.bin"]
    contents = [(store / name).read_bytes() for name in names]
    for name, content in zip(names, reversed(contents), strict=True):
        (store / name).write_bytes(content)
    damage = find_damage(store, read_manifest(store), read=True)
    assert damage == [f"{name}: its contents have changed" for name in names]
