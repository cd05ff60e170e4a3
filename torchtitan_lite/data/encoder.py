"""Tokenizing on all cores: one process reads and writes, worker processes parse and tokenize.

Workers are new interpreters: a fork would break the threads of a training process, which tokenizes
too, and multiprocessing's spawn would import its main module. A worker ends when its standard input
does, so none outlives the process that started it.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from torchtitan_lite.base.errors import DataError, RunError

from .rows import BadRow, Parser, TextRow
from .tokenizer import Tokenizer, build_tokenizer

AHEAD = 2
"""Batches per worker that are read before they are asked for."""


@dataclass(frozen=True)
class EncodedBatch:
    """The documents of a batch of rows, concatenated."""

    ids: np.ndarray
    """Tokens of all documents, [sum of lengths]."""
    lengths: np.ndarray
    """Tokens of each document with those that frame it, int64 [documents]."""
    bad_rows: list[BadRow]


def encode_rows(
    rows: Iterable[TextRow], *, parser: Parser, tokenizer: Tokenizer, dtype: np.dtype
) -> EncodedBatch:
    """Parse and tokenize rows, in order."""
    texts, bad_rows = [], []
    places: list[tuple[str, int, int]] = []
    for row in rows:
        try:
            texts.append(parser(row))
            places.append((row.file, row.begin, row.line))
        except BadRow as error:
            bad_rows.append(error)

    # Masks find documents by BOS, so that no text may hold it; as an unknown token, it could.
    documents = []
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    for place, encoded in zip(places, tokenizer.encode_documents(texts), strict=True):
        document = np.asarray(encoded, dtype)
        framing = np.count_nonzero((document == bos) | (document == eos))
        if framing > (1 if tokenizer.one_separator else 2):
            bad_rows.append(BadRow(*place, f"its text encodes to BOS id {bos} or EOS id {eos}"))
        else:
            documents.append(document)
    ids = np.concatenate([np.empty(0, dtype), *documents])
    return EncodedBatch(ids, np.array([len(ids) for ids in documents], np.int64), bad_rows)


def encode_batches(
    batches: Iterable[list[TextRow]],
    *,
    parser: Parser,
    tokenizer: Tokenizer,
    dtype: np.dtype,
    workers: int,
) -> Generator[tuple[list[TextRow], EncodedBatch], None, None]:
    """Yield each batch and its tokens, in order, computed by `workers` processes.

    Holds AHEAD batches per worker in memory. Raises RunError if a worker is killed."""
    started: list[subprocess.Popen[bytes]] = []
    of_thread = threading.local()

    def encode(batch: list[TextRow]) -> EncodedBatch:
        if not hasattr(of_thread, "worker"):
            of_thread.worker = _start_worker()
            started.append(of_thread.worker)
        return _ask(of_thread.worker, batch, parser, str(tokenizer.path), dtype)

    # Each thread waits for the worker that it has started. Where a command ends with a closed
    # output, by SIGPIPE, the pipe to a worker that has ended would end it too, without a message.
    no_signal = (signal.SIG_BLOCK, {signal.SIGPIPE})
    threads = ThreadPoolExecutor(workers, initializer=signal.pthread_sigmask, initargs=no_signal)
    ahead: deque[tuple[list[TextRow], Future[EncodedBatch]]] = deque()
    try:
        for batch in batches:
            ahead.append((batch, threads.submit(encode, batch)))
            if len(ahead) > AHEAD * workers:
                done, future = ahead.popleft()
                yield done, future.result()
        for done, future in ahead:
            yield done, future.result()
    finally:
        # Killing the workers ends the threads' waiting; one may have been started meanwhile.
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in started:
            worker.kill()
        threads.shutdown()
        for worker in started:
            worker.kill()
            worker.wait()


def _start_worker() -> subprocess.Popen[bytes]:
    # The worker finds modules where this process does, but those of Python's library there only: a
    # folder of PYTHONPATH may have a random.py, or a sitecustomize.py that prints, and the current
    # folder anyone's files. In its own session, the worker does not receive Ctrl-C.
    library = Path(os.__file__).parent
    own = [str(library), str(library / "lib-dynload")]
    code = f"import sys; sys.path[:] = {own + sys.path!r}; from {__name__} import serve; serve()"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )


def _ask(worker: subprocess.Popen[bytes], batch: list[TextRow], *options: object) -> EncodedBatch:
    assert worker.stdin is not None and worker.stdout is not None
    try:
        pickle.dump((batch, *options), worker.stdin, pickle.HIGHEST_PROTOCOL)
        worker.stdin.flush()
        answer = pickle.load(worker.stdout)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
        place = f"rows from {batch[0].file}, line {batch[0].line} on" if batch else "no rows"
        worker.communicate()  # a process that lives ends with its standard input
        raise RunError(
            f"a tokenizing process ended with exit code {worker.returncode}, on {place}; if it was "
            "killed (-9), memory may have run out: use fewer workers; else its error is above"
        ) from error
    if isinstance(answer, DataError):
        raise answer
    return answer


def serve() -> None:
    """Run a worker: answer batches from standard input until it ends."""
    requests, answers = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps a library's output out of the answers
    open_tokenizer = cache(build_tokenizer)
    while requests.peek(1):
        batch, parser, path, dtype = pickle.load(requests)
        try:
            answer: EncodedBatch | DataError = encode_rows(
                batch, parser=parser, tokenizer=open_tokenizer(path), dtype=dtype
            )
        except DataError as error:
            answer = error
        try:
            pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
        except BrokenPipeError:
            os._exit(1)  # the process that asked was killed
