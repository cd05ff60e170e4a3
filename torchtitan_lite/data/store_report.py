"""Reports on a token store: what is broken, what it holds, and the text of a window."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from torchtitan_lite.errors import DataError
from torchtitan_lite.files import usable_cores

from .token_store import (
    MANIFEST_FILE,
    START_DTYPES,
    StoreManifest,
    TokenStore,
    documents_file,
    read_manifest,
    tokens_file,
    wrong_sizes,
)
from .tokenizer import Tokenizer

CHUNK_TOKENS = 2**22


def verify_store(folder: Path) -> list[str]:
    """Read a whole store, one shard on each core at a time, and list what is wrong with it."""
    try:
        manifest = read_manifest(folder)
    except DataError as error:
        return [str(error)]
    hashes = {}
    for number, shard in enumerate(manifest.shards):
        hashes[tokens_file(folder, number).name] = shard.tokens_sha256
        hashes[documents_file(folder, number).name] = shard.documents_sha256

    check = partial(_shard_problems, folder, manifest, hashes)
    with ThreadPoolExecutor(len(usable_cores())) as threads:
        found = threads.map(lambda number: list(check(number)), range(len(manifest.shards)))
        problems = [problem for of_shard in found for problem in of_shard]

    names = sorted(path.name for path in folder.iterdir())
    own = {MANIFEST_FILE, *hashes}
    return problems + [f"{name} is no file of the store" for name in names if name not in own]


def _shard_problems(
    folder: Path, manifest: StoreManifest, hashes: dict[str, str], number: int
) -> Iterator[str]:
    if wrong := wrong_sizes(folder, manifest, number):
        yield from wrong  # places in such files mean nothing
        return

    recipe = manifest.recipe
    path, starts_path = tokens_file(folder, number), documents_file(folder, number)
    digest, place = hashlib.sha256(), 0
    starts_data = starts_path.read_bytes()
    starts = np.frombuffer(starts_data, START_DTYPES[recipe.format]).astype(np.int64)
    with path.open("rb") as file:
        while data := file.read(CHUNK_TOKENS * np.dtype(recipe.dtype).itemsize):
            digest.update(data)
            ids = np.frombuffer(data, recipe.dtype)
            if (highest := int(ids.max())) > manifest.max_token_id:
                yield (
                    f"{path.name}: id {highest} at place {place + int(ids.argmax())} is above the "
                    f"highest one, {manifest.max_token_id}"
                )
            here = starts[(starts >= place) & (starts < place + len(ids))]
            if (lost := np.flatnonzero(ids[here - place] != recipe.bos_id)).size:
                yield (
                    f"{path.name}: no BOS at place {here[lost[0]]}, where {starts_path.name} has "
                    "a document begin"
                )
            place += len(ids)

    for name, sha256 in ((path.name, digest), (starts_path.name, hashlib.sha256(starts_data))):
        expected, actual = hashes[name], sha256.hexdigest()
        if actual != expected:
            twins = [twin for twin, other in hashes.items() if other == actual]
            what = f"it has the contents of {twins[0]}" if twins else "its contents have changed"
            yield f"{name}: {what} (sha256 {actual[:12]}, not {expected[:12]})"


def format_store(store: TokenStore) -> str:
    """Describe the content of a store and what it was made from."""
    manifest, recipe = store.manifest, store.manifest.recipe
    per_document = store.tokens / store.documents
    largest = max(shard.tokens for shard in manifest.shards)
    return (
        f"{store.folder}: made from {recipe.source}\n"
        f"{store.tokens:,} tokens in {store.documents:,} documents, {per_document:,.1f} each; "
        f"{manifest.skipped_rows:,} bad rows were skipped\n"
        f"{len(manifest.shards):,} shards of up to {largest:,} tokens of {store.dtype.itemsize} "
        "bytes\n"
        f"tokenizer {recipe.tokenizer}, fingerprint {recipe.tokenizer_fingerprint}, "
        f"{recipe.vocab_size:,} ids; the highest here is {manifest.max_token_id}\n"
        f"fingerprint {store.fingerprint}"
    )


def format_window(store: TokenStore, tokenizer: Tokenizer, *, window: int, seq_len: int) -> str:
    """Decode the `seq_len` tokens from place `window * seq_len` on, a line for each document.

    Raises DataError for a window that the store does not have, and for another tokenizer than the
    store's.
    """
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
    return "\n".join((f"window {window}, tokens {start:,} to {start + len(ids) - 1:,}:", *lines))
