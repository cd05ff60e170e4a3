"""Rows to ids on all cores: processes that parse and tokenize, each a batch at a time, for one that
reads and writes.

The processes are started anew rather than forked, because a training process, whose threads a fork
would break, tokenizes too. They end when their standard input does, so that none outlives the
process that started it.
"""

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np

from torchtitan_lite.data.rows import BadRow, Row
from torchtitan_lite.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan_lite.errors import DataError

AHEAD = 2
"""Batches a process that are read before they are asked for."""


@dataclass(frozen=True)
class Encoded:
    """What a batch of rows became. The documents are one after the other in `ids` [sum of
    lengths]."""

    ids: np.ndarray
    lengths: np.ndarray
    """Tokens of each document, BOS and EOS too, int64 [documents]."""
    bad_rows: list[str]
    """Of each row that is no document: its file, its line and what is wrong."""


def encode_rows(
    rows: Iterable[Row], *, parser: Callable[[Row], str], tokenizer: Tokenizer, dtype: np.dtype
) -> Encoded:
    """The documents of `rows`, in their order."""
    texts, bad_rows = [], []
    for row in rows:
        try:
            texts.append(parser(row))
        except BadRow as error:
            bad_rows.append(str(error))
    documents = [np.asarray(ids, dtype) for ids in tokenizer.encode_documents(texts)]
    return Encoded(
        np.concatenate(documents) if documents else np.empty(0, dtype),
        np.array([len(ids) for ids in documents], np.int64),
        bad_rows,
    )


def encode_batches(
    batches: Iterable[list[Row]],
    *,
    parser: Callable[[Row], str],
    tokenizer: Tokenizer,
    dtype: np.dtype,
    workers: int,
) -> Generator[tuple[list[Row], Encoded], None, None]:
    """Each batch and what it became, in their order, computed by `workers` processes; AHEAD batches
    a process are held in memory. Raises DataError if a process is killed."""
    setup = {"parser": parser, "tokenizer_path": str(tokenizer.path), "dtype": dtype}
    started: list[subprocess.Popen[bytes]] = []
    idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()

    def encode(batch: list[Row]) -> Encoded:  # on a thread, which waits for a process
        requests: list[object]
        try:
            process, requests = idle.get_nowait(), [batch]
        except Empty:
            process, requests = _start(), [setup, batch]  # at most one a thread
            started.append(process)
        try:
            encoded = _ask(process, *requests)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            raise DataError(
                f"a tokenizing process ended with exit code {process.wait()}, on rows from {batch[0].file}, line "
                f"{batch[0].line} on; if it was killed (-9), memory may have run out: use fewer workers"
            ) from error
        idle.put(process)
        return encoded

    ahead: deque[tuple[list[Row], Future[Encoded]]] = deque()
    threads = ThreadPoolExecutor(workers)
    try:
        for batch in batches:
            ahead.append((batch, threads.submit(encode, batch)))
            if len(ahead) > AHEAD * workers:
                done, future = ahead.popleft()
                yield done, future.result()
        while ahead:
            done, future = ahead.popleft()
            yield done, future.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for process in started:
            process.kill()  # so that no thread waits for an answer any more
        threads.shutdown()
        for process in started:  # one of which may have been started meanwhile
            process.kill()
            process.wait()


def _start() -> "subprocess.Popen[bytes]":
    # It finds modules where this one does, and not in the current folder, whose files may be
    # anyone's. In a session of its own, Ctrl-C does not reach it.
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def _ask(process: "subprocess.Popen[bytes]", *requests: object) -> Encoded:
    assert process.stdin is not None and process.stdout is not None
    for request in requests:
        pickle.dump(request, process.stdin, pickle.HIGHEST_PROTOCOL)
    process.stdin.flush()
    return pickle.load(process.stdout)


def serve() -> None:
    """Answer batches from standard input until it ends."""
    requests, answers = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is not an answer
    setup = pickle.load(requests)
    tokenizer = build_tokenizer(setup.pop("tokenizer_path"))
    while requests.peek(1):
        encoded = encode_rows(pickle.load(requests), tokenizer=tokenizer, **setup)
        try:
            pickle.dump(encoded, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
        except BrokenPipeError:
            os._exit(1)  # who asked was killed
