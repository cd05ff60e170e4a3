"""What is told of a store: counts, a window's text, and how far one is that is being made."""

import io

import pytest
from sample_stores import RECIPE

from torchtitan_lite.data import store_report
from torchtitan_lite.data.prepare import Pace, prepare_store
from torchtitan_lite.data.sources import build_source
from torchtitan_lite.data.store_report import ProgressLine, format_store, format_window
from torchtitan_lite.data.store_writer import Progress
from torchtitan_lite.data.token_store import TokenStore
from torchtitan_lite.data.tokenizer import build_tokenizer
from torchtitan_lite.errors import DataError

TOKENIZER = build_tokenizer("")
TEXTS = ["import os\n", "x = 1\n"]


@pytest.fixture
def store(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i, text in enumerate(TEXTS):
        (corpus / f"{i}.py").write_text(text)
    prepare_store(tmp_path / "store", build_source(str(corpus)), TOKENIZER, workers=1)
    return TokenStore(tmp_path / "store")


def test_counts(store):
    lines = format_store(store).splitlines()
    assert lines[0] == f"{store.folder}: of {store.name}"
    assert (
        lines[1]
        == f"{store.tokens} tokens in 2 documents, {store.tokens / 2} each; 0 bad rows were skipped"
    )
    assert lines[2] == "1 shards of up to 536,870,912 tokens of 2 bytes"
    assert lines[3].startswith(
        f"tokenizer pystdlib-2256.model, fingerprint {TOKENIZER.fingerprint}, 2,256 ids, of which "
    )
    assert lines[4] == f"fingerprint {store.fingerprint}"


def test_a_window_is_a_line_a_document(store):
    whole = format_window(store, TOKENIZER, window=0, seq_len=100)
    assert whole.splitlines() == [
        f"window 0, tokens 0 to {store.tokens - 1}:",
        repr(TEXTS[0]),
        repr(TEXTS[1]),
    ]
    first = len(TOKENIZER.encode(TEXTS[0])) + 2
    assert format_window(store, TOKENIZER, window=1, seq_len=first).splitlines() == [
        f"window 1, tokens {first} to {2 * first - 1}:", repr(TEXTS[1][:5])
    ]  # fmt: skip


def test_windows_that_are_not_there(store):
    with pytest.raises(
        DataError, match=rf"^--window 1: {store.folder} has windows 0 to 0 of 100 tokens$"
    ):
        format_window(store, TOKENIZER, window=1, seq_len=100)


def test_text_needs_the_tokenizer(store):
    other = build_tokenizer("")
    other.fingerprint = "other"
    with pytest.raises(
        DataError,
        match="is not the one that .* was made with: pystdlib-2256.model, fingerprint .*; name that",
    ):
        format_window(store, other, window=0, seq_len=100)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def pace(read: float, tokens: int) -> Pace:
    return Pace(Progress(RECIPE, tokens=tokens, documents=tokens // 100), read, 5000.0)


def shown(file: io.StringIO, monkeypatch: pytest.MonkeyPatch, seconds: float) -> str:
    """What a line shows of three paces, `seconds` apart, the first of which an earlier run had
    reached."""
    now = [100.0]
    monkeypatch.setattr(store_report.time, "monotonic", lambda: now[0])
    line = ProgressLine(file)
    for share in (0.5, 0.6, 0.7):
        line(pace(share, int(share * 10_000)))
        now[0] += seconds
    line.close()
    return file.getvalue()


def test_lines_where_there_is_no_terminal(monkeypatch):
    assert shown(io.StringIO(), monkeypatch, 20) == (
        " 60.0%  60 documents  6,000 tokens  5,000 tokens/s  0:01:20 left\n"
        " 70.0%  70 documents  7,000 tokens  5,000 tokens/s  0:01:00 left\n"
    )
    assert shown(io.StringIO(), monkeypatch, 1) == ""


def test_one_line_on_a_terminal(monkeypatch):
    text = shown(Terminal(), monkeypatch, 1)
    assert text.count("\r") == 2
    assert text.endswith("\n")
    assert text.count("\n") == 1
    assert "70.0%  70 documents  7,000 tokens  5,000 tokens/s  0:00:03 left" in text


def test_time_left_is_not_guessed(monkeypatch):
    monkeypatch.setattr(store_report.time, "monotonic", lambda: 0.0)
    line = ProgressLine(file := io.StringIO())
    monkeypatch.setattr(store_report.time, "monotonic", lambda: 60.0)
    line(pace(0.0, 100))
    assert file.getvalue().endswith("tokens/s  time left unknown\n")
