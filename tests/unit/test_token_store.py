"""Token stores: the stream, its cache made once and whole, damage, and the entropy."""

import json
import logging
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from torchtitan_lite.data import token_store
from torchtitan_lite.data.sources import build_source
from torchtitan_lite.data.token_store import TokenStore, open_token_store
from torchtitan_lite.data.tokenizer import build_tokenizer
from torchtitan_lite.errors import DataError

TEXTS = ["first document\n", "the second", "", "third: é 日本"]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return build_source("pystdlib", str(path))


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def messages(monkeypatch, caplog):
    monkeypatch.setattr(token_store.logger, "propagate", True)
    caplog.set_level(logging.INFO, token_store.logger.name)
    return caplog


def expected_ids() -> list[int]:
    tokenizer = build_tokenizer("")
    return [i for text in TEXTS if text for i in [1, *tokenizer.encode(text), 2]]


def only_folder(cache):
    [folder] = [path for path in cache.iterdir() if path.is_dir()]
    return folder


@pytest.mark.parametrize("batch_characters", [1, 2**21])
def test_stream_of_documents(source, cache, monkeypatch, batch_characters):
    monkeypatch.setattr(token_store, "BATCH_CHARACTERS", batch_characters)
    store = open_token_store(source, build_tokenizer(""), cache_dir=cache)
    assert store.tokens.tolist() == expected_ids()
    assert (store.documents, store.vocab_size, store.tokens.dtype) == (3, 2256, np.dtype("<u2"))
    assert not store.tokens.flags.writeable
    assert sorted(path.name for path in only_folder(cache).iterdir()) == ["manifest.json", "tokens.bin"]


def test_large_vocabularies_take_four_bytes(source, cache):
    tokenizer = build_tokenizer("")
    tokenizer.vocab_size = 2**16
    assert open_token_store(source, tokenizer, cache_dir=cache / "2").tokens.dtype == np.dtype("<u2")
    tokenizer.vocab_size = 2**16 + 1
    store = open_token_store(source, tokenizer, cache_dir=cache / "4")
    assert store.tokens.dtype == np.dtype("<u4")
    assert store.tokens.tolist() == expected_ids()


def test_made_once(source, cache, messages):
    first = open_token_store(source, build_tokenizer(""), cache_dir=cache)
    again = open_token_store(source, build_tokenizer(""), cache_dir=cache)
    assert again.fingerprint == first.fingerprint
    [message] = [record.getMessage() for record in messages.records]
    assert message.startswith(f"tokenized {source.name}: 3 documents, {len(expected_ids())} tokens, ")
    assert str(only_folder(cache)) in message


def test_other_text_and_other_tokenizer_have_other_stores(source, cache, tmp_path):
    first = open_token_store(source, build_tokenizer(""), cache_dir=cache)
    (tmp_path / "corpus.jsonl").write_text('{"text": "other"}')
    changed = build_source("pystdlib", str(tmp_path / "corpus.jsonl"))
    assert open_token_store(changed, build_tokenizer(""), cache_dir=cache).fingerprint != first.fingerprint
    tokenizer = build_tokenizer("")
    tokenizer.fingerprint = "another"
    open_token_store(changed, tokenizer, cache_dir=cache)
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 3


def test_default_cache(source, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    open_token_store(source, build_tokenizer(""))
    only_folder(tmp_path / "home" / ".cache" / "torchtitan_lite" / "tokens")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    open_token_store(source, build_tokenizer(""))
    only_folder(tmp_path / "xdg" / "torchtitan_lite" / "tokens")


def set_format(folder):
    fields = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**fields, "format": 99}))


