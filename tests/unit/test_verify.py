"""Damage to a token store is found and named, whatever it is."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_stores import OLD_RECIPE, RECIPE, write_store

from torchtitan_lite.data.store_report import verify_store
from torchtitan_lite.errors import DataError

DOCUMENTS = [[10, 11, 12], [20], list(range(30, 60)), [], [5]]


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
    assert any(
        problem.startswith(f"{path.name}: its contents have changed (sha256 ")
        for problem in verify_store(folder)
    )


def test_swapped_shards_are_named(store):
    first, second = store / "tokens-00001.bin", store / "tokens-00002.bin"
    first.rename(store / "aside")
    second.rename(first)
    (store / "aside").rename(second)
    problems = [problem.partition(" (sha256")[0] for problem in verify_store(store)]
    assert problems == [
        "tokens-00001.bin: it has the contents of tokens-00002.bin",
        "tokens-00002.bin: it has the contents of tokens-00001.bin",
    ]


def test_sizes(store):
    os.truncate(store / "tokens-00001.bin", 10)
    (store / "documents-00000.bin").unlink()
    assert verify_store(store) == [
        "documents-00000.bin: No such file or directory",
        "tokens-00001.bin has 10 bytes, not 20",
    ]


def test_a_manifest_that_changed_or_is_missing(store):
    path = store / "manifest.json"
    path.write_text(path.read_text().replace('"fingerprint": "', '"fingerprint": "0'))
    message = f"^token store {store} is damaged: manifest.json: its contents have changed$"
    with pytest.raises(DataError, match=message):
        verify_store(store)
    path.unlink()
    with pytest.raises(DataError, match="manifest.json: .*No such file"):
        verify_store(store)


def test_files_of_no_store(store):
    (store / "tokens-00007.bin").write_bytes(b"")
    (store / "notes.txt").write_text("")
    assert verify_store(store) == [
        "notes.txt is no file of the store",
        "tokens-00007.bin is no file of the store",
    ]
