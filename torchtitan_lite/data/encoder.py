"""Tokenizing on all cores: one process reads and writes, worker processes parse and tokenize.

Workers are new interpreters: a fork would break the threads of a training process, which tokenizes
too, and multiprocessing's spawn would import its main module. A worker ends when its standard input
does, so none outlives the process that started it.
"""

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np

from torchtitan_lite.errors import DataError

from .rows import BadRow, TextRow
from .tokenizer import Tokenizer, build_tokenizer

AHEAD = 2
"""Batches per worker that are read before they are asked for."""
Worker = subprocess.Popen[bytes]


@dataclass(frozen=True)
class EncodedBatch:
    """The documents of a batch of rows, concatenated."""

    ids: np.ndarray
    """Tokens of all documents, [sum of lengths]."""
    lengths: np.ndarray
    """Tokens of each document with its BOS and EOS, int64 [documents]."""
    bad_rows: list[BadRow]


def encode_rows(
    rows: Iterable[TextRow],
    *,
    parser: Callable[[TextRow], str],
    tokenizer: Tokenizer,
    dtype: np.dtype,
) -> EncodedBatch:
    """Parse and tokenize rows, in order."""
    texts, bad_rows = [], []
    for row in rows:
        try:
            texts.append(parser(row))
        except BadRow as error:
            bad_rows.append(error)
    documents = [np.asarray(ids, dtype) for ids in tokenizer.encode_documents(texts)]
    ids = np.concatenate([np.empty(0, dtype), *documents])
    return EncodedBatch(ids, np.array([len(ids) for ids in documents], np.int64), bad_rows)


def encode_batches(
    batches: Iterable[list[TextRow]],
    *,
    parser: Callable[[TextRow], str],
    tokenizer: Tokenizer,
    dtype: np.dtype,
    workers: int,
) -> Generator[tuple[list[TextRow], EncodedBatch], None, None]:
    """Yield each batch and its tokens, in order, computed by `workers` processes.

    Holds AHEAD batches per worker in memory. Raises DataError if a worker is killed.
    """
    setup = {"parser": parser, "tokenizer_path": str(tokenizer.path), "dtype": dtype}
    ahead: deque[tuple[list[TextRow], Future[EncodedBatch]]] = deque()
    with closing(_WorkerPool(workers, setup)) as pool:
        for batch in batches:
            ahead.append((batch, pool.submit(batch)))
            if len(ahead) > AHEAD * workers:
                done, future = ahead.popleft()
                yield done, future.result()
        for done, future in ahead:
            yield done, future.result()


class _WorkerPool:
    """Threads that each wait for a worker process. `setup` is what a worker needs to know."""

    def __init__(self, workers: int, setup: dict[str, object]) -> None:
        self._setup = setup
        self._threads = ThreadPoolExecutor(workers)
        self._started: list[Worker] = []
        self._idle: SimpleQueue[Worker] = SimpleQueue()

    def submit(self, batch: list[TextRow]) -> Future[EncodedBatch]:
        return self._threads.submit(self._encode, batch)

    def _encode(self, batch: list[TextRow]) -> EncodedBatch:
        requests: list[object] = [batch]
        try:
            worker = self._idle.get_nowait()
        except Empty:
            worker = _start_worker()  # at most one per thread
            self._started.append(worker)
            requests.insert(0, self._setup)
        try:
            encoded = _ask(worker, *requests)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            place = f"rows from {batch[0].file}, line {batch[0].line} on" if batch else "no rows"
            raise DataError(
                f"a tokenizing process ended with exit code {worker.wait()}, on {place}; if it was "
                "killed (-9), memory may have run out: use fewer workers"
            ) from error
        self._idle.put(worker)
        return encoded

    def close(self) -> None:
        # Killing the workers ends the threads' waiting; one may have been started meanwhile.
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._started:
            worker.kill()
        self._threads.shutdown()
        for worker in self._started:
            worker.kill()
            worker.wait()


def _start_worker() -> Worker:
    # The worker finds modules where this process does, and not in the current folder, which may
    # hold anyone's files. In its own session, it does not receive Ctrl-C.
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def _ask(worker: Worker, *requests: object) -> EncodedBatch:
    assert worker.stdin is not None and worker.stdout is not None
    for request in requests:
        pickle.dump(request, worker.stdin, pickle.HIGHEST_PROTOCOL)
    worker.stdin.flush()
    return pickle.load(worker.stdout)


def serve() -> None:
    """Run a worker: answer batches from standard input until it ends."""
    requests, answers = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps a library's output out of the answers
    setup = pickle.load(requests)
    tokenizer = build_tokenizer(setup.pop("tokenizer_path"))
    while requests.peek(1):
        encoded = encode_rows(pickle.load(requests), tokenizer=tokenizer, **setup)
        try:
            pickle.dump(encoded, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
        except BrokenPipeError:
            os._exit(1)  # the process that asked was killed
