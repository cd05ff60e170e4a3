"""Rows to ids in processes: the same as in this one, in order, and no process left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from torchtitan_lite.base.errors import DataError, RunError
from torchtitan_lite.data import encoder
from torchtitan_lite.data.encoder import EncodedBatch, encode_batches, encode_rows
from torchtitan_lite.data.rows import Parser, TextRow
from torchtitan_lite.data.tokenizer import SHIPPED_MODEL, Tokenizer, build_tokenizer

ROOT = Path(__file__).parents[2]
U2 = np.dtype("<u2")


def text_row(data: bytes, line: int = 1, problem: str = "") -> TextRow:
    return TextRow("a.txt", 0, line, "text", data, problem)


def framed(text: str) -> list[int]:
    return [1, *build_tokenizer("").encode(text), 2]


# ----- encode_rows -----


def encoded(*rows: TextRow) -> EncodedBatch:
    return encode_rows(rows, parser=Parser("text"), tokenizer=build_tokenizer(""), dtype=U2)


def test_documents_one_after_the_other():
    bad = (text_row(b"\xff", 2), text_row(b"", 4, "too long"))
    batch = encoded(text_row(b"one two"), bad[0], text_row("é".encode()), bad[1])
    assert batch.ids.tolist() == framed("one two") + framed("é")
    assert batch.ids.dtype == U2
    assert batch.lengths.tolist() == [len(framed("one two")), len(framed("é"))]
    assert [str(row)[:14] for row in batch.bad_rows] == ["a.txt, line 2:", "a.txt, line 4:"]


def test_nothing_but_bad_rows():
    batch = encoded(text_row(b"\xff"))
    assert (batch.ids.shape, batch.ids.dtype, batch.lengths.shape) == ((0,), U2, (0,))
    assert len(batch.bad_rows) == 1


@pytest.mark.parametrize(("eos", "ids"), [("<bos>", [1, 0, 1]), ("<eos>", [1, 0, 2, 1, 2])])
def test_a_text_that_holds_the_id_of_a_frame_is_a_bad_row(tmp_path, eos, ids):
    """Here as the unknown token. Masks would take it for the end of a document."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"a": 0, "<bos>": 1, "<eos>": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=eos))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": "<bos>", "eos_token": eos}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    options = {"tokenizer": build_tokenizer(str(tmp_path)), "dtype": U2}
    rows = [text_row(b"a"), text_row(b"a other", line=7), text_row(b" ")]
    batch = encode_rows(rows, parser=Parser("text"), **options)
    assert batch.ids.tolist() == ids
    (bad,) = batch.bad_rows
    assert re.match(rf"a.txt, line 7: .* BOS id 1 or EOS id {ids[-1]}$", str(bad))


# ----- encode_batches, serve -----


def processes(
    batches: Iterator[list[TextRow]], workers: int, tokenizer: Tokenizer | None = None
) -> Iterator[tuple[list[TextRow], EncodedBatch]]:
    tokenizer = tokenizer or build_tokenizer("")
    parser = Parser("text")
    return encode_batches(batches, parser=parser, tokenizer=tokenizer, dtype=U2, workers=workers)


@pytest.mark.parametrize("workers", [1, 3])
def test_processes_keep_the_order(workers):
    # Long batches between short ones are overtaken if anything can be.
    batches = [[text_row(f"row {i} ".encode() * (20_000 if i % 5 == 0 else 1))] for i in range(20)]
    batches[7] = batches[19] = []
    answers = list(processes(iter(batches), workers))
    assert [rows for rows, _ in answers] == batches
    for rows, batch in answers:
        assert batch.ids.tolist() == [i for row in rows for i in framed(row.data.decode())]


def children() -> set[str]:
    threads = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {pid for children in threads for pid in children.read_text().split()}


def test_few_batches_are_read_ahead_and_no_process_is_left():
    before, read = children(), []

    def batches() -> Iterator[list[TextRow]]:
        for i in range(1000):
            read.append(i)
            yield [text_row(b"text")]

    answers = processes(batches(), 2)
    next(answers)
    assert len(children() - before) == 2
    assert len(read) == encoder.AHEAD * 2 + 1
    answers.close()
    assert children() == before


def test_an_error_of_the_reader_stays_itself_and_ends_the_processes():
    before = children()

    def batches() -> Iterator[list[TextRow]]:
        yield [text_row(b"text")]
        raise DataError("a.gz: cut off")

    with pytest.raises(DataError, match="^a.gz: cut off$"):
        list(processes(batches(), 2))
    assert children() == before


def test_an_error_is_reported_where_a_closed_pipe_ends_the_command():
    code = """
import signal, subprocess, time
from torchtitan_lite.data import encoder, rows
from torchtitan_lite.data.tokenizer import build_tokenizer
def batches():
    yield [rows.TextRow("file", 0, 1, "text", b"x" * 10**6)]  # more than a pipe holds
    time.sleep(0.5)
    raise SystemExit(3)
pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
encoder._start_worker = lambda: subprocess.Popen(["sleep", "60"], **pipe)  # reads nothing
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
options = {"parser": None, "tokenizer": build_tokenizer(""), "dtype": None, "workers": 1}
list(encoder.encode_batches(batches(), **options))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 3


@pytest.mark.timeout(60)
def test_a_process_that_is_killed_is_reported():
    def batches() -> Iterator[list[TextRow]]:
        yield from ([text_row(b"text", line=7)] for _ in range(2))
        while not (started := children() - before):
            time.sleep(0.001)
        for pid in started:
            os.kill(int(pid), signal.SIGKILL)
        yield from ([text_row(b"text", line=9)] for _ in range(100))

    before = children()
    message = r"^a tokenizing process ended with exit code -9, on .* a.txt, line [79] on; "
    with pytest.raises(RunError, match=message) as error:
        list(processes(batches(), 2))
    assert error.value.exit_code == 1  # not the data's


def test_a_process_that_is_killed_as_it_starts_is_reported(monkeypatch):
    def killed() -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process.kill()
        process.wait()
        return process

    monkeypatch.setattr(encoder, "_start_worker", killed)
    with pytest.raises(RunError, match="^a .* exit code -9, on rows from a.txt, line 7 on"):
        list(processes(iter([[text_row(b"text", line=7)]]), 1))


def test_modules_of_the_users_folders_do_not_reach_a_process(tmp_path, monkeypatch):
    """Such as a random.py in PYTHONPATH, which this process has imported from Python's library."""
    for name in ("random.py", "sitecustomize.py"):
        (tmp_path / name).write_text("print('not an answer')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    (answer,) = processes(iter([[text_row(b"text")]]), 1)
    assert answer[1].ids.tolist() == framed("text")


def test_an_error_of_a_process_keeps_its_message(tmp_path):
    """Such as that of a tokenizer that changes after it was opened."""
    path = tmp_path / "tokenizer.model"
    path.write_bytes(SHIPPED_MODEL.read_bytes())
    tokenizer = build_tokenizer(str(path))
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"tokenizer\.model\" is not a whole sentencepiece model"):
        list(processes(iter([[text_row(b"text")]]), 1, tokenizer))


def test_processes_end_with_the_one_that_started_them():
    """Killed, it cannot end them itself."""
    code = (
        "import sys, time; sys.path.insert(0, 'tests/unit'); import test_encoder as t\n"
        "answers = t.processes(iter([[t.text_row(b'text')]] * 100), 2); next(answers)\n"
        "print(*sorted(t.children()), flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    workers = parent.stdout.readline().split()
    assert len(workers) == 2
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in workers if alive(pid)] == []


def alive(pid: str) -> bool:
    """Whether a process runs; one that has ended but was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