DAMAGE = {
    "truncated": (lambda folder: os.truncate(folder / "tokens.bin", 7), r"tokens\.bin has 7 bytes, not \d+"),
    "no tokens": (lambda folder: (folder / "tokens.bin").unlink(), "No such file"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "No such file"),
    "broken manifest": (lambda folder: (folder / "manifest.json").write_text("{"), "Expecting property name"),
    "empty manifest": (lambda folder: (folder / "manifest.json").write_text("{}"), "format"),
    "listed manifest": (lambda folder: (folder / "manifest.json").write_text("[]"), "list indices"),
    "lacking manifest": (lambda folder: (folder / "manifest.json").write_text('{"format": 1}'), "missing 8 required"),
    "other format": (set_format, "its format is 99, not 1"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_mended(source, cache, messages, kind):
    damage, reason = DAMAGE[kind]
    open_token_store(source, build_tokenizer(""), cache_dir=cache)
    damage(only_folder(cache))
    with pytest.raises(DataError, match=f"token store .* is damaged: .*{reason}.*; it must be made anew"):
        TokenStore(only_folder(cache))
    messages.clear()
    assert open_token_store(source, build_tokenizer(""), cache_dir=cache).tokens.tolist() == expected_ids()
    assert [record.levelname for record in messages.records] == ["WARNING", "INFO"]


def test_no_half_store_is_left_by_an_error(cache, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"a\.txt, line 1"):
        open_token_store(build_source("pystdlib", str(tmp_path)), build_tokenizer(""), cache_dir=cache)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_cache_that_cannot_be_written(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError, match=r"token cache .*file/deep cannot be written: Not a directory; set XDG_CACHE_HOME"
    ):
        open_token_store(source, build_tokenizer(""), cache_dir=tmp_path / "file" / "deep")


class SlowSource:
    """Two documents with a pause between them; `log` gets a line each time they are read."""

    name = fingerprint = "slow"

    def __init__(self, log, seconds):
        self.log = log
        self.seconds = seconds

    def documents(self):
        with self.log.open("a") as file:
            file.write("read\n")
        yield "first"
        time.sleep(self.seconds)
        yield "second"


def open_slowly(cache, log, seconds):
    store = open_token_store(SlowSource(log, seconds), build_tokenizer(""), cache_dir=cache)
    assert store.documents == 2


def test_one_process_makes_it_and_the_others_wait(cache, tmp_path):
    fork = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    processes = [fork.Process(target=open_slowly, args=(cache, log, 0.3)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert log.read_text() == "read\n"


def test_a_killed_maker_is_replaced(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(token_store, "BATCH_CHARACTERS", 1)
    log = tmp_path / "log"
    maker = multiprocessing.get_context("fork").Process(target=open_slowly, args=(cache, log, 60))
    maker.start()
    while not log.exists():
        time.sleep(0.01)
    os.kill(maker.pid, signal.SIGKILL)
    maker.join()
    assert only_folder(cache).suffix == ".partial"
    open_slowly(cache, log, 0)
    assert only_folder(cache).suffix == ""


def test_unigram_entropy(source, cache, monkeypatch):
    monkeypatch.setattr(token_store, "CHUNK_TOKENS", 5)
    store = open_token_store(source, build_tokenizer(""), cache_dir=cache)
    store.tokens = np.array([7] * 8 + [9] * 4 + [0] * 2 + [2255] * 2, np.uint16)
    assert store.unigram_entropy() == pytest.approx(1.75 * np.log(2))
    store.tokens = np.array([5] * 12, np.uint16)
    assert store.unigram_entropy() == 0


def test_the_entropy_of_a_large_store_is_that_of_evenly_spaced_chunks(tmp_path, monkeypatch):
    text = "".join(chr(97 + i % 7) * (i % 11 + 1) + "\n" for i in range(4000))
    (tmp_path / "text.txt").write_text(text)
    source = build_source("pystdlib", str(tmp_path / "text.txt"))
    store = open_token_store(source, build_tokenizer(""), cache_dir=tmp_path / "cache")
    exact = store.unigram_entropy()
    monkeypatch.setattr(token_store, "CHUNK_TOKENS", 100)
    assert store.unigram_entropy() == pytest.approx(exact, rel=0.05)
    monkeypatch.setattr(token_store, "ENTROPY_CHUNKS", 10**6)
    assert store.unigram_entropy() == pytest.approx(exact, rel=1e-12)
