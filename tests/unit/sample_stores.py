"""Small token stores for tests, with given numbers as the ids of their documents."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from torchtitan_lite.data.token_store import (
    MANIFEST_FILE,
    START_DTYPES,
    Shard,
    StoreManifest,
    StoreRecipe,
    TokenStore,
    documents_file,
    tokens_file,
    write_manifest,
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
OLD_RECIPE = replace(RECIPE, format=2, shard_tokens=10)


def write_store(
    folder: Path,
    documents: list[list[int]],
    recipe: StoreRecipe = RECIPE,
    *,
    shard_tokens: int = 10,
    starts: list[int] | None = None,
) -> Path:
    """Write a store of `documents`, framed by BOS and EOS, in shards of `shard_tokens` ids.

    `starts` are the places of documents where they are not those of BOS.
    """
    folder.mkdir()
    ids = np.array(stream(documents), recipe.dtype)
    places = np.array(np.flatnonzero(ids == recipe.bos_id) if starts is None else starts)
    shards = []
    for number, begin in enumerate(range(0, len(ids), shard_tokens)):
        part = ids[begin : begin + shard_tokens]
        here = places[(places >= begin) & (places < begin + len(part))] - begin
        files = {
            folder / tokens_file(number): part.tobytes(),
            folder / documents_file(number): here.astype(START_DTYPES[recipe.format]).tobytes(),
        }
        for path, data in files.items():
            path.write_bytes(data)
        hashes = [hashlib.sha256(data).hexdigest() for data in files.values()]
        shards.append(Shard(len(part), len(here), *hashes))

    highest = int(ids.max())
    manifest = StoreManifest(recipe, len(ids), len(places), highest, 0, "", tuple(shards))
    known = replace(manifest, recipe=replace(recipe, vocab_size=2**16))
    fingerprint = TokenStore(folder, known).compute_fingerprint()
    write_manifest(folder / MANIFEST_FILE, replace(manifest, fingerprint=fingerprint))
    return folder


def stream(documents: list[list[int]]) -> list[int]:
    """Return the ids of a store of `documents`."""
    return [i for ids in documents for i in (RECIPE.bos_id, *ids, RECIPE.eos_id)]
