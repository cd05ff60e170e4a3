"""Measurements of the data path, each as a ratio to a named baseline within one run."""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from torchtitan_lite.data.dataloader import Corpus
from torchtitan_lite.data.manifest import (
    FORMAT,
    START_DTYPE,
    Manifest,
    Recipe,
    Shard,
    documents_file,
    fingerprint_of,
    tokens_file,
    write_manifest,
)
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.data.permutation import Permutation
from torchtitan_lite.data.prepare import make_store
from torchtitan_lite.data.sources import Source
from torchtitan_lite.data.token_store import TokenStore
from torchtitan_lite.data.tokenizer import Tokenizer

ROUNDS = 5
"""Of each pair of measurements, in turns; the medians count."""


@dataclass(frozen=True)
class Comparison:
    """How fast something of ours is, and a baseline, in the same unit."""

    what: str
    unit: str
    ours: float
    baseline: str
    theirs: float

    def __str__(self) -> str:
        """The figures, in a line."""
        return (
            f"{self.what}: {self.ours / 1e6:,.1f} million {self.unit}; {self.baseline}: {self.theirs / 1e6:,.1f} "
            f"million; ratio {self.ours / self.theirs:.2f}"
        )


def synthetic_store(
    folder: Path, *, shard_sizes: list[int], documents: list[int], sparse: bool
) -> Path:
    """The folder of a new store without meaning: of random ids, or of zeros that take no room on
    the disk."""
    folder.mkdir()
    dtype, rng = np.dtype("<u2"), np.random.default_rng(0)
    for i, (tokens, starts) in enumerate(zip(shard_sizes, documents, strict=True)):
        if sparse:
            for path, size in (
                (tokens_file(folder, i), 2 * tokens),
                (documents_file(folder, i), 4 * starts),
            ):
                with path.open("wb") as file:
                    file.truncate(size)
        else:
            rng.integers(0, 2**15, tokens, dtype).tofile(tokens_file(folder, i))
            np.linspace(0, tokens - 1, starts).astype(START_DTYPE).tofile(documents_file(folder, i))
    recipe = Recipe(FORMAT, "synthetic", "", "none", "", 2**15, 1, 2, dtype.str, shard_sizes[0])
    shards = tuple(
        Shard(tokens, count, "", "") for tokens, count in zip(shard_sizes, documents, strict=True)
    )
    manifest = Manifest(
        recipe,
        sum(shard_sizes),
        sum(documents),
        2**15 - 1,
        0,
        fingerprint_of(recipe, shards),
        shards,
    )
    write_manifest(folder, manifest)
    return folder


def compare_windows(folder: Path, *, seq_len: int, count: int) -> Iterator[Comparison]:
    """Random windows of a store in page cache, against numpy slicing the same ids out of one memory
    map."""
    store = TokenStore(folder)
    flat = folder.with_suffix(".flat")
    store.read(0, store.tokens).tofile(flat)
    tokens = np.asarray(np.memmap(flat, store.dtype, "r"))
    int(tokens.max())  # into the page cache
    batch_size = 8
    corpus = Corpus(
        {"store": store},
        Mixture((1,)),
        seq_len=seq_len,
        vocab_size=store.vocab_size,
        seed=0,
        held_out=[0],
        trained=1,
    )
    starts = np.random.default_rng(0).integers(0, store.tokens - seq_len, count)

    def slicing() -> None:
        for some in starts.reshape(-1, batch_size):
            np.stack([tokens[start : start + seq_len + 1] for start in some])

    def reading() -> None:
        for some in starts.reshape(-1, batch_size):
            store.windows(some, seq_len + 1)

    def loading() -> None:
        for samples in np.arange(count).reshape(-1, batch_size):
            corpus.training_batch(samples)

    for what, ours in (
        ("windows of a store", reading),
        ("batches, as int64 tensors in a random order", loading),
    ):
        fast, slow = _paired(ours, slicing)
        total = count * seq_len
        yield Comparison(
            what, f"tokens/s ({seq_len} a window)", total / fast, "numpy slices", total / slow
        )


