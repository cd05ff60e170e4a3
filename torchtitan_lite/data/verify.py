"""Verification of a token store: sizes, hashes, ids, and where documents begin."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from torchtitan_lite.errors import DataError
from torchtitan_lite.files import usable_cores

from .manifest import (
    MANIFEST_FILE,
    START_DTYPES,
    StoreManifest,
    documents_file,
    read_manifest,
    tokens_file,
    wrong_sizes,
)

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

    def check(number: int) -> list[str]:
        return list(_shard_problems(folder, manifest, hashes, number))

    with ThreadPoolExecutor(len(usable_cores())) as threads:
        found = threads.map(check, range(len(manifest.shards)))
        problems = [problem for of_shard in found for problem in of_shard]

    names = sorted(path.name for path in folder.iterdir())
    own = {MANIFEST_FILE, *hashes}
    return problems + [f"{name} is no file of the store" for name in names if name not in own]


def _shard_problems(
    folder: Path, manifest: StoreManifest, hashes: dict[str, str], number: int
) -> Iterator[str]:
    recipe = manifest.recipe
    if wrong := list(wrong_sizes(folder, recipe, number, manifest.shards[number])):
        yield from wrong  # places in such files mean nothing
        return

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

    sha256s = {path: digest, starts_path: hashlib.sha256(starts_data)}
    for file_path, sha256 in sha256s.items():
        expected, actual = hashes[file_path.name], sha256.hexdigest()
        if actual != expected:
            twins = [name for name, other in hashes.items() if other == actual]
            what = f"it has the contents of {twins[0]}" if twins else "its contents have changed"
            yield f"{file_path.name}: {what} (sha256 {actual[:12]}, not {expected[:12]})"
