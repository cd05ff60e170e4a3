"""What a token store is on disk, and the manifest that says what it holds.

A store is a folder. `tokens-00000.bin`, `tokens-00001.bin`, ... are its shards: one stream of ids,
BOS, text, EOS of every document, one after the other, cut every `shard_tokens` ids, wherever that
is. `documents-00000.bin`, ... tell where in its shard each document begins, uint32. All numbers are
little endian.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from torchtitan_lite.errors import DataError
from torchtitan_lite.files import replace_file

FORMAT = 2
MANIFEST_FILE = "manifest.json"
START_DTYPE = np.dtype("<u4")
"""Of the documents files: a shard has at most MAX_SHARD_TOKENS ids."""
MAX_SHARD_TOKENS = 2**32
Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class Recipe:
    """What a store is made of. `source_fingerprint` changes with the text, `tokenizer_fingerprint`
    with the ids; two recipes are equal whatever the names."""

    format: int
    source: str = field(compare=False)
    source_fingerprint: str
    tokenizer: str = field(compare=False)
    tokenizer_fingerprint: str
    vocab_size: Count
    bos_id: Count
    eos_id: Count
    dtype: Literal["<u2", "<u4"]
    shard_tokens: Annotated[int, Field(ge=1, le=MAX_SHARD_TOKENS)]


@dataclass(frozen=True)
class Shard:
    """The sizes and sha256 of a shard's two files."""

    tokens: Count
    documents: Count
    tokens_sha256: str
    documents_sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a store holds. `fingerprint` changes with any of its ids, and with nothing else: shards
    are cut alike."""

    __pydantic_config__ = ConfigDict(
        strict=True, extra="forbid"
    )  # of what is read from disk, nested classes included

    recipe: Recipe
    tokens: Count
    documents: Count
    max_token_id: Count
    skipped_rows: Count
    fingerprint: str
    shards: tuple[Shard, ...]


_READER = TypeAdapter(Manifest)


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


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Put a manifest, with a hash of all its fields, into a store's folder."""
    fields = asdict(manifest)
    replace_file(folder / MANIFEST_FILE, json.dumps(fields | {"sha256": _hash(fields)}, indent=1))


def _hash(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the store in `folder`. Raises DataError for a folder without one, and for one
    that is damaged or of another version."""
    path = folder / MANIFEST_FILE
    try:
        fields = json.loads(path.read_text())
        recipe = fields["recipe"]
        if recipe["format"] != FORMAT:
            raise ValueError(
                f"its format is {recipe['format']}, this version reads {FORMAT}; make it anew"
            )
        if fields.pop("sha256") != _hash(fields):
            raise ValueError("its contents have changed")
        manifest = _READER.validate_json(
            json.dumps(fields)
        )  # from JSON, so that strictness lets a list be a tuple
        _check_counts(manifest)
        return manifest
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise DataError(f"token store {folder} is damaged: {path.name}: {reason}") from error


def _check_counts(manifest: Manifest) -> None:
    """Raise ValueError if vocabulary, shard sizes and totals are inconsistent; offsets are computed
    from them."""
    recipe, sizes = manifest.recipe, [shard.tokens for shard in manifest.shards]
    if recipe.vocab_size > 2 ** (8 * np.dtype(recipe.dtype).itemsize):
        raise ValueError(
            f"its tokenizer has {recipe.vocab_size} ids, more than type {recipe.dtype!r} holds"
        )
    if (
        any(size != recipe.shard_tokens for size in sizes[:-1])
        or max(sizes, default=0) > recipe.shard_tokens
    ):
        raise ValueError(
            f"its shards do not have {recipe.shard_tokens} tokens each, the last one at most as many"
        )
    tokens, documents = sum(sizes), sum(shard.documents for shard in manifest.shards)
    if (tokens, documents) != (manifest.tokens, manifest.documents):
        raise ValueError(
            f"its shards have {tokens} tokens and {documents} documents, not {manifest.tokens} and {manifest.documents}"
        )


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise DataError unless each file of a store has the size that its manifest says. Contents are
    not read."""
    if problems := wrong_sizes(folder, manifest.recipe, manifest.shards):
        raise DataError(
            f"token store {folder} is damaged: {problems[0]}; copy it again, or make it anew"
        )


def wrong_sizes(folder: Path, recipe: Recipe, shards: tuple[Shard, ...]) -> list[str]:
    """What is wrong with the files of some shards, as far as sizes tell."""
    return [
        problem
        for i, shard in enumerate(shards)
        for problem in wrong_shard_sizes(folder, recipe, i, shard)
    ]


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
