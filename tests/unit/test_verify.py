"""Damage to a token store is found and named, whatever it is."""

import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_stores import OLD_RECIPE, RECIPE, write_store

from torchtitan_lite.data.store_report import verify_store
from torchtitan_lite.data.token_store import (
    MANIFEST_FILE,
    StoreManifest,
    read_manifest,
    write_manifest,
)

DOCUMENTS = [[10, 11, 12], [20], list(range(30, 60)), [], [5]]


@pytest.fixture(params=[RECIPE, OLD_RECIPE], ids=["format 3", "format 2"])
def store(tmp_path, request):
    return write_store(tmp_path / "store", DOCUMENTS, request.param)


def rewrite_manifest(store: Path, **fields: int) -> StoreManifest:
    manifest = replace(read_manifest(store), **fields)
    write_manifest(store / MANIFEST_FILE, manifest)
    return manifest


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


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


def test_an_id_beyond_the_vocabulary_is_named(store):
    flip(store / "tokens-00001.bin", 2 * 3 + 1)  # the high byte of the 4th id, which is 34
    assert (
        verify_store(store)[0] == "tokens-00001.bin: id 290 at place 3 is above the highest one, 59"
    )


def test_a_lost_beginning_of_a_document_is_named(store):
    flip(store / "tokens-00000.bin", 0)  # BOS 1 becomes 0
    assert verify_store(store)[0] == (
        "tokens-00000.bin: no BOS at place 0, where documents-00000.bin has a document begin"
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


def test_manifests(store):
    path = store / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"fingerprint": "', '"fingerprint": "0'))
    assert verify_store(store) == [
        f"token store {store} is damaged: manifest.json: its contents have changed"
    ]
    path.write_text(text)
    rewrite_manifest(store, max_token_id=58)
    assert verify_store(store) == [
        "tokens-00003.bin: id 59 at place 8 is above the highest one, 58"
    ]
    shutil.rmtree(store)
    assert "manifest.json: " in verify_store(store)[0]


def test_a_false_table_of_documents_is_named_though_its_hash_is_right(tmp_path):
    folder = write_store(tmp_path / "store", [[5], [6]], starts=[0, 2])
    assert verify_store(folder) == [
        "tokens-00000.bin: no BOS at place 2, where documents-00000.bin has a document begin"
    ]


def test_files_of_no_store(store):
    (store / "tokens-00007.bin").write_bytes(b"")
    (store / "notes.txt").write_text("")
    assert verify_store(store) == [
        "notes.txt is no file of the store",
        "tokens-00007.bin is no file of the store",
    ]


def test_chunks(store, monkeypatch):
    monkeypatch.setattr("torchtitan_lite.data.store_report.CHUNK_TOKENS", 3)
    assert verify_store(store) == []
    changed = rewrite_manifest(store, max_token_id=40)
    assert asdict(read_manifest(store)) == asdict(changed)
    assert (
        verify_store(store)[0] == "tokens-00002.bin: id 43 at place 2 is above the highest one, 40"
    )
