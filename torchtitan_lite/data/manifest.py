"""What a token store is on disk, and the manifest that says what it holds.

A store is a folder. `tokens-00000.bin`, `tokens-00001.bin`, ... are its shards: one stream of ids, BOS, text, EOS of
every document, one after the other, cut every `shard_tokens` ids, wherever that is. `documents-00000.bin`, ... tell
where in its shard each document begins, uint32. All numbers are little endian.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_lite.errors import DataError

FORMAT = 2
MANIFEST_FILE = "manifest.json"
START_DTYPE = np.dtype("<u4")
"""Of the documents files: a shard has at most MAX_SHARD_TOKENS ids."""
MAX_SHARD_TOKENS = 2**32


@dataclass(frozen=True)
class Recipe:
    """What a store is made of. `source_fingerprint` changes with the text, `tokenizer_fingerprint` with the ids; two
    recipes are equal whatever the names."""

    format: int
    source: str = field(compare=False)
    source_fingerprint: str
    tokenizer: str = field(compare=False)
    tokenizer_fingerprint: str
    vocab_size: int
    bos_id: int
    eos_id: int
    dtype: str
    shard_tokens: int


@dataclass(frozen=True)
class Shard:
    """The sizes and sha256 of a shard's two files."""

    tokens: int
    documents: int
    tokens_sha256: str
    documents_sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a store holds. `fingerprint` changes with any of its ids, and with nothing else: shards are cut alike."""

    recipe: Recipe
    tokens: int
    documents: int
    max_token_id: int
    skipped_rows: int
    fingerprint: str
    shards: tuple[Shard, ...]


def tokens_file(folder: Path, shard: int) -> Path:
    """The ids of a shard."""
    return folder / f"tokens-{shard:05d}.bin"


def documents_file(folder: Path, shard: int) -> Path:
    """Where in a shard each of its documents begins."""
    return folder / f"documents-{shard:05d}.bin"


def is_store(path: Path) -> bool:
    """Whether a path is a folder that says of itself that it is a token store."""
    return (path / MANIFEST_FILE).is_file()


def fingerprint_of(recipe: Recipe, shards: tuple[Shard, ...]) -> str:
    """What tells a store's ids from any other's."""
    digest = hashlib.sha256(f"{recipe.tokenizer_fingerprint} {recipe.dtype}".encode())
    for shard in shards:
        digest.update(f" {shard.tokens} {shard.tokens_sha256}".encode())
    return digest.hexdigest()


def write_json(path: Path, fields: dict[str, Any]) -> None:
    """Put `fields` into a file that is old or new and whole, whenever the process or the machine dies."""
    draft = path.with_suffix(".tmp")
    with draft.open("w") as file:
        json.dump(fields, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Put a manifest, with a hash of all its fields, into a store's folder."""
    fields = asdict(manifest)
    write_json(folder / MANIFEST_FILE, fields | {"sha256": _hash(fields)})


def _hash(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the store in `folder`. Raises DataError for a folder without one, and for one that is damaged or
    of another version."""
    path = folder / MANIFEST_FILE
    try:
        fields = json.loads(path.read_text())
        recipe = fields["recipe"]
        if recipe["format"] != FORMAT:
            raise ValueError(f"its format is {recipe['format']}, this version reads {FORMAT}; make it anew")
        if recipe["dtype"] not in ("<u2", "<u4"):
            raise ValueError(f"its ids are of type {recipe['dtype']!r}, not '<u2' or '<u4'")
        if fields.pop("sha256") != _hash(fields):
            raise ValueError("its contents have changed")
        shards = tuple(Shard(**shard) for shard in fields["shards"])
        return replace(Manifest(**fields), recipe=Recipe(**recipe), shards=shards)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else error
        raise DataError(f"token store {folder} is damaged: {path.name}: {reason}") from error


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise DataError unless each file of a store has the size that its manifest says. Contents are not read."""
    if problems := wrong_sizes(folder, manifest.recipe, manifest.shards):
        raise DataError(f"token store {folder} is damaged: {problems[0]}; copy it again, or make it anew")


def wrong_sizes(folder: Path, recipe: Recipe, shards: tuple[Shard, ...]) -> list[str]:
    """What is wrong with the files of some shards, as far as sizes tell."""
    return [problem for i, shard in enumerate(shards) for problem in wrong_shard_sizes(folder, recipe, i, shard)]


def wrong_shard_sizes(folder: Path, recipe: Recipe, i: int, shard: Shard) -> list[str]:
    """What is wrong with the files of the `i`-th shard, as far as sizes tell."""
    expected = {
        tokens_file(folder, i): shard.tokens * np.dtype(recipe.dtype).itemsize,
        documents_file(folder, i): shard.documents * START_DTYPE.itemsize,
    }
    problems = []
    for path, size in expected.items():
        try:
            found = path.stat().st_size
        except OSError as error:
            problems.append(f"{path.name}: {error.strerror}")
            continue
        if found != size:
            problems.append(f"{path.name} has {found} bytes, not {size}")
    return problems
