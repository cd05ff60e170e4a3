"""The manifest of a checkpoint: what it holds, and the size and hash of every file, so that damage
is seen.

It is written last, and only a folder that has one is a checkpoint. Imports no torch.
"""

import hashlib
import json
import platform
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import tomli
from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)

from torchtitan_lite.errors import CheckpointError, StorageError
from torchtitan_lite.files import replace_file

FORMAT = 1
MANIFEST = "manifest.json"
SAVED_FILES = r"\.metadata|__\d+_\d+\.distcp|rank-\d{5}\.json"
"""What a save writes besides its manifest: DCP's table of tensors and its data, and the state of
each rank."""
TENSORS_SUFFIX = ".distcp"
"""Of the files that are large."""
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Ways of a file not to be there."""
BLOCK_BYTES = 1 << 20
MOST_JSON_BYTES = 16 << 20
"""Of a file of JSON: a manifest of 16,000 ranks has about a third of that. Parsed, it takes some 25
times as much."""

FileName = Annotated[str, StringConstraints(pattern=f"^(?:{SAVED_FILES})$")]
"""A name within the folder, which no path that leaves it is."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
HELD_OUT = " held out"
"""End of the keys of a run's data that count windows."""


def _check_data(data: dict[str, int | str]) -> dict[str, int | str]:
    for key, value in data.items():
        if key.endswith(HELD_OUT) and not (isinstance(value, int) and 0 <= value < 2**63):
            raise ValueError(f"{key} = {value!r} is no number of windows")
    return data


def _check_tables(config: str) -> str:
    if not all(isinstance(table, dict) for table in tomli.loads(config).values()):
        raise ValueError("has a key outside of a table")
    return config


class BrokenCheckpoint(CheckpointError):
    """A checkpoint that is damaged, or not one of ours. Its message is the reason alone, on one
    line."""


@dataclass(frozen=True)
class Progress:
    """How far a run is: what one that goes on from there needs besides tensors and random
    states."""

    step: Count
    samples: Count
    """Trained on by all ranks since step 1."""
    tokens: Count
    """Trained on by all ranks since step 1."""
    data: Annotated[dict[str, int | str], AfterValidator(_check_data)]
    """What decides which tokens a sample has, apart from its number."""
    skipped_steps: Count = 0
    """Steps without an update, because the loss or the gradient was not finite or spiked."""
    consecutive_skips: Count = 0
    """Those since the last step that had one."""
    loss_mean: float | None = None
    """Running mean of the losses, in nats; None until there is one."""

    def held_out(self, store: int) -> int:
        """Windows of a store, by its number from 1, that were held out for validation."""
        return int(self.data.get(f"store {store}{HELD_OUT}", 0))


NEW_RUN = Progress(step=0, samples=0, tokens=0, data={})


