"""Rows to ids in threads: the same as in one, in order, and no thread left behind."""

import json
import re
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.data.rows import Row
from torchtitan_lite.data.store_writer import AHEAD, Encoded, encode_batches, encode_rows
from torchtitan_lite.data.tokenizer import build_tokenizer

U2 = np.dtype("<u2")


def text_row(text: str, line: int = 1) -> Row:
    return Row(f"a.txt, line {line}", text)


def framed(text: str) -> list[int]:
    return [1, *build_tokenizer("").encode(text), 2]


# ----- encode_rows -----


def test_documents_one_after_the_other():
    bad = Row("a.txt, line 2", "", "too long")
    rows = [text_row("one two"), bad, text_row("é")]
    documents, bad_rows, size = encode_rows(rows, build_tokenizer(""), U2)
    assert [ids.tolist() for ids in documents] == [framed("one two"), framed("é")]
    assert {ids.dtype for ids in documents} == {U2}
    assert (bad_rows, size) == ([bad], len("one twoé".encode()))
    assert encode_rows([bad], build_tokenizer(""), U2) == ([], [bad], 0)


@pytest.mark.parametrize(("eos", "ids"), [("<bos>", [[1, 0], [1]]), ("<eos>", [[1, 0, 2], [1, 2]])])
def test_a_text_that_holds_the_id_of_a_frame_is_a_bad_row(tmp_path, eos, ids):
    """Here as the unknown token. Masks would take it for the end of a document."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"a": 0, "<bos>": 1, "<eos>": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=eos))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": "<bos>", "eos_token": eos}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    rows = [text_row("a"), text_row("a other", line=7), text_row(" ")]
    documents, (bad,), _ = encode_rows(rows, build_tokenizer(str(tmp_path)), U2)
    assert [found.tolist() for found in documents] == ids
    assert bad.place == "a.txt, line 7"
    assert re.search(rf"BOS id 1 or EOS id {ids[-1][-1]}$", bad.problem)


# ----- encode_batches -----


def encoded(batches: Iterator[list[Row]], threads: int) -> Iterator[Encoded]:
    return encode_batches(batches, build_tokenizer(""), dtype=U2, threads=threads)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_keep_the_order(threads):
    # Long batches between short ones are overtaken if anything can be.
    batches = [[text_row(f"row {i} " * (20_000 if i % 5 == 0 else 1))] for i in range(20)]
    batches[7] = []
    answers = list(encoded(iter(batches), threads))
    for rows, (documents, _, _) in zip(batches, answers, strict=True):
        assert [ids.tolist() for ids in documents] == [framed(row.text) for row in rows]


def test_few_batches_are_read_ahead_and_no_thread_is_left():
    before, read = threading.active_count(), []

    def batches() -> Iterator[list[Row]]:
        for i in range(1000):
            read.append(i)
            yield [text_row("text")]

    answers = encoded(batches(), 2)
    next(answers)
    assert len(read) == AHEAD * 2 + 1
    answers.close()
    assert threading.active_count() == before


def test_an_error_of_the_reader_or_the_tokenizer_stays_itself(monkeypatch):
    before = threading.active_count()

    def batches() -> Iterator[list[Row]]:
        yield [text_row("text")]
        raise DataError("a.gz: cut off")

    with pytest.raises(DataError, match="^a.gz: cut off$"):
        list(encoded(batches(), 2))
    tokenizer = build_tokenizer("")
    tokenizer._vocabulary = None
    with pytest.raises(DataError, match="tokenizer .* fails: .*; use another"):
        list(encode_batches([[text_row("text")]], tokenizer, dtype=U2, threads=1))
    assert threading.active_count() == before