def compare_permutation(*, n: int, count: int) -> Comparison:
    """Indices of a keyed bijection, against numpy shuffling a list as long as what is asked for."""
    permutation, indices, rng = (
        Permutation(n, key="bench"),
        np.arange(count),
        np.random.default_rng(0),
    )
    fast, slow = _paired(lambda: permutation(indices), lambda: rng.permutation(count))
    return Comparison(
        f"permutation of {n:,}",
        "indices/s",
        count / fast,
        f"numpy shuffle of {count:,}",
        count / slow,
    )


def compare_tokenizing(
    folder: Path, source: Source, tokenizer: Tokenizer, *, cores: int
) -> Comparison:
    """A store made by `cores` processes, start-up and disk included, against the tokenizer alone in
    this process, times the cores. `source` must fit in memory."""
    texts = list(source.documents())
    tokens = sum(len(ids) for ids in tokenizer.encode_documents(texts))
    stores = iter(range(ROUNDS))
    fast, slow = _paired(
        lambda: make_store(folder / str(next(stores)), source, tokenizer, workers=cores),
        lambda: tokenizer.encode_documents(texts),
    )
    return Comparison(
        f"a store made by {cores} processes",
        "tokens/s",
        tokens / fast,
        f"{cores} x the tokenizer",
        cores * tokens / slow,
    )


@dataclass(frozen=True)
class Opening:
    """What it costs a new process to open a store."""

    seconds: float
    mib: float
    """Growth of the resident memory."""


def measure_opening(folder: Path) -> Opening:
    """What it costs a process of its own to open the store in `folder` and read a window of it."""
    code = f"from torchtitan_lite.data import measure; measure.print_opening({str(folder)!r})"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return Opening(**json.loads(result.stdout))


def print_opening(folder: str) -> None:
    """Print an Opening of this process as JSON."""
    before, began = _resident_mib(), time.perf_counter()
    store = TokenStore(Path(folder))
    store.windows(np.array([0, store.tokens - 1]), 1)
    seconds = time.perf_counter() - began
    print(json.dumps(asdict(Opening(seconds, _resident_mib() - before))))


def _resident_mib() -> float:
    """Memory of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _paired(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float]:
    """Median seconds of each, measured in turns."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for run, measured in zip((ours, theirs), seconds, strict=True):
            began = time.perf_counter()
            run()
            measured.append(time.perf_counter() - began)
    return float(np.median(seconds[0])), float(np.median(seconds[1]))


@dataclass(frozen=True)
class Randomness:
    """How a sequence of orders of 0 .. n-1 differs from uniformly random ones, in standard errors:
    0 is expected, and beyond 4 means that it is not random. The largest over all lags or bits
    counts."""

    lag_correlation: float
    low_bits: float
    """Changes of the lowest bits from one element to the next."""
    ascents: float
    """Elements that are followed by a larger one, of which runs are made."""
    epochs: float
    """Correlation of one order with the next."""

    def __str__(self) -> str:
        """The figures, in a line."""
        return ", ".join(
            f"{name.replace('_', ' ')} {value:+.1f}" for name, value in asdict(self).items()
        )


def measure_randomness(orders: np.ndarray) -> Randomness:
    """The randomness of `orders` [K, n], each a permutation of 0 .. n-1; of lags and bits 1 to
    3."""
    count, n = orders.shape
    centred = (orders - (n - 1) / 2) / orders[0].std()
    error = 1 / np.sqrt(count * n)
    lags = [(centred[:, :-lag] * centred[:, lag:]).mean() / error for lag in (1, 2, 3)]
    flips = [
        ((((orders[:, :-1] ^ orders[:, 1:]) >> bit) & 1).mean() - 0.5) / (0.5 * error)
        for bit in (0, 1, 2)
    ]
    ascents = ((orders[:, :-1] < orders[:, 1:]).mean() - 0.5) / (np.sqrt(1 / 12) * error)
    epochs = (centred[:-1] * centred[1:]).mean() * np.sqrt((count - 1) * n)
    return Randomness(max(lags, key=abs), max(flips, key=abs), ascents, epochs)


def lcg_orders(n: int, *, multiplier: int, count: int) -> np.ndarray:
    """`count` times the order of a linear congruential generator of period n, a power of two,
    [count, n]: what a known loader replaced its lists of pointers by."""
    order = np.empty(n, np.int64)
    value = 0
    for i in range(n):
        order[i] = value
        value = (multiplier * value + 1) % n
    return np.tile(order, (count, 1))
