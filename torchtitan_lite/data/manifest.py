"""The format of a token store on disk, and the manifest that describes its content.

A store is a folder of shards. `tokens-00000.bin`, `tokens-00001.bin`, ... hold one stream of token
ids: BOS, text, EOS of every document. `documents-00000.bin`, ... hold the places in their shard at
which documents begin. All numbers are little endian.

In format 3 a shard is a chunk of the source. In format 2, which is still read, it is 2^29 ids, cut
regardless of documents.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from torchtitan_lite.errors import DataError
from torchtitan_lite.files import replace_file

FORMAT = 3
START_DTYPES: dict[int, np.dtype] = {2: np.dtype("<u4"), 3: np.dtype("<i8")}
"""Type of the numbers in documents files, by format."""
MANIFEST_FILE = "manifest.json"
Count = Annotated[int, Field(ge=0, lt=2**63)]


class DamagedStoreError(DataError):
    """A store is broken, and not just of a format that this version does not read."""


@dataclass(frozen=True)
class StoreRecipe:
    """What a store is made from.

    `source_fingerprint` changes with the text, `tokenizer_fingerprint` with the ids. Names and the
    format do not take part in a comparison.
    """

    format: int = field(compare=False)
    source: str = field(compare=False)
    source_fingerprint: str
    tokenizer: str = field(compare=False)
    tokenizer_fingerprint: str
    vocab_size: Count
    bos_id: Count
    eos_id: Count
    dtype: Literal["<u2", "<u4"]
    shard_tokens: Count | None = field(default=None, compare=False)
    """Ids of each shard but the last one; only in format 2."""


@dataclass(frozen=True)
class Shard:
    """Sizes and sha256 of a shard's two files."""

    tokens: Count
    documents: Count
    tokens_sha256: str
    documents_sha256: str


@dataclass(frozen=True)
class StoreManifest:
    """Content of a store."""

    # Holds for nested classes too: values are read from disk.
    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    recipe: StoreRecipe
    tokens: Count
    documents: Count
    max_token_id: Count
    skipped_rows: Count
    fingerprint: str
    """Changes with any id of the stream, and with nothing else."""
    shards: tuple[Shard, ...]


_READER = TypeAdapter(StoreManifest)


def tokens_file(folder: Path, shard: int) -> Path:
    """Return the path of a shard's ids."""
    return folder / f"tokens-{shard:05d}.bin"


def documents_file(folder: Path, shard: int) -> Path:
    """Return the path of the places in a shard at which documents begin."""
    return folder / f"documents-{shard:05d}.bin"


def is_store(path: Path) -> bool:
    """Return whether a path is a folder with a manifest."""
    return (path / MANIFEST_FILE).is_file()


def merge_manifests(recipe: StoreRecipe, parts: Sequence[StoreManifest]) -> StoreManifest:
    """Describe the store whose shards are those of `parts`; its fingerprint is still empty."""
    return StoreManifest(
        recipe=recipe,
        tokens=sum(part.tokens for part in parts),
        documents=sum(part.documents for part in parts),
        max_token_id=max((part.max_token_id for part in parts), default=0),
        skipped_rows=sum(part.skipped_rows for part in parts),
        fingerprint="",
        shards=tuple(shard for part in parts for shard in part.shards),
    )


def write_manifest(path: Path, manifest: StoreManifest) -> None:
    """Write a manifest, with a hash of all its fields, in one step."""
    fields = asdict(manifest)
    replace_file(path, json.dumps(fields | {"sha256": _hash(fields)}, indent=1))


def _hash(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path, name: str = MANIFEST_FILE) -> StoreManifest:
    """Read the manifest of a store. Raises DataError if it is missing, damaged or of another
    format."""
    try:
        fields = json.loads((folder / name).read_text())
        known = fields["recipe"]["format"] in START_DTYPES
        if known and fields.pop("sha256") != _hash(fields):
            raise ValueError("its contents have changed")
        if known:
            manifest = _READER.validate_json(json.dumps(fields))  # strict JSON: lists are tuples
            _check_counts(manifest)
            return manifest
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise DamagedStoreError(f"token store {folder} is damaged: {name}: {reason}") from error
    raise DataError(
        f"token store {folder}: {name}: its format is {fields['recipe']['format']}, this version "
        f"reads {' and '.join(map(str, START_DTYPES))}; make the store again in another folder"
    )


def _check_counts(manifest: StoreManifest) -> None:
    """Raise ValueError if vocabulary, shard sizes and totals contradict each other."""
    recipe, shards = manifest.recipe, manifest.shards
    if recipe.vocab_size > 2 ** (8 * np.dtype(recipe.dtype).itemsize):
        raise ValueError(
            f"its tokenizer has {recipe.vocab_size} ids, more than type {recipe.dtype!r} holds"
        )
    tokens = sum(shard.tokens for shard in shards)
    documents = sum(shard.documents for shard in shards)
    if (tokens, documents) != (manifest.tokens, manifest.documents):
        raise ValueError(
            f"its shards have {tokens} tokens and {documents} documents, not {manifest.tokens} and "
            f"{manifest.documents}"
        )


def wrong_sizes(folder: Path, recipe: StoreRecipe, number: int, shard: Shard) -> Iterator[str]:
    """Yield what is wrong with the sizes of a shard's files."""
    expected = {
        tokens_file(folder, number): shard.tokens * np.dtype(recipe.dtype).itemsize,
        documents_file(folder, number): shard.documents * START_DTYPES[recipe.format].itemsize,
    }
    for path, size in expected.items():
        try:
            if (found := path.stat().st_size) != size:
                yield f"{path.name} has {found} bytes, not {size}"
        except OSError as error:
            yield f"{path.name}: {error.strerror}"
