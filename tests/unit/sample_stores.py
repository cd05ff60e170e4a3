"""Small token stores for tests: real ones, with given numbers as the ids of their documents, and
one without files."""

import hashlib
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from torchtitan_lite.base.jsonfile import write_hashed_json
from torchtitan_lite.data.store_writer import hash_ids
from torchtitan_lite.data.token_store import (
    MANIFEST_FILE,
    Shard,
    StoreManifest,
    StoreRecipe,
    TokenStore,
    tokens_file,
)

RECIPE = StoreRecipe(
    format=3,
    source="numbers",
    source_fingerprint="s",
    tokenizer="none",
    tokenizer_fingerprint="t",
    vocab_size=1000,
    bos_id=1,
    eos_id=2,
    dtype="<u2",
)


def write_store(
    folder: Path,
    documents: list[list[int]],
    recipe: StoreRecipe = RECIPE,
    *,
    shard_tokens: int = 10,
    sizes: list[int] | None = None,
) -> Path:
    """Write a store of `documents`, framed by BOS and EOS, in shards of these sizes."""
    folder.mkdir()
    ids = np.array(stream(documents), recipe.dtype)
    shards = []
    sizes = sizes or [shard_tokens] * -(-len(ids) // shard_tokens)
    for number, (begin, size) in enumerate(zip(accumulate(sizes, initial=0), sizes, strict=False)):
        part = ids[begin : begin + size]
        (folder / tokens_file(number)).write_bytes(part.tobytes())
        begun = int(np.count_nonzero(part == recipe.bos_id))
        shards.append(Shard(len(part), begun, hashlib.sha256(part.tobytes()).hexdigest()))

    manifest = StoreManifest(recipe, int(ids.max()), 0, "", tuple(shards))
    known = replace(manifest, recipe=replace(recipe, vocab_size=2**16))
    fingerprint = hash_ids(TokenStore(folder, known))
    fields = asdict(replace(manifest, fingerprint=fingerprint))
    write_hashed_json(folder / MANIFEST_FILE, fields)
    return folder


def stream(documents: list[list[int]]) -> list[int]:
    """Return the ids of a store of `documents`."""
    return [i for ids in documents for i in (RECIPE.bos_id, *ids, RECIPE.eos_id)]


SEQ_LEN = 4
"""Tokens of a window of a `FakeStore`."""


class FakeStore:
    """The ids from `first` on, enough for `windows` windows and a `rest`."""

    def __init__(self, windows: int, *, first: int = 0, rest: int = 0) -> None:
        self.folder, self.fingerprint = Path("stores/fake"), f"{first:<064}"
        self.first, self.tokens = first, windows * SEQ_LEN + 1 + rest
        self.manifest = f"3 documents, {self.tokens:,} tokens"  # as it is printed
        self.max_token_id = first + self.tokens - 1

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        return self.first + starts[:, None] + np.arange(length)


def windows_of(tokens: torch.Tensor) -> list[int]:
    """Return the number of each window; those of a store whose first id is f begin at f / 4."""
    return (tokens[:, 0] // SEQ_LEN).tolist()
