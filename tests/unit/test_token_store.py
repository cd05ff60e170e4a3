"""Token stores: any part of the stream, the cache made once and whole, and the tokenizer that must
be the store's."""

import errno
import hashlib
import json
import logging
import multiprocessing
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_stores import OLD_RECIPE, RECIPE, stream, write_store

from torchtitan_lite.data import prepare, token_store
from torchtitan_lite.data.corpus import open_cached, open_data
from torchtitan_lite.data.sources import open_source
from torchtitan_lite.data.token_store import TokenStore
from torchtitan_lite.data.tokenizer import build_tokenizer
from torchtitan_lite.documents import write_document
from torchtitan_lite.errors import DataError, StorageError

TEXTS = ["first document\n", "the second", "third: é 日本"]
DOCUMENTS = [[10, 11, 12], [20], list(range(30, 60)), [], [5]]


@pytest.fixture(scope="module", params=[RECIPE, OLD_RECIPE], ids=["format 3", "format 2"])
def store(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("stores") / "numbers"
    return TokenStore(write_store(folder, DOCUMENTS, request.param))


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def source(corpus):
    return open_source(str(corpus))


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def messages(monkeypatch, caplog):
    monkeypatch.setattr(prepare.logger, "propagate", True)
    caplog.set_level(logging.INFO, prepare.logger.name)
    return caplog


def expected_ids() -> list[int]:
    tokenizer = build_tokenizer("")
    return [i for text in TEXTS for i in [1, *tokenizer.encode(text), 2]]


def contents(opened: TokenStore) -> list[int]:
    return opened.read(0, opened.tokens).tolist()


def visible(folder: Path) -> list[str]:
    """Names in a folder, without those of lock files."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_what_a_store_is(store):
    assert (store.tokens, store.documents, store.max_token_id) == (45, 5, 59)
    assert store.dtype == np.dtype("<u2")
    assert contents(store) == stream(DOCUMENTS)


@given(data=st.data())
@settings(max_examples=200)
def test_any_part_of_the_stream(store, data):
    start = data.draw(st.integers(0, 45))
    count = data.draw(st.integers(0, 45 - start))
    part = store.read(start, count)
    assert part.tolist() == stream(DOCUMENTS)[start : start + count]
    assert part.dtype == store.dtype


@given(length=st.integers(1, 30), data=st.data())
def test_windows_of_any_length(store, length, data):
    starts = data.draw(st.lists(st.integers(0, 45 - length), max_size=5))
    windows = store.windows(np.array(starts, np.int64), length)
    assert windows.dtype == store.dtype
    assert windows.shape == (len(starts), length)
    assert windows.tolist() == [stream(DOCUMENTS)[start : start + length] for start in starts]


def test_only_what_is_there(store):
    with pytest.raises(AssertionError, match="no 2 tokens at 44 of 45"):
        store.read(44, 2)
    with pytest.raises(AssertionError, match="no 1 tokens at -1 of 45"):
        store.read(-1, 1)


def test_shards_of_any_size_and_empty_ones(tmp_path):
    """A chunk of a source may hold no document."""
    folder = write_store(tmp_path / "uneven", DOCUMENTS)
    path = folder / "manifest.json"
    fields = json.loads(path.read_text())
    fields.pop("sha256")
    empty = {"tokens": 0, "documents": 0, "tokens_sha256": "", "documents_sha256": ""}
    fields["shards"] = [empty, *fields["shards"][:2], empty, *fields["shards"][2:], empty]
    write_document(path, fields)
    for kind in ("tokens", "documents"):
        for old, new in ((4, 6), (3, 5), (2, 4), (1, 2), (0, 1)):
            (folder / f"{kind}-{old:05d}.bin").rename(folder / f"{kind}-{new:05d}.bin")
        for number in (0, 3, 7):
            (folder / f"{kind}-{number:05d}.bin").touch()
    store = TokenStore(folder)
    assert contents(store) == stream(DOCUMENTS)
    assert store.read(19, 3).tolist() == stream(DOCUMENTS)[19:22]
    assert store.shard_starts == [0, 0, 10, 20, 20, 30, 40, 45, 45]


def test_the_fingerprint_follows_ids_and_nothing_else(tmp_path):
    def fingerprint(name, documents=DOCUMENTS, recipe=RECIPE, **options):
        return TokenStore(write_store(tmp_path / name, documents, recipe, **options)).fingerprint

    seen = [
        fingerprint("new"),
        fingerprint("other ids", [*DOCUMENTS[:-1], [7]]),
        fingerprint("fewer", DOCUMENTS[:-1]),
        fingerprint("other tokenizer", recipe=replace(RECIPE, tokenizer_fingerprint="u")),
        fingerprint("other type", recipe=replace(RECIPE, dtype="<u4")),
    ]
    assert len(set(seen)) == 5
    same = [
        fingerprint("old", recipe=OLD_RECIPE),
        fingerprint("one shard", shard_tokens=1000),
        fingerprint("small shards", shard_tokens=1),
        fingerprint("elsewhere", recipe=replace(RECIPE, source="x", source_fingerprint="y")),
    ]
    assert set(same) == {seen[0]}


@pytest.mark.parametrize("chunk_tokens", [3, 1000])
def test_the_fingerprint_is_that_of_format_2(tmp_path, monkeypatch, chunk_tokens):
    """Which had it from the hashes of its shards, all of one size."""
    monkeypatch.setattr(token_store, "HASHED_TOKENS", 10)
    monkeypatch.setattr(token_store, "CHUNK_TOKENS", chunk_tokens)
    old = TokenStore(write_store(tmp_path / "old", DOCUMENTS, OLD_RECIPE))
    digest = hashlib.sha256(b"t <u2")
    for shard in old.manifest.shards:
        digest.update(f" {shard.tokens} {shard.tokens_sha256}".encode())
    new = TokenStore(write_store(tmp_path / "new", DOCUMENTS, shard_tokens=7))
    assert new.fingerprint == old.fingerprint == digest.hexdigest()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_few_shards_are_open_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(token_store, "OPEN_SHARDS", 3)
    store = TokenStore(write_store(tmp_path / "many", [list(range(100, 500))], shard_tokens=4))
    before = open_files()
    assert contents(store) == [1, *range(100, 500), 2]
    assert open_files() - before <= 3


def test_counts_of_ids(store, monkeypatch):
    counts = store.token_counts()
    assert counts.tolist() == np.bincount(stream(DOCUMENTS), minlength=1000).tolist()
    monkeypatch.setattr(token_store, "CHUNK_TOKENS", 7)
    assert store.token_counts().tolist() == counts.tolist()
    monkeypatch.setattr(token_store, "COUNTED_CHUNKS", 2)  # of 7 chunks, every 4th
    ids = stream(DOCUMENTS)
    assert (
        store.token_counts().tolist() == np.bincount(ids[0:7] + ids[28:35], minlength=1000).tolist()
    )


VERIFY = r"; torchtitan-lite data verify {folder} lists .*; copy the store again, or remove it"


@pytest.fixture
def own(tmp_path):
    """A store to damage, which has read nothing yet."""
    return TokenStore(write_store(tmp_path / "own", DOCUMENTS))


READS = {
    "a window": lambda store: store.read(20, 5),
    "windows": lambda store: store.windows(np.array([0, 18]), 10),
    "counts": lambda store: store.token_counts(),
}


@pytest.mark.parametrize("read", READS)
def test_an_id_that_changed_is_named_with_its_place(own, read):
    ids = np.fromfile(own.folder / "tokens-00002.bin", own.dtype)
    ids[3] = 5000
    ids.tofile(own.folder / "tokens-00002.bin")
    reason = r"tokens-00002\.bin: id 5000 at place 3 is above the highest one, 59" + VERIFY.format(
        folder=own.folder
    )
    with pytest.raises(DataError, match=f"^token store {own.folder} is damaged: {reason}"):
        READS[read](own)


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("read", READS)
def test_a_shard_that_is_cut_off_while_in_use(own, read, opened):
    if opened:
        own.read(20, 10)
    os.truncate(own.folder / "tokens-00002.bin", 4)
    reason = r"tokens-00002\.bin ends at byte 4; it was cut off while in use" + VERIFY.format(
        folder=own.folder
    )
    with pytest.raises(DataError, match=f"^token store {own.folder} is damaged: {reason}"):
        READS[read](own)


def test_a_shard_that_is_gone_is_read_on_where_it_is_open_and_else_named(own):
    ids = own.read(20, 10).tolist()
    for shard in (1, 2):
        (own.folder / f"tokens-{shard:05d}.bin").unlink()
    assert own.read(20, 10).tolist() == ids
    with pytest.raises(
        DataError,
        match=r"is damaged: tokens-00001\.bin: No such file or directory; torchtitan-lite",
    ):
        own.read(10, 1)


def test_a_disk_that_cannot_be_read(own, monkeypatch):
    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(
        DataError, match=r"is damaged: tokens-00000\.bin: Input/output error; torchtitan-lite data"
    ):
        own.read(0, 1)


def test_text_is_tokenized_once(source, cache, messages):
    first = open_cached(source, build_tokenizer(""), cache_dir=cache)
    assert contents(first) == expected_ids()
    again = open_cached(source, build_tokenizer(""), cache_dir=cache)
    assert again.fingerprint == first.fingerprint
    [message] = [record.getMessage() for record in messages.records]
    assert message.startswith(
        f"tokenized {source.name}: 3 documents, {len(expected_ids())} tokens, 0 rows skipped, "
    )
    assert visible(cache) == [first.folder.name]


def test_other_text_and_other_tokenizer_have_other_stores(source, corpus, cache):
    first = open_cached(source, build_tokenizer(""), cache_dir=cache)
    corpus.write_text('{"text": "other"}')
    changed = open_cached(open_source(str(corpus)), build_tokenizer(""), cache_dir=cache)
    assert changed.fingerprint != first.fingerprint
    other = build_tokenizer("")
    other.fingerprint = "other"
    open_cached(open_source(str(corpus)), other, cache_dir=cache)
    assert len(visible(cache)) == 3


def test_default_cache(source, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert (
        open_cached(source, build_tokenizer("")).folder.parent
        == tmp_path / "xdg" / "torchtitan_lite" / "tokens"
    )
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = open_cached(source, build_tokenizer("")).folder
    assert folder.parent == tmp_path / "home" / ".cache" / "torchtitan_lite" / "tokens"


DAMAGE = {
    "cut off": lambda folder: os.truncate(folder / "tokens-00000.bin", 4),
    "file missing": lambda folder: (folder / "documents-00000.bin").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "manifest cut off": lambda folder: (folder / "manifest.json").write_text('{"recipe": 1'),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_cache_is_named_and_made_again(source, cache, messages, kind):
    folder = open_cached(source, build_tokenizer(""), cache_dir=cache).folder
    DAMAGE[kind](folder)
    with pytest.raises(DataError, match=f"^token store {folder} is damaged: "):
        TokenStore(folder)
    assert contents(open_cached(source, build_tokenizer(""), cache_dir=cache)) == expected_ids()
    assert any(
        record.getMessage().startswith(f"token store {folder} is damaged: ")
        for record in messages.records
    )


def test_a_damaged_cache_behind_a_link_is_made_again(source, cache, tmp_path):
    folder = open_cached(source, build_tokenizer(""), cache_dir=cache).folder
    moved = folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(moved)
    (moved / "manifest.json").unlink()
    assert contents(open_cached(source, build_tokenizer(""), cache_dir=cache)) == expected_ids()
    assert not folder.is_symlink()
    assert len(list(moved.iterdir())) == 2


def test_a_cache_of_another_format_is_not_removed(source, cache):
    folder = open_cached(source, build_tokenizer(""), cache_dir=cache).folder
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 3', '"format": 4'))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(DataError, match="its format is 4, this version reads 2 and 3"):
        open_cached(source, build_tokenizer(""), cache_dir=cache)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_cache_that_cannot_be_written(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError,
        match=r"^token cache .*file/cache cannot be written: Not a directory; set XDG_CACHE",
    ):
        open_cached(source, build_tokenizer(""), cache_dir=tmp_path / "file" / "cache")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_under_the_cache(corpus, cache, tmp_path, monkeypatch, code):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))

    def fail(descriptor):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        message = (
            rf'^\[training\] dataset_path = ".*": token cache .*: {os.strerror(code)}; set XDG_'
        )
        with pytest.raises(StorageError, match=message):
            open_data(TABLE, str(corpus), tokenizer=build_tokenizer(""), **OPTIONS)
    assert (
        contents(open_data(TABLE, str(corpus), tokenizer=build_tokenizer(""), **OPTIONS))
        == expected_ids()
    )


def make_in_process(path, cache, started):
    started.set()
    open_cached(open_source(str(path)), build_tokenizer(""), cache_dir=cache)


def test_one_process_makes_it_and_the_others_wait(source, corpus, cache):
    cache.mkdir()
    context = multiprocessing.get_context("spawn")
    started = [context.Event() for _ in range(2)]
    processes = [
        context.Process(target=make_in_process, args=(corpus, cache, event)) for event in started
    ]
    folder = open_cached(source, build_tokenizer(""), cache_dir=cache / "elsewhere").folder
    with prepare.exclusive(cache / f".{folder.name}.lock"):
        for process, event in zip(processes, started, strict=True):
            process.start()
            assert event.wait(60)
        time.sleep(0.5)
        assert not (cache / folder.name).exists()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert contents(TokenStore(cache / folder.name)) == expected_ids()
    assert visible(cache) == sorted(["elsewhere", folder.name])


def test_a_lock_of_a_killed_process_keeps_no_one_out(tmp_path):
    def hold(path, held):
        with prepare.exclusive(path):
            held.set()
            time.sleep(60)

    context = multiprocessing.get_context("fork")
    held = context.Event()
    process = context.Process(target=hold, args=(tmp_path / "x.lock", held))
    process.start()
    assert held.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with prepare.exclusive(tmp_path / "x.lock"):
        pass


TABLE = "[training]"
OPTIONS = {"text_field": "text"}


def test_a_store_is_read_where_it_is(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    tokenizer = build_tokenizer("")
    made = open_data(TABLE, str(corpus), tokenizer=tokenizer, **OPTIONS)
    assert contents(made) == expected_ids()
    moved = made.folder.rename(tmp_path / "moved")
    opened = open_data(TABLE, str(moved), tokenizer=tokenizer, **OPTIONS)
    assert (opened.folder, opened.fingerprint) == (moved, made.fingerprint)
    assert visible(tmp_path / "xdg" / "torchtitan_lite" / "tokens") == []


def test_a_store_of_another_tokenizer_is_refused(tmp_path):
    folder = write_store(tmp_path / "store", DOCUMENTS)
    message = (
        rf'^\[training\] dataset_path = ".*": token store {folder} was made with tokenizer none '
        r"\(1000 ids, fingerprint t\), and \[model\] tokenizer_path names .* \(2256 ids, \w+\); "
        r"name"
    )
    with pytest.raises(DataError, match=message):
        open_data(TABLE, str(folder), tokenizer=build_tokenizer(""), **OPTIONS)


def test_a_store_that_claims_another_number_of_ids_than_its_tokenizer_is_refused(tmp_path):
    tokenizer = build_tokenizer("")
    recipe = replace(
        RECIPE, tokenizer_fingerprint=tokenizer.fingerprint, vocab_size=2**32, dtype="<u4"
    )
    folder = write_store(tmp_path / "store", DOCUMENTS, recipe)
    with pytest.raises(
        DataError, match=r"was made with tokenizer none \(4294967296 ids, .* \(2256 ids, "
    ):
        open_data(TABLE, str(folder), tokenizer=tokenizer, **OPTIONS)


@pytest.mark.parametrize(
    ("dataset", "make"),
    [
        ("c4", "make hf:allenai/c4 STORE --hf-name en --max-tokens N"),
        ("c4_test", "make hf:allenai/c4 STORE --hf-name en --max-tokens N"),
        (
            "c4_validation",
            "make hf:allenai/c4 STORE --hf-name en --hf-split validation --max-tokens N",
        ),
    ],
)
def test_a_dataset_that_is_not_here_comes_with_two_ways_to_it(dataset, make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        open_data("[validation]", None, dataset=dataset, tokenizer=build_tokenizer(""), **OPTIONS)
    message = str(caught.value)
    assert message.startswith(f'[validation] dataset = "{dataset}": ')
    assert "; use --validation.dataset_path PATH with files of its text, or " in message
    assert message.endswith(f"torchtitan-lite data {make} and then --validation.dataset_path STORE")


def test_the_path_decides_and_the_name_is_only_a_label(tmp_path, monkeypatch):
    """Files as torchtitan ships c4_test, also where a run finds them by its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    folder = Path("tests/assets/c4_test")
    folder.mkdir(parents=True)
    (folder / "data.json").write_text('{"text": "one", "url": ""}\n{"text": "two", "url": ""}\n')
    tokenizer = build_tokenizer("")
    expected = [1, *tokenizer.encode("one"), 2, 1, *tokenizer.encode("two"), 2]
    for path, dataset in (
        (None, "c4_test"),
        (str(folder), "c4"),
        (f"{folder}/data.json", "c4_validation"),
    ):
        store = open_data(TABLE, path, dataset=dataset, tokenizer=tokenizer, **OPTIONS)
        assert store.read(0, store.tokens).tolist() == expected


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_store_whose_manifest_is_no_file_is_not_taken_for_text(tmp_path, kind):
    manifest = tmp_path / "manifest.json"
    (tmp_path / "notes.txt").write_text("text " * 100)
    os.mkfifo(manifest) if kind == "pipe" else manifest.symlink_to("nowhere")
    reason = {"pipe": "manifest.json: is not a regular file", "link": "No such file"}[kind]
    message = rf"token store {tmp_path} is damaged: .*{reason}"
    with pytest.raises(DataError, match=message):
        open_data(TABLE, str(tmp_path), tokenizer=build_tokenizer(""), **OPTIONS)


def test_data_that_training_does_not_read(tmp_path):
    for path, message in {
        "hf:some/set": "training reads no Hugging Face dataset; .* make hf:some/set STORE --max",
        str(tmp_path / "nowhere"): f"{tmp_path}/nowhere: does not exist",
    }.items():
        with pytest.raises(
            DataError, match=re.escape(f'[training] dataset_path = "{path}": ') + f".*{message}"
        ):
            open_data(TABLE, path, tokenizer=build_tokenizer(""), **OPTIONS)
