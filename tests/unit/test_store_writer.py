"""Stores are made the same, byte by byte, whatever the batches, the threads and the
interruptions."""

import json
import os
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.base.jsonfile import write_hashed_json
from torchtitan_lite.data import sources, store_writer
from torchtitan_lite.data.sources import open_source
from torchtitan_lite.data.store_writer import encode_rows, make_store
from torchtitan_lite.data.token_store import MANIFEST_FILE, TokenStore, find_damage, read_manifest
from torchtitan_lite.data.tokenizer import build_tokenizer

TEXTS = [f"document {i}: " + "word " * (i * 7 % 40) for i in range(60)]
TOKENIZER = build_tokenizer("")
DOCUMENTS = [[1, *TOKENIZER.encode(text), 2] for text in TEXTS]
FINGERPRINT = "1b7937ee538716a7d98d49ab154930dfbf6aee2df632085cc34b7ea3f5f57044"
LEFT = [".store.lock", "corpus", "store"]
"""What a finished store leaves in its parent folder."""


def rows_of(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def write_corpus(folder: Path) -> Path:
    """Write TEXTS in 20 files."""
    for start in range(0, len(TEXTS), 3):
        (folder / f"{start:02}.jsonl").write_text(rows_of(TEXTS[start : start + 3]))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    return write_corpus(folder)


@pytest.fixture
def bad(tmp_path):
    """Rows of which the second, the fourth and the fifth are bad."""
    path = tmp_path / "bad.jsonl"
    texts = [f'{{"text": "{text}"}}' for text in ("one", "two", "three")]
    path.write_text("\n".join([texts[0], "{", texts[1], '{"text": ""}', '{"a": "x"}', texts[2]]))
    return path


class Stopped(Exception):
    """An interruption."""


class EncodeHere:
    """Stands in for encode_batches, without threads. Raises Stopped after `stop` batches."""

    def __init__(self) -> None:
        self.stop, self.seen = None, 0

    def __call__(self, batches, tokenizer, *, dtype, threads):
        for batch in batches:
            if self.seen == self.stop:
                raise Stopped
            self.seen += 1
            yield encode_rows(batch, tokenizer, dtype)


def make_small_steps(monkeypatch, batch_bytes=100, chunk_bytes=600) -> EncodeHere:
    """Cut a small corpus into many chunks and batches."""
    monkeypatch.setattr(store_writer, "BATCH_BYTES", batch_bytes)
    monkeypatch.setattr(sources, "CHUNK_BYTES", chunk_bytes)
    encode = EncodeHere()
    monkeypatch.setattr(store_writer, "encode_batches", encode)
    return encode


@pytest.fixture
def small_steps(monkeypatch):
    return make_small_steps(monkeypatch)


def made(folder: Path, corpus: Path, **options) -> dict[str, bytes]:
    """Make the store of a corpus, and return all its files."""
    make_store(folder, open_source(str(corpus)), TOKENIZER, **options)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stopped(encode: EncodeHere, batches: int, *arguments, **options) -> None:
    """Make a store, but stop after some batches."""
    encode.stop, encode.seen = batches, 0
    with pytest.raises(Stopped):
        made(*arguments, **options)
    encode.stop = None


def tokens_of(store: TokenStore) -> list[int]:
    return store.read(0, store.tokens).tolist()


# ----- make_store -----


@pytest.mark.parametrize(("chunk_bytes", "shards"), [(2**26, 1), (2000, 4), (600, 10)])
def test_a_store_holds_every_document(tmp_path, corpus, monkeypatch, chunk_bytes, shards):
    make_small_steps(monkeypatch, chunk_bytes=chunk_bytes)
    made(tmp_path / "store", corpus)
    store = TokenStore(tmp_path / "store")
    assert len(store.manifest.shards) == shards
    expected = [token for document in DOCUMENTS for token in document]
    assert tokens_of(store) == expected
    assert (store.manifest.documents, store.max_token_id) == (60, max(expected))
    assert store.manifest.recipe.source == str(corpus)
    assert find_damage(store.folder, store.manifest, read=True) == []
    assert names(tmp_path) == LEFT


@pytest.mark.parametrize("max_tokens", [1, 459, 500, 10**6])  # 459: at the end of a document
def test_a_limited_store_ends_with_the_document_that_reaches_its_tokens(
    tmp_path, corpus, small_steps, monkeypatch, max_tokens
):
    expected, left = [], list(DOCUMENTS)
    while len(expected) < max_tokens and left:
        expected += left.pop(0)
    whole = made(tmp_path / "store", corpus, max_tokens=max_tokens)
    store = TokenStore(tmp_path / "store")
    assert tokens_of(store) == expected
    assert store.manifest.documents == 60 - len(left)
    assert find_damage(store.folder, store.manifest, read=True) == []

    # Neither other batches nor an interruption change it.
    monkeypatch.setattr(store_writer, "BATCH_BYTES", 1)
    batches = 9 if max_tokens > 1 else 0
    stopped(small_steps, batches, tmp_path / "later", corpus, max_tokens=max_tokens)
    assert made(tmp_path / "later", corpus, max_tokens=max_tokens) == whole

    # Another limit is refused.
    for options in ({}, {"max_tokens": max_tokens + 1}):
        with pytest.raises(DataError, match=r"store was made of other text, .*--max-tokens; remov"):
            made(tmp_path / "store", corpus, **options)


@pytest.mark.parametrize(("threads", "batch_bytes"), [(1, 300), (3, 1)])
def test_neither_threads_nor_batches_change_it(tmp_path, corpus, monkeypatch, threads, batch_bytes):
    with monkeypatch.context() as patch:
        make_small_steps(patch)
        whole = made(tmp_path / "whole", corpus)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 600)
    monkeypatch.setattr(store_writer, "BATCH_BYTES", batch_bytes)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(threads)))
    assert made(tmp_path / "parts", corpus) == whole


