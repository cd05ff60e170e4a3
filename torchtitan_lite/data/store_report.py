"""A token store in words: what it holds, a window of it as text, and how far one that is being made
is."""

import shutil
import sys
import time
from itertools import pairwise
from typing import TextIO

from torchtitan_lite.data.prepare import Pace
from torchtitan_lite.data.token_store import TokenStore
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.errors import DataError

TERMINAL_SECONDS = 0.5
LINE_SECONDS = 10.0


def format_store(store: TokenStore) -> str:
    """The counts of a store, and what it was made of."""
    manifest = store.manifest
    recipe = manifest.recipe
    return "\n".join(
        (
            f"{store.folder}: of {recipe.source}",
            f"{store.tokens:,} tokens in {store.documents:,} documents, {store.tokens / store.documents:,.1f} each; "
            f"{manifest.skipped_rows:,} bad rows were skipped",
            f"{len(manifest.shards):,} shards of up to {recipe.shard_tokens:,} tokens of {store.dtype.itemsize} bytes",
            f"tokenizer {recipe.tokenizer}, fingerprint {recipe.tokenizer_fingerprint}, {recipe.vocab_size:,} ids, of "
            f"which {manifest.max_token_id} is the highest here",
            f"fingerprint {store.fingerprint}",
        )
    )


def format_window(store: TokenStore, tokenizer: Tokenizer, *, window: int, seq_len: int) -> str:
    """The text of a window, the `seq_len` tokens from place `window * seq_len` on, a line a
    document. Raises DataError for a window that the store does not have, and for another tokenizer
    than the store's."""
    recipe = store.manifest.recipe
    if tokenizer.fingerprint != recipe.tokenizer_fingerprint:
        raise DataError(
            f"--tokenizer {tokenizer.path} is not the one that {store.folder} was made with: {recipe.tokenizer}, "
            f"fingerprint {recipe.tokenizer_fingerprint}; name that one to see text"
        )
    windows = -(-store.tokens // seq_len)
    if not 0 <= window < windows:
        raise DataError(
            f"--window {window}: {store.folder} has windows 0 to {windows - 1} of {seq_len} tokens"
        )
    start = window * seq_len
    stop = min(start + seq_len, store.tokens)
    lines = [f"window {window}, tokens {start:,} to {stop - 1:,}:"]
    for begin, end in pairwise([start, *store.documents_between(start + 1, stop), stop]):
        lines.append(repr(tokenizer.decode(store.read(begin, end - begin).tolist())))
    return "\n".join(lines)


class ProgressLine:
    """A line that tells how far a store is, how fast it grows and when it will be whole: on a
    terminal one that is rewritten, elsewhere a new one every LINE_SECONDS."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stderr
        self._terminal = self._file.isatty()
        self._began = self._shown = time.monotonic()
        self._share_before: float | None = None

    def __call__(self, pace: Pace) -> None:
        """Show where a store is now, if it is time to."""
        now = time.monotonic()
        if self._share_before is None:
            self._share_before = pace.read or 0.0  # read by an earlier run, at another time
        if now - self._shown < (TERMINAL_SECONDS if self._terminal else LINE_SECONDS):
            return
        self._shown = now
        read = pace.read or 0.0
        done = read - self._share_before
        share = f"{read:6.1%}  " if read else ""
        eta = (
            f"{_clock((1 - read) * (now - self._began) / done)} left"
            if done
            else "time left unknown"
        )
        line = (
            f"{share}{pace.progress.documents:,} documents  {pace.progress.tokens:,} tokens  "
            f"{pace.tokens_per_s:,.0f} tokens/s  {eta}"
        )
        print(
            f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K" if self._terminal else line,
            end="" if self._terminal else "\n",
            file=self._file,
            flush=True,
        )

    def close(self) -> None:
        """Leave the line."""
        if self._terminal:
            print(file=self._file)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