@dataclass(frozen=True)
class FileEntry:
    """A file's size in bytes and the sha256 of its contents, in hex."""

    size: Count
    sha256: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's dtype, as in "float32", and its global shape."""

    dtype: str
    shape: tuple[Count, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds, and what made it."""

    __pydantic_config__ = ConfigDict(
        strict=True, extra="forbid"
    )  # of what is read from disk, nested classes included

    save_id: str
    """The same for everything of one save, and never again."""
    progress: Progress
    world_size: Annotated[Count, Field(ge=1)]
    mesh: dict[str, int]
    """Degree of each dimension of the device mesh."""
    versions: dict[str, str]
    """Of torchtitan_lite, torch, torchao and python."""
    model: dict[str, Any]
    """The model's dimensions."""
    config: Annotated[str, AfterValidator(_check_tables)]
    """The resolved config, as TOML."""
    files: dict[FileName, FileEntry]
    """Every file of the checkpoint but this one, by its name within the folder."""
    tensors: dict[str, TensorEntry]

    @property
    def config_sha256(self) -> str:
        """What tells the config from any other."""
        return hashlib.sha256(self.config.encode()).hexdigest()


_READER = TypeAdapter(Manifest)


def installed_versions() -> dict[str, str]:
    """Versions for a manifest that is written now; this package has none where it is run from its
    folder."""
    versions = {
        "torch": version("torch"),
        "torchao": version("torchao"),
        "python": platform.python_version(),
    }
    with suppress(PackageNotFoundError):
        versions["torchtitan_lite"] = version("torchtitan_lite")
    return versions


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Put a manifest, with a hash of all its fields, into a checkpoint's folder. Raises OSError if
    the disk fails."""
    fields = {"format": FORMAT, "config_sha256": manifest.config_sha256, **asdict(manifest)}
    replace_file(folder / MANIFEST, json.dumps(fields | {"sha256": _hash(fields)}, indent=1))


def _hash(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def read_regular(path: Path, *, most: int) -> bytes:
    """The contents of a file. Raises BrokenCheckpoint for one of more than `most` bytes, and for a
    pipe or a device, which could be read for ever; OSError if it cannot be read."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise BrokenCheckpoint(f"{path.name} is not a regular file")
    if found.st_size > most:
        raise BrokenCheckpoint(
            f"{path.name} has {found.st_size} bytes, and such a file has {most} at most"
        )
    return path.read_bytes()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`. Raises BrokenCheckpoint for one that is missing,
    damaged, or of another format."""
    try:
        fields = json.loads(read_regular(folder / MANIFEST, most=MOST_JSON_BYTES))
        if not isinstance(fields, dict) or "format" not in fields:
            raise BrokenCheckpoint(f"{MANIFEST}: not a checkpoint's")
        if fields["format"] != FORMAT:
            raise BrokenCheckpoint(
                f"{MANIFEST}: its format is {fields['format']!r}, this version reads {FORMAT}"
            )
        if fields.pop("sha256", None) != _hash(fields):
            raise BrokenCheckpoint(f"{MANIFEST}: its contents have changed")
        own = {key: fields[key] for key in fields.keys() - {"format", "config_sha256"}}
        return _READER.validate_json(
            json.dumps(own)
        )  # from JSON, so that strictness lets a list be a tuple
    except ABSENT as error:
        raise BrokenCheckpoint(f"{MANIFEST}: {error.strerror}") from error
    except OSError as error:
        raise unreadable(folder / MANIFEST, error) from error
    except BrokenCheckpoint:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        reason = " ".join(
            f"{'.'.join(map(str, first['loc']))}: {first['msg']}".split()
        )  # a key may hold line breaks
        raise BrokenCheckpoint(f"{MANIFEST}: {reason}") from error
    except (ValueError, RecursionError) as error:  # also a number of too many digits
        raise BrokenCheckpoint(f"{MANIFEST}: not JSON: {error}") from error


def hash_file(path: Path) -> FileEntry:
    """Size and hash of a file, read in blocks. Raises OSError if it cannot be read."""
    digest, size, block = hashlib.sha256(), 0, memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
    return FileEntry(size, digest.hexdigest())


def broken_files(
    folder: Path, manifest: Manifest, *, hashes: bool, share: tuple[int, int] = (0, 1)
) -> list[str]:
    """What is wrong with the files of the checkpoint in `folder`, a line each.

    Sizes are those of all files. Contents are read of the small files alone, or with `hashes` of
    all; of every `share[1]`-th, largest first, from number `share[0]` on, so that as many ranks
    read every file once. Other files in the folder are not looked at. Raises StorageError if the
    disk fails."""
    rank, world = share
    problems = []
    by_size = sorted(manifest.files.items(), key=lambda file: -file[1].size)
    for number, (name, entry) in enumerate(by_size):
        path = folder / name
        try:
            found = path.stat()
            size = found.st_size
            wanted = hashes or not name.endswith(TENSORS_SUFFIX)
            if not stat.S_ISREG(found.st_mode):
                problems.append(f"{name} is not a regular file")
            elif size != entry.size:
                problems.append(f"{name} has {size} bytes, not {entry.size}")
            elif wanted and number % world == rank and hash_file(path) != entry:
                problems.append(f"{name}: its contents have changed")
        except ABSENT as error:
            problems.append(f"{name}: {error.strerror}")
        except OSError as error:
            raise unreadable(path, error) from error
    return problems


def unreadable(path: Path, error: OSError) -> StorageError:
    """What a disk that fails is told as: it does not say that the checkpoint is broken."""
    return StorageError(
        f"[checkpoint] {path} cannot be read: {error.strerror}; mend the disk or its permissions."
    )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Puts the path in front of the reason why a checkpoint is broken."""
    try:
        yield
    except BrokenCheckpoint as broken:
        raise BrokenCheckpoint(f"{path} is broken: {broken}") from broken