def test_the_fingerprint_of_a_text_never_changes(tmp_path):
    """Runs resume by it. This one was made by the first version that had stores."""
    path = tmp_path / "a.txt"
    path.write_text("import os\n")
    made(tmp_path / "store", path)
    assert read_manifest(tmp_path / "store").fingerprint == FINGERPRINT


def test_large_vocabularies_take_four_bytes(tmp_path, corpus):
    other = build_tokenizer("")
    for vocab_size, dtype in ((2**16, "<u2"), (2**16 + 1, "<u4")):
        other.vocab_size = vocab_size
        folder = tmp_path / str(vocab_size)
        make_store(folder, open_source(str(corpus)), other)
        store = TokenStore(folder)
        assert store.dtype == np.dtype(dtype)
        assert store.read(0, 5).tolist() == DOCUMENTS[0][:5]


def test_a_store_that_is_there(tmp_path, corpus, notices):
    (tmp_path / "store.lock").write_text("mine")
    files = made(tmp_path / "store", corpus)
    assert made(tmp_path / "store", corpus) == files
    assert sum("tokenized" in message for message in notices.messages) == 1
    assert (tmp_path / "store.lock").read_text() == "mine"

    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="folder exists and is no token store; name another"):
        made(tmp_path / "folder", corpus)
    assert names(tmp_path / "folder") == []
    with pytest.raises(DataError, match=r"^\. is no name for a token store; name a new folder$"):
        made(Path(), corpus)


def test_a_store_of_format_2_is_not_made_again(tmp_path, corpus, notices):
    made(tmp_path / "store", corpus)
    manifest = read_manifest(tmp_path / "store")
    recipe = replace(manifest.recipe, format=2)
    fields = asdict(replace(manifest, recipe=recipe))
    write_hashed_json(tmp_path / "store" / MANIFEST_FILE, fields)
    files = {path.name: path.read_bytes() for path in (tmp_path / "store").iterdir()}
    assert made(tmp_path / "store", corpus) == files
    assert sum("tokenized" in message for message in notices.messages) == 1


# ----- UnfinishedStore -----


@settings(max_examples=8)
@given(stops=st.lists(st.integers(0, 40), min_size=1, max_size=3))
def test_an_interrupted_run_goes_on_where_it_was(tmp_path_factory, stops):
    folder = tmp_path_factory.mktemp("resume")
    (folder / "corpus").mkdir()
    corpus = write_corpus(folder / "corpus")
    with pytest.MonkeyPatch.context() as patch:
        encode = make_small_steps(patch)
        whole = made(folder / "whole", corpus)
        for encode.stop in stops:
            encode.seen = 0
            try:
                made(folder / "parts", corpus)
            except Stopped:
                assert not (folder / "parts").exists()
        encode.stop = None
        assert made(folder / "parts", corpus) == whole


