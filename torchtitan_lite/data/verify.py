"""What is wrong with a token store, read whole: sizes, hashes, ids, and where documents begin."""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from torchtitan_lite.data.manifest import (
    MANIFEST_FILE,
    START_DTYPE,
    Manifest,
    documents_file,
    read_manifest,
    tokens_file,
    wrong_shard_sizes,
)
from torchtitan_lite.errors import DataError

CHUNK_TOKENS = 2**22


def verify_store(folder: Path) -> list[str]:
    """All that is wrong with the store in `folder`, a line each; nothing, if it is as it was made.
    Shards are read in chunks, one on each core at a time."""
    try:
        manifest = read_manifest(folder)
    except DataError as error:
        return [str(error)]
    hashes = _hashes(folder, manifest)
    problems: list[str] = []
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        shards = range(len(manifest.shards))
        for found in threads.map(
            lambda shard: list(_shard_problems(folder, manifest, shard, hashes)), shards
        ):
            problems += found
    own = {MANIFEST_FILE, *hashes}
    problems += [
        f"{path.name} is no file of the store"
        for path in sorted(folder.iterdir())
        if path.name not in own
    ]
    return problems


def _hashes(folder: Path, manifest: Manifest) -> dict[str, str]:
    """The sha256 that each file should have, by its name."""
    hashes = {}
    for i, shard in enumerate(manifest.shards):
        hashes[tokens_file(folder, i).name] = shard.tokens_sha256
        hashes[documents_file(folder, i).name] = shard.documents_sha256
    return hashes


def _shard_problems(
    folder: Path, manifest: Manifest, shard: int, hashes: dict[str, str]
) -> Iterator[str]:
    recipe = manifest.recipe
    if wrong := wrong_shard_sizes(folder, recipe, shard, manifest.shards[shard]):
        yield from wrong  # places in such files mean nothing
        return
    path, starts_path = tokens_file(folder, shard), documents_file(folder, shard)
    digest, place = hashlib.sha256(), 0
    starts_data = starts_path.read_bytes()
    starts = np.frombuffer(starts_data, START_DTYPE)
    with path.open("rb") as file:
        while data := file.read(CHUNK_TOKENS * np.dtype(recipe.dtype).itemsize):
            digest.update(data)
            ids = np.frombuffer(data, recipe.dtype)
            if (highest := int(ids.max())) > manifest.max_token_id:
                at = place + int(ids.argmax())
                yield f"{path.name}: id {highest} at place {at} is above the highest one, {manifest.max_token_id}"
            here = starts[(starts >= place) & (starts < place + len(ids))]
            if (lost := np.flatnonzero(ids[here - place] != recipe.bos_id)).size:
                yield f"{path.name}: no BOS at place {here[lost[0]]}, where {starts_path.name} has a document begin"
            place += len(ids)
    yield from _wrong_hash(path, digest.hexdigest(), hashes)
    yield from _wrong_hash(starts_path, hashlib.sha256(starts_data).hexdigest(), hashes)


def _wrong_hash(path: Path, found: str, hashes: dict[str, str]) -> Iterator[str]:
    if found != hashes[path.name]:
        twins = [name for name, sha256 in hashes.items() if sha256 == found]
        contents = f"it has the contents of {twins[0]}" if twins else "its contents have changed"
        yield f"{path.name}: {contents} (sha256 {found[:12]}, not {hashes[path.name][:12]})"
