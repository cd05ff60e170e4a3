"""The manifest of a checkpoint, and the checks that a folder and a run are as it says.

It is written last: a folder without one is not a checkpoint. Does not import torch.
"""

import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, TypeAdapter

from torchtitan_lite.base.errors import CheckpointError, StorageError
from torchtitan_lite.base.files import ABSENT, hash_file, is_remote, storage_fix
from torchtitan_lite.base.jsonfile import (
    Count,
    parse_toml,
    read_json_object,
    regular_size,
    validate_hashed_json,
    write_hashed_json,
)
from torchtitan_lite.base.paths import listed_sizes
from torchtitan_lite.base.progress import progress
from torchtitan_lite.config.keys import changes

FORMAT = 1
MANIFEST = "manifest.json"
STEP = re.compile(r"step-(\d{8})")
"""Name of a checkpoint's folder."""
TENSORS_SUFFIX = ".distcp"
"""Suffix of the large files, which contain the tensors."""
SAVED_FILES = rf"\.metadata|__\d+_\d+\{TENSORS_SUFFIX}|rank-\d{{5}}\.json"
"""Names of the other files: DCP's table of tensors, the tensors, and of 0.3 and earlier
the state of random generators, which nothing reads."""

Size = Annotated[Count, Field(ge=1)]
FileName = Annotated[str, StringConstraints(pattern=f"^(?:{SAVED_FILES})$")]
"""Name of a file in the folder; never a path that leaves it."""


def _check_tables(config: str) -> str:
    if not all(isinstance(table, dict) for table in parse_toml(config.encode()).values()):
        raise ValueError("has a key outside of a table")
    return config


class BrokenCheckpoint(CheckpointError):
    """A checkpoint is damaged, or is not one of this project. The message is one line."""


@dataclass(frozen=True)
class TrainingProgress:
    """Counters that a resumed run continues from."""

    step: Count
    samples: Count
    """Samples that all ranks have trained on since step 1."""
    tokens: Count
    """Tokens that all ranks have trained on since step 1."""
    data: dict[str, Annotated[int, Field(ge=0)] | str]
    """What decides which tokens sample N contains, such as the seed and the data's fingerprints."""
    skipped_steps: Count = 0
    """Steps without an update because the loss or the gradient was not finite or spiked."""
    consecutive_skips: Count = 0
    """Steps skipped since the last update."""
    loss_mean: float | None = None
    """Running mean of the losses in nats; None until there is one."""
    schedule_start: Literal[0] = 0
    """Earlier versions could begin the learning rate's schedule at a later step."""
    last_step: Count | None = None
    """What earlier versions wrote; nothing reads it."""

    def held_out(self, store: int) -> int:
        """Return how many windows of a store, numbered from 1, are held out for validation."""
        windows = self.data.get(f"store {store} held out", 0)
        return windows if isinstance(windows, int) and windows < 2**63 else 0


NEW_RUN = TrainingProgress(step=0, samples=0, tokens=0, data={})


@dataclass(frozen=True)
class FileEntry:
    """Size of a file in bytes, and SHA-256 of its contents in hex."""

    size: Count
    sha256: str


