"""Reading the tensors of a checkpoint without running anything that is in its files.

torch.distributed.checkpoint (DCP) unpickles twice: its table of tensors, `.metadata`, and each
entry that is not a tensor. Here the first makes nothing but what a table of plain tensors is made
of, and the second does not take place. Tensors themselves torch loads with `weights_only=True`.

The manifest and the table get no memory beyond a multiple of their own sizes: the table is compared
with its hash first, which finds damage, and what a table made on purpose could ask for is checked
against the sizes of the files. Not bounded are the time that such a table takes, and the memory and
time that a file of tensors made on purpose asks for.
"""

import hashlib
import io
import math
import pickle
import pickletools
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from torchtitan_lite.checkpoint.manifest import (
    BrokenCheckpoint,
    FileEntry,
    Manifest,
    TensorEntry,
    read_manifest,
    read_regular,
)

METADATA = ".metadata"
MOST_TABLE_BYTES = 1 << 30
"""Of `.metadata`: 143 bytes for each part of a tensor that a rank wrote, so 7 million parts."""
MOST_DIMENSIONS = 64
MOST_FIELDS = 16
"""Of an object in the table."""
MEMO_BY_NUMBER = {"PUT", "BINPUT", "LONG_BINPUT"}
"""Opcodes that have the unpickler allocate as many entries as the number they give. Since its
protocol 4, the default since Python 3.8, pickle writes MEMOIZE in their place."""


class _Sealed(type):
    """The kind of a stand-in: a pickle can set attributes of what it has found, and this lets it
    not."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise BrokenCheckpoint(
            f"{METADATA} sets {name} of {cls.__name__}, which no table of tensors does"
        )


def _stand_in(made: type, make: Callable[..., Any] | None = None) -> type:
    """What a pickle gets in place of a class or function: it makes what `make` returns, else an
    instance of `made`."""

    def set_state(self: Any, state: dict[str, Any]) -> None:
        # A pickle may name one large dictionary as the state of many objects, which each copy it.
        if not isinstance(state, dict) or len(state) > MOST_FIELDS:
            raise BrokenCheckpoint(
                f"{METADATA} has a {made.__name__} of other fields than a table's"
            )
        self.__dict__.update(state)
        object.__setattr__(self, "__class__", made)

    def new(cls: type, *args: Any) -> Any:
        if make is not None:
            return make(*args)
        return made(*args) if args else object.__new__(unset)

    takes_fields = is_dataclass(made) and not hasattr(made, "__setstate__")
    unset = type(made.__name__, (made,), {"__setstate__": set_state}) if takes_fields else made
    return _Sealed(made.__name__, (), {"__new__": new})


def _make_size(sizes: tuple[int, ...]) -> torch.Size:
    if len(sizes) > MOST_DIMENSIONS:
        raise BrokenCheckpoint(f"{METADATA} has a tensor of {len(sizes)} dimensions")
    return torch.Size(sizes)


class _AnyMemoryFormat:
    """Compares equal to every memory format, which reading does not use. A real member of the enum
    is shared by the process, and a pickle could modify it."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True


_DTYPE_NAMES = {
    each: str(each).removeprefix("torch.")
    for each in vars(torch).values()
    if isinstance(each, torch.dtype)
}
_MEMORY_FORMAT = _stand_in(_AnyMemoryFormat, lambda *args: _AnyMemoryFormat())
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_CLASSES = (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)
ALLOWED: dict[tuple[str, str], Any] = {
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    **{(each.__module__, each.__qualname__): _stand_in(each) for each in _CLASSES},
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _MEMORY_FORMAT,
    (
        "builtins",
        "getattr",
    ): _MEMORY_FORMAT,  # by which Python 3.11.0 to 3.11.3 pickle a member of an enum
    ("torch", "Size"): _stand_in(torch.Size, _make_size),
    ("torch.serialization", "_get_layout"): _stand_in(
        torch.layout, {"torch.strided": torch.strided}.__getitem__
    ),
    # Of the folder that it was written in, which does not matter; its module has another name in
    # Python 3.13.
    ("pathlib", "PosixPath"): _stand_in(PurePosixPath, lambda *parts: PurePosixPath()),
    ("pathlib._local", "PosixPath"): _stand_in(PurePosixPath, lambda *parts: PurePosixPath()),
}
"""What DCP's pickled table of plain tensors names, by module and name, and what is made of it
here."""


class _TableUnpickler(pickle.Unpickler):
    """Finds what is allowed and refuses the rest, so that what a pickle calls can only be one of
    those."""

    def find_class(self, module: str, name: str) -> Any:
        """The class or function of a name in the pickle. Raises BrokenCheckpoint for one that is
        not allowed."""
        if (module, name) not in ALLOWED:
            raise BrokenCheckpoint(
                f"{METADATA} names {module}.{name}, which no table of tensors does"
            )
        return ALLOWED[module, name]


def _read_table(
    folder: Path, files: Mapping[str, FileEntry] | None = None
) -> tuple[Metadata, dict[str, TensorEntry]]:
    """DCP's table and its tensors. With the `files` of a manifest, check the table's hash and that
    it refers only to them."""
    try:
        content = read_regular(folder / METADATA, most=MOST_TABLE_BYTES)
        if files is not None and FileEntry(
            len(content), hashlib.sha256(content).hexdigest()
        ) != files.get(METADATA):
            raise BrokenCheckpoint(f"{METADATA}: its contents have changed")
        # Finds lengths beyond the end too, which the unpickler would allocate first.
        if (
            by_number := {opcode.name for opcode, _, _ in pickletools.genops(content)}
            & MEMO_BY_NUMBER
        ):
            raise BrokenCheckpoint(
                f"{METADATA} holds the opcode {min(by_number)}, which no table of tensors does"
            )
        table = _TableUnpickler(io.BytesIO(content)).load()
        for info in table.storage_data.values():
            _check_place(info, files)
        return table, {name: _entry(tensor) for name, tensor in table.state_dict_metadata.items()}
    except OSError as error:
        raise BrokenCheckpoint(f"{METADATA}: {error.strerror}") from error
    except BrokenCheckpoint:
        raise
    except Exception as error:  # there is none that damaged bytes could not raise
        reason = " ".join(str(error).split())  # on one line
        raise BrokenCheckpoint(
            f"{METADATA}: not a table of tensors: {type(error).__name__}: {reason}"
        ) from error


