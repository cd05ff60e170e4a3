"""Tokenizing on all cores: this thread reads, threads of a pool tokenize.

The tokenizers' libraries release Python's lock while they work, so threads are enough.
"""

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from .rows import Row
from .tokenizer import Tokenizer

AHEAD = 2
"""Batches per thread that are read before they are asked for."""


@dataclass(frozen=True)
class EncodedBatch:
    """The documents of a batch of rows, concatenated."""

    ids: np.ndarray
    """Tokens of all documents, [sum of lengths]."""
    lengths: np.ndarray
    """Tokens of each document with those that frame it, int64 [documents]."""
    bad_rows: list[Row]


def encode_rows(rows: list[Row], tokenizer: Tokenizer, dtype: np.dtype) -> EncodedBatch:
    """Tokenize rows, in order."""
    good = [row for row in rows if not row.problem]
    bad = [row for row in rows if row.problem]

    # Masks find documents by BOS, so that no text may hold it; as an unknown token, it could.
    documents = []
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    encoded = tokenizer.encode_documents([row.text for row in good])
    for row, ids_of_row in zip(good, encoded, strict=True):
        document = np.asarray(ids_of_row, dtype)
        framing = np.count_nonzero((document == bos) | (document == eos))
        if framing > (1 if tokenizer.one_separator else 2):
            bad.append(Row(row.place, "", f"its text encodes to BOS id {bos} or EOS id {eos}"))
        else:
            documents.append(document)
    ids = np.concatenate([np.empty(0, dtype), *documents])
    return EncodedBatch(ids, np.array([len(ids) for ids in documents], np.int64), bad)


def encode_batches(
    batches: Iterable[list[Row]], tokenizer: Tokenizer, *, dtype: np.dtype, threads: int
) -> Generator[EncodedBatch, None, None]:
    """Yield the tokens of each batch, in order. Holds AHEAD batches per thread in memory."""
    pool = ThreadPoolExecutor(threads, "tokenize")
    ahead: deque[Future[EncodedBatch]] = deque()
    try:
        for batch in batches:
            ahead.append(pool.submit(encode_rows, batch, tokenizer, dtype))
            if len(ahead) > AHEAD * threads:
                yield ahead.popleft().result()
        for future in ahead:
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)
