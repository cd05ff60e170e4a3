"""Small checkpoints for tests, saved by DCP in one process, and ways to damage them."""

import os
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter

from torchtitan_lite.base.files import hash_file
from torchtitan_lite.checkpoint.folders import step_folder
from torchtitan_lite.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    FileEntry,
    TensorEntry,
    TrainingProgress,
    read_manifest,
    write_manifest,
)

CONFIG = """[optimizer]
lr = 0.0008

[float8]
enable_float8_linear = true
recipe_name = "tensorwise"
"""


def small_tensors(step: int) -> dict[str, Tensor]:
    """Tensors whose values depend on the step, of the kinds that a run saves."""
    return {
        "model.w": torch.arange(12.0).reshape(3, 4) + step,
        "model.b": torch.full((5,), step, dtype=torch.bfloat16),
        "optimizer.w.step": torch.tensor(float(step)),
    }


def save(path: Path, state: dict[str, Any]) -> None:
    """Have DCP save into a folder, without a manifest."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, storage_writer=FileSystemWriter(path), no_dist=True)


def file_entry(path: Path) -> FileEntry:
    """What a manifest says of a file."""
    return FileEntry(path.stat().st_size, hash_file(path))


def add_manifest(path: Path, tensors: dict[str, Tensor], step: int, **fields: Any) -> None:
    """Write the manifest of a saved folder."""
    files = (file for file in sorted(path.iterdir()) if file.name != MANIFEST)
    values: dict[str, Any] = {
        "progress": TrainingProgress(step, 8 * step, 512 * step, data={"seed": 0}),
        "world_size": 2,
        "mesh": {"dp_shard": 2, "tp": 1},
        "versions": {"torch": torch.__version__},
        "model": {"dim": 4, "rope_scaling": None},
        "config": CONFIG,
        "files": {file.name: file_entry(file) for file in files},
        "tensors": {
            name: TensorEntry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in tensors.items()
        },
    }
    write_manifest(path, CheckpointManifest(**values | fields))


def write_checkpoint(
    folder: Path, step: int, tensors: dict[str, Tensor] | None = None, **fields: Any
) -> Path:
    """The checkpoint of a step in `folder`, complete."""
    path = step_folder(folder, step)
    tensors = small_tensors(step) if tensors is None else tensors
    save(path, dict(tensors))
    add_manifest(path, tensors, step, **fields)
    return path


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names of tensors that only one has, or that differ in type, shape or any value."""
    return sorted(one.keys() ^ other.keys()) + [
        name
        for name in one.keys() & other.keys()
        if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])
    ]


def flip_bit(path: Path, at: int = -200) -> None:
    """Change one bit of the byte `at`."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def edit_manifest(path: Path, **fields: Any) -> None:
    """Change fields of a manifest, as one who can write into the folder could."""
    write_manifest(path, replace(read_manifest(path), **fields))


def renew_manifest(path: Path) -> None:
    """Make the manifest agree with files that a test changed."""
    edit_manifest(path, files={name: file_entry(path / name) for name in read_manifest(path).files})


def edit_table(path: Path, edit: Callable[[Any], object]) -> None:
    """Change DCP's table, and the manifest with it if there is one."""
    table = pickle.loads((path / ".metadata").read_bytes())
    edit(table)
    (path / ".metadata").write_bytes(pickle.dumps(table))
    if (path / MANIFEST).exists():
        renew_manifest(path)


class Payload:
    """Makes a folder when it is unpickled: the code of an attacker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)
