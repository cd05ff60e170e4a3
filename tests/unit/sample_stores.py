"""Small token stores for tests, with numbers for ids: their documents are what is given."""

from pathlib import Path

import numpy as np

from torchtitan_lite.data.manifest import FORMAT, Recipe, write_manifest
from torchtitan_lite.data.rows import START
from torchtitan_lite.data.store_writer import Progress, StoreWriter

RECIPE = Recipe(
    format=FORMAT,
    source="numbers",
    source_fingerprint="s",
    tokenizer="none",
    tokenizer_fingerprint="t",
    vocab_size=1000,
    bos_id=1,
    eos_id=2,
    dtype="<u2",
    shard_tokens=10,
)


def write_store(folder: Path, documents: list[list[int]], recipe: Recipe = RECIPE) -> Path:
    """The folder of a store of `documents`, each framed by BOS and EOS here."""
    framed = [np.array([recipe.bos_id, *ids, recipe.eos_id], recipe.dtype) for ids in documents]
    folder.mkdir()
    with StoreWriter(folder, Progress(recipe)) as writer:
        writer.append(
            np.concatenate(framed),
            np.array([len(ids) for ids in framed]),
            skipped=0,
            position=START,
        )
        write_manifest(folder, writer.finish())
    return folder


def stream(documents: list[list[int]]) -> list[int]:
    """The ids of a store of `documents`."""
    return [i for ids in documents for i in (RECIPE.bos_id, *ids, RECIPE.eos_id)]
