"""Reports on a token store: what is broken, what it holds, and the text of a window."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.base.files import usable_cores

from .token_store import TokenStore, hash_file, read_manifest, wrong_sizes
from .tokenizer import Tokenizer


def verify_store(folder: Path) -> list[str]:
    """Read a whole store, one file on each core at a time, and list what is wrong with it.

    Raises DataError for a manifest that is missing or damaged."""
    manifest = read_manifest(folder)
    problems = wrong_sizes(folder, manifest)
    hashes = {
        name: sha256 for name, (_, sha256) in manifest.files().items() if name not in problems
    }
    with ThreadPoolExecutor(len(usable_cores())) as threads:
        found = threads.map(lambda name: hash_file(folder / name), hashes)
    for (name, sha256), actual in zip(hashes.items(), found, strict=True):
        if actual != sha256:
            problems[name] = f"{name}: its contents have changed"
    return list(problems.values())


def format_window(store: TokenStore, tokenizer: Tokenizer, *, window: int, seq_len: int) -> str:
    """Describe a store, and decode the `seq_len` tokens from place `window * seq_len` on, a line
    for each document.

    Raises DataError for a window that the store does not have, and for another tokenizer than the
    store's."""
    recipe = store.manifest.recipe
    if tokenizer.fingerprint != recipe.tokenizer_fingerprint:
        raise DataError(
            f"--tokenizer {tokenizer.path} is not the one that {store.folder} was made with: "
            f"{recipe.tokenizer}, fingerprint {recipe.tokenizer_fingerprint}; name that one to see "
            "text"
        )
    windows = -(-store.tokens // seq_len)
    if not 0 <= window < windows:
        raise DataError(
            f"--window {window}: {store.folder} has windows 0 to {windows - 1} of {seq_len} tokens"
        )

    # A document begins at each BOS: the ids of a text never contain one.
    start = window * seq_len
    ids = store.read(start, min(seq_len, store.tokens - start))
    begins = np.flatnonzero(ids[1:] == recipe.bos_id) + 1
    documents = [ids[begin:end] for begin, end in pairwise([0, *begins, len(ids)])]
    lines = [repr(tokenizer.decode(document.tolist())) for document in documents]
    counts = f"{store.tokens:,} tokens in {store.documents:,} documents of {recipe.source}"
    place = f"window {window}, tokens {start:,} to {start + len(ids) - 1:,}:"
    return "\n".join((f"{store.folder}: {counts}", place, *lines))