def test_finished_shards_are_not_tokenized_again_however_the_text_is_named(
    tmp_path, corpus, small_steps, notices, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    whole = made(tmp_path / "whole", corpus)
    batches = small_steps.seen
    stopped(small_steps, 30, tmp_path / "store", Path("corpus"))
    partial = tmp_path / "store.partial"
    assert len(read_manifest(partial).shards) >= 2
    with pytest.raises(DataError, match="store.partial is unfinished; .* data make again$"):
        TokenStore(partial)
    small_steps.seen = 0
    assert made(tmp_path / "store", corpus) == whole
    assert batches - 30 <= small_steps.seen < batches
    made(tmp_path / "store", Path("corpus"))
    assert any("going on after" in message for message in notices.messages)
    assert sum("tokenized" in message for message in notices.messages) == 2


def test_unfinished_shards_and_drafts_of_killed_runs_do_not_stay(tmp_path, corpus, small_steps):
    whole = made(tmp_path / "whole", corpus)
    stopped(small_steps, 15, tmp_path / "store", corpus)
    partial = tmp_path / "store.partial"
    next_shard = len(read_manifest(partial).shards)
    (partial / f"tokens-{next_shard:05d}.bin").write_bytes(b"half a shard" * 1000)
    (partial / ".manifest.json.host.1").write_text("{")
    assert made(tmp_path / "store", corpus) == whole


def test_a_run_that_was_killed_before_its_last_rename(tmp_path, corpus, small_steps):
    whole = made(tmp_path / "whole", corpus)
    shutil.copytree(tmp_path / "whole", tmp_path / "store.partial")
    small_steps.stop = 0
    assert made(tmp_path / "store", corpus) == whole


def test_finished_shards_that_were_damaged(tmp_path, corpus, small_steps):
    stopped(small_steps, 15, tmp_path / "store", corpus)
    partial = tmp_path / "store.partial"
    (partial / "tokens-00000.bin").write_bytes(b"")
    with pytest.raises(DataError, match=f"^{partial}: tokens-00000.bin has 0 bytes, .*; remove"):
        made(tmp_path / "store", corpus)
    record = partial / "manifest.json"
    record.write_text(record.read_text().replace('"tokens": ', '"tokens": 1'))
    with pytest.raises(DataError, match=r"manifest.json: its contents have changed"):
        made(tmp_path / "store", corpus)


def test_a_folder_of_others_is_not_taken_for_an_unfinished_store(tmp_path, corpus):
    partial = tmp_path / "store.partial"
    partial.mkdir()
    (partial / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=f"^{partial} is in the way, .*; remove it$"):
        made(tmp_path / "store", corpus)
    assert names(partial) == ["notes.txt"]
    (partial / "notes.txt").unlink()
    made(tmp_path / "store", corpus)


def test_text_that_changes_while_it_is_read(tmp_path, corpus, small_steps, monkeypatch):
    def change(*arguments, **options):
        (corpus / "0.jsonl").write_text(rows_of(["before what is read"]))
        return small_steps(*arguments, **options)

    monkeypatch.setattr(store_writer, "encode_batches", change)
    with pytest.raises(DataError, match=f"^{corpus} changed while it was read; run again$"):
        made(tmp_path / "store", corpus)
    assert names(tmp_path) == LEFT[:2]


@pytest.mark.parametrize("name", ["a.txt", "a.json"])
def test_a_store_may_be_made_among_its_own_text(tmp_path, small_steps, name):
    (tmp_path / name).write_text('{"text": "a"}')
    for _ in range(2):  # the second time it is there
        made(tmp_path / "stores" / "mine", tmp_path)
    (chunk,) = open_source(str(tmp_path)).chunks()
    assert len(list(chunk())) == 1


def test_other_text_is_not_mixed_in(tmp_path, corpus, small_steps):
    stopped(small_steps, 20, tmp_path / "store", corpus)
    (corpus / "c.jsonl").write_text(rows_of(["more"]))
    with pytest.raises(DataError, match="store.partial was made of other text, .*; remove it, or"):
        made(tmp_path / "store", corpus)


# ----- make_store, bad rows -----


def skipped_lines(notices) -> list[str]:
    warnings = [record for record in notices.records if record.levelname == "WARNING"]
    return re.findall(r"bad\.jsonl, line (\d)", "".join(each.getMessage() for each in warnings))


def test_bad_rows_stop_it(tmp_path, bad):
    with pytest.raises(DataError, match=r"bad.jsonl, line 2: .*; fix the row, .*--skip-bad all$"):
        made(tmp_path / "store", bad)
    with pytest.raises(DataError, match=r"line 5: .*--skip-bad all$"):
        made(tmp_path / "store", bad, skip_bad=2)
    assert not (tmp_path / "store").exists()


def test_bad_rows_are_skipped_and_counted(tmp_path, bad, notices):
    made(tmp_path / "store", bad, skip_bad=3)
    store = TokenStore(tmp_path / "store")
    texts = [[1, *TOKENIZER.encode(text), 2] for text in ("one", "two", "three")]
    assert tokens_of(store) == [token for text in texts for token in text]
    assert store.manifest.skipped_rows == 3
    assert skipped_lines(notices) == ["2", "4", "5"]


@settings(max_examples=5)
@given(stop=st.integers(0, 4))
def test_skipped_rows_are_counted_once_over_interruptions(tmp_path_factory, stop):
    folder = tmp_path_factory.mktemp("skip")
    (folder / "corpus").mkdir()
    for number in range(5):
        (folder / f"corpus/{number}.jsonl").write_text('{\n{"text": "good"}\n')
    with pytest.MonkeyPatch.context() as patch:
        encode = make_small_steps(patch, batch_bytes=1, chunk_bytes=1)
        stopped(encode, stop, folder / "store", folder / "corpus", skip_bad=5)
        made(folder / "store", folder / "corpus", skip_bad=5)
    manifest = read_manifest(folder / "store")
    assert (manifest.skipped_rows, manifest.documents) == (5, 5)


@pytest.mark.parametrize("linked", [False, True])
def test_no_document_at_all(tmp_path, linked):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "bad.jsonl").write_text("{\n{\n")
    if linked:
        (tmp_path / "store.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="bad.jsonl holds 0 documents; name text that has some"):
        made(tmp_path / "store", tmp_path / "bad.jsonl", skip_bad=2)
    assert names(tmp_path) == [".store.lock", "bad.jsonl", "elsewhere"]
