"""Stores are made the same, byte by byte, whatever the batches, the processes and the
interruptions."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_lite.data import prepare
from torchtitan_lite.data.encoder import encode_rows
from torchtitan_lite.data.manifest import read_manifest
from torchtitan_lite.data.prepare import Pace, prepare_store
from torchtitan_lite.data.rows import START
from torchtitan_lite.data.sources import build_source
from torchtitan_lite.data.token_store import TokenStore
from torchtitan_lite.data.tokenizer import build_tokenizer
from torchtitan_lite.data.verify import verify_store
from torchtitan_lite.errors import DataError

TEXTS = [f"document {i}: " + "word " * (i * 7 % 40) for i in range(60)]
TOKENIZER = build_tokenizer("")


def rows_of(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_text(rows_of(TEXTS[:40]))
    (folder / "b.jsonl").write_text(rows_of(TEXTS[40:]))
    return folder


def encode_here(batches, *, workers, **options):
    """As encode_batches, without processes, which would take longer to start than all else here."""
    for batch in batches:
        yield batch, encode_rows(batch, **options)


def make_small_steps(monkeypatch, batch_bytes=100):
    monkeypatch.setattr(prepare, "BATCH_BYTES", batch_bytes)
    monkeypatch.setattr(prepare, "COMMIT_SECONDS", 0)
    monkeypatch.setattr(prepare, "encode_batches", encode_here)


@pytest.fixture
def small_steps(monkeypatch):
    make_small_steps(monkeypatch)


@pytest.fixture
def messages(monkeypatch, caplog):
    monkeypatch.setattr(prepare.logger, "propagate", True)
    caplog.set_level(logging.INFO, prepare.logger.name)
    return caplog


def made(folder: Path, corpus: Path, **options) -> dict[str, bytes]:
    """Every file of the store of a corpus."""
    options = {"workers": 1, "shard_tokens": 500, **options}
    prepare_store(folder, build_source(str(corpus)), TOKENIZER, **options)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Stopped(Exception):
    """An interruption."""


def stop_after(batches: int):
    def report(pace: Pace) -> None:
        nonlocal batches
        batches -= 1
        if batches < 0:
            raise Stopped

    return report


def test_a_store_holds_every_document(tmp_path, corpus):
    made(tmp_path / "store", corpus)
    store = TokenStore(tmp_path / "store")
    expected = [i for text in TEXTS for i in [1, *TOKENIZER.encode(text), 2]]
    assert store.read(0, store.tokens).tolist() == expected
    shards = store.manifest.shards
    assert [shard.tokens for shard in shards] == [500] * (len(expected) // 500) + [
        len(expected) % 500
    ]
    starts = [
        500 * i + place for i in range(len(shards)) for place in store.document_starts(i).tolist()
    ]
    assert starts == np.flatnonzero(np.array(expected) == 1).tolist()
    assert (store.documents, store.max_token_id, store.name) == (60, max(expected), str(corpus))
    assert verify_store(store.folder) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "store"]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("batch_bytes", [1, 300])
def test_neither_processes_nor_batches_change_it(
    tmp_path, corpus, monkeypatch, workers, batch_bytes
):
    whole = made(tmp_path / "whole", corpus)
    monkeypatch.setattr(prepare, "BATCH_BYTES", batch_bytes)
    assert made(tmp_path / "parts", corpus, workers=workers) == whole


def test_a_document_may_span_shards(tmp_path, corpus):
    store = tmp_path / "store"
    made(store, corpus, shard_tokens=7)
    assert verify_store(store) == []
    opened = TokenStore(store)
    assert 0 in [len(opened.document_starts(shard)) for shard in range(len(opened.manifest.shards))]


def test_large_vocabularies_take_four_bytes(tmp_path, corpus):
    other = build_tokenizer("")
    for vocab_size, dtype in ((2**16, "<u2"), (2**16 + 1, "<u4")):
        other.vocab_size = vocab_size
        folder = tmp_path / str(vocab_size)
        prepare_store(folder, build_source(str(corpus)), other, workers=1)
        store = TokenStore(folder)
        assert store.dtype == np.dtype(dtype)
        assert store.read(0, 5).tolist() == [1, *TOKENIZER.encode(TEXTS[0])][:5]


@settings(max_examples=8, deadline=None)
@given(stops=st.lists(st.integers(0, 30), min_size=1, max_size=3))
def test_an_interrupted_run_goes_on_where_it_was(tmp_path_factory, stops):
    folder = tmp_path_factory.mktemp("resume")
    (folder / "a.jsonl").write_text(rows_of(TEXTS))
    with pytest.MonkeyPatch.context() as patch:
        make_small_steps(patch)
        whole = made(folder / "whole", folder / "a.jsonl")
        for batches in stops:
            try:
                made(folder / "parts", folder / "a.jsonl", report=stop_after(batches))
            except Stopped:
                assert not (folder / "parts").exists()
        assert made(folder / "parts", folder / "a.jsonl") == whole


def test_what_was_committed_is_not_tokenized_again(tmp_path, corpus, small_steps, messages):
    with pytest.raises(Stopped):
        made(tmp_path / "store", corpus, report=stop_after(20))
    progress = json.loads((tmp_path / "store.partial" / "progress.json").read_text())
    source, starts = build_source(str(corpus)), []
    source = replace(
        source, read=lambda start, read=source.read: starts.append(start) or read(start)
    )
    prepare_store(tmp_path / "store", source, TOKENIZER, workers=1, shard_tokens=500)
    assert [list(start) for start in starts] == [progress["position"]]
    assert starts != [START]
    assert any("going on after" in record.getMessage() for record in messages.records)


def test_what_was_written_after_the_last_commit_is_cut_off(tmp_path, corpus, small_steps):
    whole = made(tmp_path / "whole", corpus)
    with pytest.raises(Stopped):
        made(tmp_path / "store", corpus, report=stop_after(15))
    partial = tmp_path / "store.partial"
    for kind in ("tokens", "documents"):
        with max(partial.glob(f"{kind}-*.bin")).open("ab") as file:
            file.write(b"half a batch")
        (partial / f"{kind}-00005.bin").write_bytes(b"of a shard begun after the commit")
    assert made(tmp_path / "store", corpus) == whole


@pytest.mark.parametrize(
    ("which", "message"), [(min, "has 0 bytes, not 1000"), (max, "has less than [1-9]")]
)
def test_files_that_lost_what_was_committed(tmp_path, corpus, small_steps, which, message):
    with pytest.raises(Stopped):
        made(tmp_path / "store", corpus, report=stop_after(15))
    partial = tmp_path / "store.partial"
    lost = which(partial.glob("tokens-*.bin"))
    lost.write_bytes(b"")
    with pytest.raises(
        DataError, match=f"^{partial}: {lost.name} {message}.*; remove it, to start anew$"
    ):
        made(tmp_path / "store", corpus)


@pytest.mark.parametrize(
    "progress",
    ["", "{", "[]", "[" * 200_000, '{"tokens": 1}', '{"recipe": {}, "position": 3, "shards": []}'],
)
def test_what_cannot_be_read_is_not_removed(tmp_path, corpus, progress):
    partial = tmp_path / "store.partial"
    partial.mkdir()
    (partial / "progress.json").write_text(progress)
    with pytest.raises(
        DataError, match=f"^{partial} is in the way, and no unfinished token store: .*; remove it$"
    ):
        made(tmp_path / "store", corpus)
    (partial / "progress.json").rename(partial / "notes.txt")
    with pytest.raises(
        DataError, match=f"^{partial} is in the way, and no unfinished token store: .*No such file"
    ):
        made(tmp_path / "store", corpus)
    assert [path.name for path in partial.iterdir()] == ["notes.txt"]
    (partial / "notes.txt").unlink()
    made(tmp_path / "store", corpus)


def test_a_run_that_was_killed_in_its_first_write(tmp_path, corpus):
    whole = made(tmp_path / "whole", corpus)
    (tmp_path / "store.partial").mkdir()
    (tmp_path / "store.partial" / ".progress.json.host.1").write_text("{")
    assert made(tmp_path / "store", corpus) == whole


def test_other_files_beside_a_store_stay(tmp_path, corpus):
    (tmp_path / "store.lock").write_text("mine")
    made(tmp_path / "store", corpus)
    assert (tmp_path / "store.lock").read_text() == "mine"


def test_a_run_that_was_killed_before_its_last_rename(tmp_path, corpus):
    whole = made(tmp_path / "whole", corpus)
    shutil.copytree(tmp_path / "whole", tmp_path / "store.partial")
    assert made(tmp_path / "store", corpus, report=stop_after(0)) == whole


def test_a_draft_of_the_progress_does_not_stay(tmp_path, corpus, small_steps, monkeypatch):
    whole = made(tmp_path / "whole", corpus)
    assert "progress.json" not in whole
    with pytest.raises(Stopped):
        made(tmp_path / "store", corpus, report=stop_after(8))
    (tmp_path / "store.partial" / ".progress.json.host.1").write_text("{")
    monkeypatch.setattr(prepare, "COMMIT_SECONDS", 1000)
    assert made(tmp_path / "store", corpus) == whole


def test_text_that_changes_while_it_is_read(tmp_path, corpus, small_steps):
    def change(pace: Pace) -> None:
        (corpus / "0.jsonl").write_text(rows_of(["before what is read"]))

    with pytest.raises(DataError, match=f"^{corpus} changed while it was read; run again$"):
        made(tmp_path / "store", corpus, report=change)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_other_text_is_not_mixed_in(tmp_path, corpus, small_steps):
    with pytest.raises(Stopped):
        made(tmp_path / "store", corpus, report=stop_after(20))
    (corpus / "c.jsonl").write_text(rows_of(["more"]))
    message = "store.partial was made of other text or with another tokenizer .source_fingerprint is .*; remove it, or"
    with pytest.raises(DataError, match=message):
        made(tmp_path / "store", corpus)


def test_it_does_not_matter_how_the_text_is_named(
    tmp_path, corpus, small_steps, messages, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Stopped):
        made(tmp_path / "store", Path("corpus"), report=stop_after(20))
    assert made(tmp_path / "store", corpus) == made(tmp_path / "again", corpus)
    made(tmp_path / "store", Path("corpus"))
    said = [record.getMessage() for record in messages.records]
    assert any("going on after" in message for message in said)
    assert "is made already" in said[-1]


def test_a_store_that_is_there(tmp_path, corpus, messages):
    files = made(tmp_path / "store", corpus)
    assert made(tmp_path / "store", corpus) == files
    assert (
        messages.records[-1].getMessage()
        == f"{tmp_path}/store is made already: 60 documents, {tokens(files)} tokens"
    )
    with pytest.raises(
        DataError, match=r"store was made of .*\(shard_tokens is 500, asked for is 600\); remove it"
    ):
        made(tmp_path / "store", corpus, shard_tokens=600)
    (tmp_path / "folder").mkdir()
    with pytest.raises(
        DataError, match="folder exists and is no token store; name another folder$"
    ):
        made(tmp_path / "folder", corpus)
    assert list((tmp_path / "folder").iterdir()) == []


def tokens(files: dict[str, bytes]) -> str:
    return f"{json.loads(files['manifest.json'])['tokens']:,}"


@pytest.fixture
def bad(tmp_path):
    path = tmp_path / "bad.jsonl"
    lines = [
        '{"text": "one"}',
        "{",
        '{"text": "two"}',
        '{"text": ""}',
        '{"other": "x"}',
        '{"text": "three"}',
    ]
    path.write_text("\n".join(lines))
    return path


def test_bad_rows_stop_it(tmp_path, bad):
    message = (
        r"^.*bad.jsonl, line 2: .*; mend the row, or make a store with .* --skip-bad 1 or more$"
    )
    with pytest.raises(DataError, match=message):
        made(tmp_path / "store", bad)
    with pytest.raises(DataError, match=r"line 5: .*--skip-bad 3 or more$"):
        made(tmp_path / "store", bad, skip_bad=2)
    assert not (tmp_path / "store").exists()


def test_bad_rows_are_skipped_and_counted(tmp_path, bad, messages, monkeypatch):
    monkeypatch.setattr(prepare, "REPORTED_ROWS", 2)
    made(tmp_path / "store", bad, skip_bad=3)
    store = TokenStore(tmp_path / "store")
    assert store.read(0, store.tokens).tolist() == [
        i for text in ("one", "two", "three") for i in [1, *TOKENIZER.encode(text), 2]
    ]
    assert store.manifest.skipped_rows == 3
    skipped = [record.getMessage() for record in messages.records if record.levelname == "WARNING"]
    assert [message.partition(": ")[2].partition(": ")[0] for message in skipped] == [
        f"{bad}, line 2",
        f"{bad}, line 4",
    ]


@settings(max_examples=5, deadline=None)
@given(stop=st.integers(0, 5))
def test_skipped_rows_are_counted_once_over_interruptions(tmp_path_factory, stop):
    folder = tmp_path_factory.mktemp("skip")
    path = folder / "bad.jsonl"
    path.write_text("\n".join(["{", *['{"text": "good"}', "{"] * 5]))
    with pytest.MonkeyPatch.context() as patch:
        make_small_steps(patch, batch_bytes=1)
        with pytest.raises(Stopped):
            made(folder / "store", path, skip_bad=6, report=stop_after(stop))
        made(folder / "store", path, skip_bad=6)
    manifest = read_manifest(folder / "store")
    assert (manifest.skipped_rows, manifest.documents) == (6, 5)


def test_a_store_made_without_bad_rows_is_not_one_without_skipping(tmp_path, bad):
    made(tmp_path / "store", bad, skip_bad=3)
    with pytest.raises(
        DataError, match="store was made without 3 bad rows, and --skip-bad is 2; allow as many, or"
    ):
        made(tmp_path / "store", bad, skip_bad=2)


def test_text_without_documents_where_the_unfinished_store_is_a_link(tmp_path):
    bad, elsewhere = tmp_path / "bad.jsonl", tmp_path / "elsewhere"
    bad.write_text("{\n")
    elsewhere.mkdir()
    (tmp_path / "store.partial").symlink_to(elsewhere)
    with pytest.raises(DataError, match=r"bad\.jsonl holds 0 documents"):
        made(tmp_path / "store", bad, skip_bad=1)
    assert not (tmp_path / "store.partial").is_symlink() and elsewhere.is_dir()


def test_a_store_without_a_name(corpus):
    with pytest.raises(DataError, match=r"^\. is no name for a token store; name a new folder$"):
        made(Path(), corpus)


def test_no_document_at_all(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("{\n{\n")
    with pytest.raises(DataError, match="bad.jsonl holds 0 documents; name text that has some"):
        made(tmp_path / "store", path, skip_bad=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["bad.jsonl"]


def test_what_is_reported(tmp_path, corpus, small_steps):
    paces: list[Pace] = []
    made(tmp_path / "store", corpus, report=paces.append)
    shares = [pace.read for pace in paces]
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.2
    assert shares[-1] == 1
    assert paces[-1].progress.documents == 60
    assert all(pace.tokens_per_s > 0 for pace in paces)
    shutil.rmtree(tmp_path / "store")