@dataclass(frozen=True)
class TensorEntry:
    """Data type of a tensor, such as "float32", and its global shape."""

    dtype: str
    shape: tuple[Count, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def installed_versions() -> dict[str, str]:
    """Return the versions to write into a manifest; torchtitan_lite may not be installed."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "torchao", "torchtitan_lite"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """The contents of a checkpoint, and the run that saved it."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # holds for nested ones too

    progress: TrainingProgress = NEW_RUN
    world_size: Size
    mesh: dict[str, Size] = field(default_factory=dict)
    """Size of each dimension of the device mesh."""
    versions: dict[str, str] = field(default_factory=installed_versions)
    """Versions of torchtitan_lite, torch, torchao and python."""
    model: dict[str, Any]
    """Dimensions of the model."""
    config: Annotated[str, AfterValidator(_check_tables)]
    """The resolved config as TOML."""
    files: dict[FileName, FileEntry] = field(default_factory=dict)
    """All files but the manifest."""
    tensors: dict[str, TensorEntry] = field(default_factory=dict)

    @property
    def tables(self) -> dict[str, Any]:
        """The tables of the config."""
        return parse_toml(self.config.encode())

    @property
    def has_weights_only(self) -> bool:
        """Whether it has no optimizer state."""
        return not any(name.startswith("optimizer.") for name in self.tensors)


_SCHEMA = TypeAdapter(CheckpointManifest)


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Write a manifest into the folder of its checkpoint. Raises OSError."""
    write_hashed_json(folder / MANIFEST, {"format": FORMAT, **asdict(manifest)})


def read_manifest(folder: Path) -> CheckpointManifest:
    """Return the manifest of the checkpoint in `folder`. Raises BrokenCheckpoint if it is missing,
    damaged, of another format or step than the folder's; StorageError if the disk fails."""
    path = folder / MANIFEST
    try:
        fields = read_json_object(path)
        if fields.get("format") != FORMAT:
            raise ValueError(f"its format is {fields.get('format')}, this version reads {FORMAT}")
        # Earlier versions have written a hash of the config and an id too.
        old = {"config_sha256", "save_id"}
        manifest = validate_hashed_json(fields, _SCHEMA, drop={"format", *old})
    except ABSENT as error:
        raise BrokenCheckpoint(f"{MANIFEST}: {error.strerror}") from error
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise BrokenCheckpoint(f"{MANIFEST}: {error}") from error
    named = STEP.fullmatch(folder.name)
    if named and int(named[1]) != manifest.progress.step:
        raise BrokenCheckpoint(f"{MANIFEST}: is of step {manifest.progress.step}")
    return manifest


def broken_files(
    folder: Path, files: Mapping[str, FileEntry], *, hashes: bool, share: tuple[int, int] = (0, 1)
) -> list[str]:
    """Return the problems of the `files` of a checkpoint, one line each: of the sizes of all, and
    the contents of the small ones, or with `hashes` of all. With a `share` (rank, world_size), each
    rank reads the contents of different files. Raises StorageError if the disk fails."""
    rank, world_size = share
    problems = []
    # Largest first, so that the shares of the callers are about equal.
    order = sorted(files, key=lambda name: -files[name].size)
    read = {name for name in order[rank::world_size] if hashes or not name.endswith(TENSORS_SUFFIX)}
    sizes = listed_sizes(folder) if is_remote(folder) else None
    total = sum(files[name].size for name in read)
    with progress(f"verifying {folder}", total, shown=rank == 0) as bar:
        for name in order:
            path, entry = folder / name, files[name]
            try:
                size = regular_size(path) if sizes is None else sizes[name]
                if size != entry.size:
                    problems.append(f"{name} has {size} bytes, not {entry.size}")
                elif name in read and hash_file(path, bar.update) != entry.sha256:
                    problems.append(f"{name}: its contents have changed")
            except ValueError as error:
                problems.append(f"{name} {error}")
            except KeyError:
                problems.append(f"{name}: it is missing")
            except ABSENT as error:
                problems.append(f"{name}: {error.strerror}")
            except OSError as error:
                raise unreadable(path, error) from error
    return problems


def unreadable(path: Path, error: OSError) -> StorageError:
    """Return the error for a file that the disk does not give."""
    return StorageError(
        f"[checkpoint] {path} cannot be read: {error.strerror}; {storage_fix(error)}."
    )


def check_model(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], *, path: Path, fix: str = ""
) -> None:
    """Raise CheckpointError, with the `fix`, unless the checkpoint's model has the dimensions of
    this run's model."""
    ignored = dict.fromkeys(("max_seq_len", "document_bos_id"))  # of the text, not of the weights
    if differing := changes({**saved, **ignored}, {**wanted, **ignored}):
        fix = fix or "Set [model] flavor, or these keys of it, and tokenizer_path to the saved ones"
        raise CheckpointError(
            f"[model] {path} is of another model: {'; '.join(differing)}. {fix}, or name another "
            "checkpoint or another [job] dump_folder."
        )


def check_tensors(
    saved: Mapping[str, TensorEntry], wanted: Mapping[str, TensorEntry], *, path: Path
) -> None:
    """Raise CheckpointError unless the checkpoint at `path` has the tensors of this run."""
    if differing := changes(saved, wanted, absent="missing", text=str):
        raise CheckpointError(
            f"[checkpoint] {path} does not fit this run, as {len(differing)} tensors differ: "
            f"{listed(differing)}. Set [model], [training] dtype and [optimizer] state_dtype to "
            "the saved run's, or for new moments [checkpoint] exclude_from_loading = "
            '["optimizer"]; or name another checkpoint or another [job] dump_folder.'
        )


def listed(differences: list[str]) -> str:
    """Join the first differences for a message, and count the others."""
    shown, others = differences[:8], len(differences[8:])
    return "; ".join([*shown, f"and {others} more"] if others else shown)
