"""Token stores: any part of the stream, the cache made once, and the store's own tokenizer."""

import errno
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_stores import RECIPE, stream, write_store

from torchtitan_lite.base.errors import DataError, StorageError
from torchtitan_lite.base.jsonfile import write_hashed_json
from torchtitan_lite.catalog.datasets import NamedDataset
from torchtitan_lite.data import store_writer, token_store
from torchtitan_lite.data.corpus import open_data
from torchtitan_lite.data.store_writer import open_cached
from torchtitan_lite.data.token_store import TokenStore
from torchtitan_lite.data.tokenizer import build_tokenizer

TEXTS = ["first document\n", "the second", "third: é 日本"]
DOCUMENTS = [[10, 11, 12], [20], list(range(30, 60)), [], [5]]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return TokenStore(write_store(tmp_path_factory.mktemp("stores") / "numbers", DOCUMENTS))


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path):
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "xdg")
    return tmp_path / "xdg" / "torchtitan_lite" / "tokens"


def expected_ids() -> list[int]:
    tokenizer = build_tokenizer("")
    return [i for text in TEXTS for i in [1, *tokenizer.encode(text), 2]]


def contents(opened: TokenStore) -> list[int]:
    return opened.read(0, opened.tokens).tolist()


def visible(folder: Path) -> list[str]:
    """Names in a folder, without those of lock files."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


# ----- TokenStore -----


def test_what_a_store_is(store):
    assert (store.tokens, store.manifest.documents, store.max_token_id) == (45, 5, 59)
    assert store.dtype == np.dtype("<u2") and contents(store) == stream(DOCUMENTS)
    for start, count in ((44, 2), (-1, 1)):
        with pytest.raises(AssertionError, match=f"no {count} tokens at {start} of 45"):
            store.read(start, count)


@given(length=st.integers(0, 45), data=st.data())
@settings(max_examples=200)
def test_any_part_of_the_stream(store, length, data):
    starts = data.draw(st.lists(st.integers(0, 45 - length), max_size=5))
    windows = store.windows(np.array(starts, np.int64), length)
    expected = [stream(DOCUMENTS)[start : start + length] for start in starts]
    assert (windows.dtype, windows.shape) == (store.dtype, (len(starts), length))
    assert windows.tolist() == expected
    assert [store.read(start, length).tolist() for start in starts] == expected


def test_shards_of_any_size_and_empty_ones(tmp_path):
    sizes = [0, 10, 10, 0, 10, 10, 5, 0]  # a chunk of a source may hold no document
    store = TokenStore(write_store(tmp_path / "uneven", DOCUMENTS, sizes=sizes))
    assert contents(store) == stream(DOCUMENTS)
    assert store.read(19, 3).tolist() == stream(DOCUMENTS)[19:22]
    assert store.shard_starts == [0, 0, 10, 20, 20, 30, 40, 45, 45]


def test_the_fingerprint_follows_ids_and_nothing_else(tmp_path):
    numbers = itertools.count()

    def fingerprint(documents=DOCUMENTS, recipe=RECIPE, **options):
        folder = tmp_path / str(next(numbers))
        return TokenStore(write_store(folder, documents, recipe, **options)).fingerprint

    others = [fingerprint(each) for each in ([*DOCUMENTS[:-1], [7]], DOCUMENTS[:-1])]
    for change in ({"tokenizer_fingerprint": "u"}, {"dtype": "<u4"}):
        others.append(fingerprint(recipe=replace(RECIPE, **change)))
    assert len({fingerprint(), *others}) == 5
    same = [fingerprint(shard_tokens=count) for count in (1, 1000)]
    same.append(fingerprint(recipe=replace(RECIPE, format=2, source="x", source_fingerprint="y")))
    assert set(same) == {fingerprint()}


@pytest.mark.parametrize("chunk_tokens", [3, 1000])
def test_the_fingerprint_is_that_of_format_2(tmp_path, monkeypatch, chunk_tokens):
    # Which had it from the hashes of its shards, all of one size.
    monkeypatch.setattr(store_writer, "HASHED_TOKENS", 10)
    monkeypatch.setattr(store_writer, "CHUNK_TOKENS", chunk_tokens)
    old = TokenStore(write_store(tmp_path / "old", DOCUMENTS, replace(RECIPE, format=2)))
    digest = hashlib.sha256(b"t <u2")
    for shard in old.manifest.shards:
        digest.update(f" {shard.tokens} {shard.tokens_sha256}".encode())
    new = TokenStore(write_store(tmp_path / "new", DOCUMENTS, shard_tokens=7))
    assert new.fingerprint == old.fingerprint == digest.hexdigest()


@pytest.fixture
def own(tmp_path):
    """A store to damage, which has read nothing yet."""
    return TokenStore(write_store(tmp_path / "own", DOCUMENTS))


def check_damaged(own, reason, *, place=20):
    """Assert that a read fails with a reason, the command that lists damage, and the fix."""
    fix = "torchtitan-lite data verify lists .*; copy it again, or make it"
    with pytest.raises(DataError, match=f"^token store {own.folder}: {reason}; {fix}"):
        own.read(place, 5)


def test_an_id_that_changed_is_named_with_its_place(own):
    ids = np.fromfile(own.folder / "tokens-00002.bin", own.dtype)
    ids[3] = 5000
    ids.tofile(own.folder / "tokens-00002.bin")
    check_damaged(own, r"tokens-00002\.bin: id 5000 at place 3 is above the highest one, 59")


@pytest.mark.parametrize("read_before", [0, 10])
def test_a_shard_that_is_cut_off_while_in_use(own, read_before):
    own.read(20, read_before)
    os.truncate(own.folder / "tokens-00002.bin", 4)
    check_damaged(own, r"tokens-00002\.bin ends at place 2; it was cut off")


def test_a_shard_that_is_gone_is_named(own):
    (own.folder / "tokens-00001.bin").unlink()
    check_damaged(own, r"tokens-00001\.bin: No such file or directory", place=10)


@pytest.mark.parametrize(("code", "fix"), [
    (errno.EIO, "check the path, its disk"),
    (errno.EACCES, "fix its permissions"),
])  # fmt: skip
def test_a_whole_store_that_cannot_be_read_is_not_called_damaged(corpus, monkeypatch, code, fix):
    """At its manifest, at the sizes of its files and at a read. Nothing of it is removed."""
    own = opened(corpus)
    message = rf"(file|tokens-00000).* {os.strerror(code)}; .*{fix}"
    error = Mock(side_effect=OSError(code, os.strerror(code), "file"))
    for module, name, read in (
        (token_store, "read_json_object", lambda: opened(own.folder)),
        (token_store, "regular_size", lambda: opened(own.folder)),
        (np, "fromfile", lambda: own.read(0, 5)),
    ):
        with monkeypatch.context() as patch, pytest.raises(StorageError, match=message) as raised:
            patch.setattr(module, name, error)
            read()
        assert str(own.folder) in str(raised.value)
    assert contents(own) == contents(opened(corpus)) == expected_ids()


# ----- open_cached -----


def cached(corpus, tokenizer=None):
    dataset = NamedDataset(str(corpus))
    return open_cached(dataset.path, dataset, tokenizer or build_tokenizer(""))


def test_text_is_tokenized_once(corpus, cache, notices, tmp_path):
    first = cached(corpus)
    assert contents(first) == expected_ids()
    assert cached(corpus).fingerprint == first.fingerprint
    message = notices.messages[-1]
    counts = f"3 documents, {len(expected_ids())} tokens, 0 rows skipped, "
    assert message.startswith(f"tokenized {corpus}: {counts}")
    assert visible(cache) == [first.folder.name]

    # Other text and another tokenizer have other stores.
    corpus.write_text('{"text": "other"}')
    changed = cached(corpus)
    assert changed.fingerprint != first.fingerprint
    other = build_tokenizer("")
    other.fingerprint = "other"
    cached(corpus, other)
    assert len(visible(cache)) == 3

    # The cache is in $XDG_CACHE_HOME, or in ~/.cache.
    del os.environ["XDG_CACHE_HOME"]
    os.environ["HOME"] = str(tmp_path / "home")
    assert changed.folder.parent == cache
    again = cached(corpus)
    assert again.folder.parent == tmp_path / "home/.cache/torchtitan_lite/tokens"


def test_a_damaged_cache_is_named(corpus):
    folder = cached(corpus).folder
    os.truncate(folder / "tokens-00000.bin", 2)
    with pytest.raises(DataError, match=f"^token store {folder}: .* copy it again"):
        cached(corpus)


def test_a_cache_of_another_format_is_not_removed(corpus):
    folder = cached(corpus).folder
    manifest = token_store.read_manifest(folder)
    recipe = replace(manifest.recipe, format=4)
    fields = asdict(replace(manifest, recipe=recipe))
    write_hashed_json(folder / token_store.MANIFEST_FILE, fields)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(DataError, match=r"recipe\.format: Input should be 2 or 3; .* data make"):
        cached(corpus)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_cache_that_cannot_be_written(corpus, tmp_path):
    (tmp_path / "xdg").write_text("")
    message = r"^\[training\] dataset_path = .*: .*/xdg/.*: Not a directory; "
    with pytest.raises(StorageError, match=message):
        opened(corpus)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_under_the_cache(corpus, monkeypatch, code):
    error = OSError(code, os.strerror(code))
    message = rf'^\[training\] dataset_path = ".*": .*XDG_CACHE_HOME.*: {error.strerror}; make room'
    with monkeypatch.context() as patch, pytest.raises(StorageError, match=message):
        patch.setattr(os, "fsync", Mock(side_effect=error))
        opened(corpus)
    assert contents(opened(corpus)) == expected_ids()


# ----- make_store: its lock -----
def test_one_process_makes_a_store_and_the_others_wait(corpus, cache):
    fork = multiprocessing.get_context("fork")
    locked, started = fork.Event(), fork.Semaphore(0)

    def make():
        assert locked.wait(60)
        started.release()
        cached(corpus)

    folder = cached(corpus).folder
    folder.rename(cache / "elsewhere")
    processes = [fork.Process(target=make, daemon=True) for _ in range(2)]
    for process in processes:
        process.start()  # before the lock is taken, or they would have it too
    with (cache / f".{folder.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        locked.set()
        assert all(started.acquire(timeout=60) for _ in processes)
        time.sleep(0.5)
        assert not folder.exists()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert contents(TokenStore(folder)) == expected_ids()
    assert visible(cache) == sorted(["elsewhere", folder.name])


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_no_store_is_made(corpus, monkeypatch, code):
    error = OSError(code, os.strerror(code))
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=error))
    with pytest.raises(StorageError, match=r"without locks \(flock\).* data make.* XDG_CACHE_HOME"):
        cached(corpus)


# ----- open_data -----


def opened(path, table="[training]", **options):
    path = None if path is None else str(path)
    return open_data(table, path, tokenizer=build_tokenizer(""), text_field="text", **options)


def test_a_store_is_read_where_it_is(corpus, cache, tmp_path):
    made = opened(corpus)
    assert contents(made) == expected_ids()
    moved = made.folder.rename(tmp_path / "moved")
    again = opened(moved)
    assert (again.folder, again.fingerprint) == (moved, made.fingerprint)
    assert visible(cache) == []


@pytest.mark.parametrize(("fingerprint", "ids"), [("t", 1000), (None, 2**32)])
def test_a_store_of_another_tokenizer_or_number_of_ids_is_refused(tmp_path, fingerprint, ids):
    found = {"tokenizer_fingerprint": fingerprint or build_tokenizer("").fingerprint}
    recipe = replace(RECIPE, **found, vocab_size=ids, dtype="<u4")
    folder = write_store(tmp_path / "store", DOCUMENTS, recipe)
    message = rf'^\[training\] dataset_path = ".*": .*{folder} .* of {ids} ids, .* of 2256; name'
    with pytest.raises(DataError, match=message):
        opened(folder)


def test_a_store_in_which_one_id_is_bos_and_eos_twice_is_read(corpus):
    """Earlier versions made it; in the cache it is made again."""
    tokenizer = build_tokenizer("")
    tokenizer.eos_id = tokenizer.bos_id
    old = open_data("[training]", str(corpus), tokenizer=tokenizer, text_field="text")
    tokenizer.one_separator = True
    again = open_data("[training]", str(old.folder), tokenizer=tokenizer, text_field="text")
    assert contents(again) == contents(old)

    new = open_data("[training]", str(corpus), tokenizer=tokenizer, text_field="text")
    assert new.manifest.documents == old.manifest.documents == contents(new).count(1) == 3
    assert new.tokens == old.tokens - 3


@pytest.mark.parametrize("dataset", ["c4", "c4_validation"])
def test_a_dataset_that_is_not_here_is_refused(dataset):
    make = "torchtitan-lite data make hf:allenai/c4 STORE"
    message = rf'^\[validation\] dataset = "{dataset}": .* make a store, .*: {make} '
    with pytest.raises(DataError, match=message):
        opened(None, "[validation]", dataset=dataset)


def test_the_path_decides_and_the_name_is_only_a_label(tmp_path):
    # Files as torchtitan ships c4_test, also where a run finds them by its name.
    os.chdir(tmp_path)
    file = Path("tests/assets/c4_test/data.json")
    file.parent.mkdir(parents=True)
    file.write_text('{"text": "one", "url": ""}\n{"text": "two", "url": ""}\n')
    tokenizer = build_tokenizer("")
    expected = [1, *tokenizer.encode("one"), 2, 1, *tokenizer.encode("two"), 2]
    for path, dataset in ((None, "c4_test"), (file.parent, "c4"), (file, "c4_validation")):
        assert contents(opened(path, dataset=dataset)) == expected


def test_a_store_whose_manifest_is_no_file_is_not_taken_for_text(tmp_path):
    (tmp_path / "notes.txt").write_text("text " * 100)
    manifest = tmp_path / "manifest.json"
    os.mkfifo(manifest)
    for reason in ("manifest.json: is not a regular file", "No such file"):
        with pytest.raises(DataError, match=rf"token store {tmp_path}: .*{reason}"):
            opened(tmp_path)
        manifest.unlink()
        manifest.symlink_to("nowhere")


def test_data_that_training_does_not_read():
    way_out = "training reads files and token stores; .* make hf:some/set STORE "
    for path, reason in (("hf:some/set", way_out), ("/no/where", "/no/where: does not exist")):
        with pytest.raises(DataError, match=rf'^\[training\] dataset_path = "{path}": .*{reason}'):
            opened(path)