def _entry(tensor: TensorStorageMetadata) -> TensorEntry:
    """What the table says of a tensor. Its parts lie within it, begin at different places and have
    all its elements."""
    for size in (
        tensor.size,
        *(each for chunk in tensor.chunks for each in (chunk.sizes, chunk.offsets)),
    ):
        if not isinstance(size, torch.Size) or any(length < 0 for length in size):
            raise ValueError(f"{size!r} is no size of a tensor")
    for chunk in tensor.chunks:
        shape, sizes, offsets = list(tensor.size), list(chunk.sizes), list(chunk.offsets)
        ends = [offset + length for offset, length in zip(offsets, sizes, strict=True)]
        if len(ends) != len(shape) or any(
            end > length for end, length in zip(ends, shape, strict=True)
        ):
            raise ValueError(f"a part of {sizes} at {offsets} is not within a tensor of {shape}")
    begins = [chunk.offsets for chunk in tensor.chunks if math.prod(chunk.sizes)]
    if len(set(begins)) < len(begins):
        raise ValueError(f"{len(begins)} parts of a tensor begin at {len(set(begins))} places")
    stored, whole = sum(math.prod(chunk.sizes) for chunk in tensor.chunks), math.prod(tensor.size)
    if stored != whole:
        raise ValueError(f"it has {stored} of the {whole} elements of a tensor")
    return TensorEntry(_DTYPE_NAMES[tensor.properties.dtype], tuple(tensor.size))


def tensor_entries(folder: Path) -> dict[str, TensorEntry]:
    """Dtype and global shape of each tensor that DCP saved in `folder`. Raises BrokenCheckpoint if
    its table is damaged or holds anything else than tensors."""
    return _read_table(folder)[1]


class SafeReader(FileSystemReader):
    """Reads the checkpoint in a folder, as `storage_reader` of dcp.load.

    Its constructor raises BrokenCheckpoint unless the manifest and DCP's table can be read and
    agree on the tensors, and all of these are in files of the manifest, within their sizes. It does
    not look into the files, nor at their sizes on disk: see broken_files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.manifest = read_manifest(folder)
        self._table, tensors = _read_table(folder, self.manifest.files)
        if tensors != self.manifest.tensors:
            names = sorted(name for name, _ in tensors.items() ^ self.manifest.tensors.items())
            raise BrokenCheckpoint(f"{METADATA}: {names[0]} is not as in the manifest")
        _check_sizes(self.manifest)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's table, read once."""
        return self._table

    def read_whole(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Some of the tensors, whole and on the CPU, read by this process alone. Raises
        BrokenCheckpoint if one is not there or cannot be read."""
        tensors = {}
        for name in names:
            if name not in self.manifest.tensors:
                raise BrokenCheckpoint(f"has no tensor {name}")
            entry = self.manifest.tensors[name]
            tensors[name] = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(tensors, storage_reader=self, planner=SafePlanner(), no_dist=True)
        except CheckpointException as error:
            raise BrokenCheckpoint(load_failure(error)) from error
        return tensors


def _check_place(info: _StorageInfo, files: Mapping[str, FileEntry] | None) -> None:
    """Raise BrokenCheckpoint unless a part of a tensor lies, unpacked, within one of the files, if
    those are given."""
    name, place = info.relative_path, (info.offset, info.length)
    if files is None:
        return
    if name not in files:
        raise BrokenCheckpoint(f"{METADATA} reads {name}, which is not in the manifest")
    if not all(type(each) is int and each >= 0 for each in place) or sum(place) > files[name].size:
        raise BrokenCheckpoint(
            f"{METADATA} reads {info.length} bytes at {info.offset}, beyond the end of {name}"
        )
    if info.transform_descriptors:
        raise BrokenCheckpoint(f"{METADATA} has {name} unpacked, and a save packs nothing")


def _check_sizes(manifest: Manifest) -> None:
    """Raise BrokenCheckpoint if the tensors are larger than the files that hold them."""
    wanted = sum(
        math.prod(entry.shape) * _DTYPES[entry.dtype].itemsize
        for entry in manifest.tensors.values()
    )
    stored = sum(entry.size for entry in manifest.files.values())
    if wanted > stored:
        raise BrokenCheckpoint(
            f"{METADATA} has tensors of {wanted} bytes, and the files have {stored}"
        )


class SafePlanner(DefaultLoadPlanner):
    """Plans what a SafeReader reads: tensors, nothing else."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raises BrokenCheckpoint: an entry that is not a tensor would have to be unpickled."""
        raise BrokenCheckpoint(f"{read_item.dest_index.fqn} is not a tensor")


def load_failure(error: CheckpointException) -> str:
    """The reason of the first rank that failed in dcp.load, on one line."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return f"rank {rank}: {type(cause).__name__}: {' '.join(str(cause).split())}"


def read_tensors(folder: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Some tensors of the checkpoint in `folder`, or all, whole and on the CPU, read by this
    process alone. Raises BrokenCheckpoint."""
    reader = SafeReader(folder)
    return reader.read_whole(reader.manifest.tensors if names is None else names)
