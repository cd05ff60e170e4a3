"""Read the tensors of a checkpoint without running code from its files.

torch.distributed.checkpoint (DCP) unpickles its table of tensors, `.metadata`, and each entry that
is not a tensor. Here the table is read by an unpickler that builds nothing but the parts of a table
of plain tensors, and other entries are refused unread. torch loads the tensors themselves with
`weights_only=True`.

Memory is bounded by a multiple of the table's size: the table is compared with its hash first,
which finds damage; then everything that a malicious table could ask for is compared with the sizes
of the files. Not bounded are the time to read a malicious table, and the time and memory to read a
malicious file of tensors.
"""

import hashlib
import io
import math
import pickle
import pickletools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem

from torchtitan_lite.documents import read_regular

from .manifest import (
    BrokenCheckpoint,
    CheckpointManifest,
    FileEntry,
    TensorEntry,
    read_manifest,
)

METADATA = ".metadata"
MAX_TABLE_BYTES = 1 << 30
"""Largest table that is read: 143 bytes for each part of a tensor, so 7 million parts."""
MAX_DIMENSIONS = 64
MAX_FIELDS = 16
"""Most fields of an object in the table."""
MEMO_BY_NUMBER = {"PUT", "BINPUT", "LONG_BINPUT"}
"""Opcodes that make the unpickler allocate as many memo entries as the number that they contain.
pickle has not written them since protocol 4, the default since Python 3.8."""


class _Sealed(type):
    """Metaclass of the stand-ins: a pickle may try to set attributes of what it names."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise BrokenCheckpoint(f"sets {name} of {cls.__name__}, which no table of tensors does")


def _stand_in(made: type, make: Callable[..., Any] | None = None) -> type:
    """Return the class that a pickle gets instead of `made`. A call of it returns what `make`
    returns or, without `make`, an instance of `made`."""

    def set_state(self: Any, state: dict[str, Any]) -> None:
        # One large dictionary may be the state of many objects, and each of them copies it.
        if not isinstance(state, dict) or len(state) > MAX_FIELDS:
            raise BrokenCheckpoint(f"has a {made.__name__} of other fields than a table's")
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
    if len(sizes) > MAX_DIMENSIONS:
        raise BrokenCheckpoint(f"has a tensor of {len(sizes)} dimensions")
    return torch.Size(sizes)


class _AnyMemoryFormat:
    """Equal to every memory format; reading uses none. Members of the real enum are shared by the
    process, and a pickle could modify them."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True


_DTYPES = {
    str(each).removeprefix("torch."): each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype)
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_CLASSES = (
    Metadata,
    _StorageInfo,
    dcp_metadata.ChunkStorageMetadata,
    dcp_metadata.MetadataIndex,
    dcp_metadata.StorageMeta,
    dcp_metadata.TensorProperties,
    dcp_metadata.TensorStorageMetadata,
)
_MEMORY_FORMAT = _stand_in(_AnyMemoryFormat, lambda *args: _AnyMemoryFormat())
_LAYOUT = _stand_in(torch.layout, {"torch.strided": torch.strided}.__getitem__)
# The folder in which the table was written, which is not used.
_PATH = _stand_in(PurePosixPath, lambda *parts: PurePosixPath())
ALLOWED: dict[tuple[str, str], Any] = {
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    **{(each.__module__, each.__qualname__): _stand_in(each) for each in _CLASSES},
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _MEMORY_FORMAT,
    # Python 3.11.0 to 3.11.3 pickle a member of an enum as a call of getattr.
    ("builtins", "getattr"): _MEMORY_FORMAT,
    ("torch", "Size"): _stand_in(torch.Size, _make_size),
    ("torch.serialization", "_get_layout"): _LAYOUT,
    ("pathlib", "PosixPath"): _PATH,
    ("pathlib._local", "PosixPath"): _PATH,  # Python 3.13
}
"""Everything that DCP's pickled table of plain tensors names, by module and name, and what the
unpickler uses instead."""


class _TableUnpickler(pickle.Unpickler):
    """Unpickler that knows the names in ALLOWED, so that a pickle can call nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name in the pickle. Raises BrokenCheckpoint for other names."""
        if (module, name) not in ALLOWED:
            raise BrokenCheckpoint(f"names {module}.{name}, which no table of tensors does")
        return ALLOWED[module, name]


def _read_table(folder: Path, manifest: CheckpointManifest) -> Metadata:
    """Return DCP's table of the tensors in `manifest`. Raises BrokenCheckpoint."""
    try:
        content = read_regular(folder / METADATA, max_bytes=MAX_TABLE_BYTES)
        found = FileEntry(len(content), hashlib.sha256(content).hexdigest())
        if found != manifest.files.get(METADATA):
            raise BrokenCheckpoint("its contents have changed")

        # genops also finds lengths past the end, which the unpickler would allocate first.
        opcodes = {opcode.name for opcode, _, _ in pickletools.genops(content)}
        if by_number := opcodes & MEMO_BY_NUMBER:
            opcode = min(by_number)
            raise BrokenCheckpoint(f"holds the opcode {opcode}, which no table of tensors does")

        table = _TableUnpickler(io.BytesIO(content)).load()
        for info in table.storage_data.values():
            _check_location(info, manifest)

        # The tensors must be those of the manifest, and no larger than the files.
        tensors = {name: _entry(tensor) for name, tensor in table.state_dict_metadata.items()}
        if differing := sorted(name for name, _ in tensors.items() ^ manifest.tensors.items()):
            raise BrokenCheckpoint(f"{differing[0]} is not as in the manifest")
        sizes = (math.prod(each.shape) * _DTYPES[each.dtype].itemsize for each in tensors.values())
        stored = sum(entry.size for entry in manifest.files.values())
        if (wanted := sum(sizes)) > stored:
            raise BrokenCheckpoint(f"has tensors of {wanted} bytes, and the files have {stored}")
        return table
    except OSError as error:
        raise BrokenCheckpoint(f"{METADATA}: {error.strerror}") from error
    except BrokenCheckpoint as broken:
        raise BrokenCheckpoint(f"{METADATA}: {broken}") from broken
    except Exception as error:  # damaged bytes can raise any
        reason = " ".join(str(error).split())  # on one line
        raise BrokenCheckpoint(
            f"{METADATA}: not a table of tensors: {type(error).__name__}: {reason}"
        ) from error


def _check_location(info: _StorageInfo, manifest: CheckpointManifest) -> None:
    """Raise BrokenCheckpoint unless a part of a tensor lies, not packed, within one file."""
    name, location = info.relative_path, (info.offset, info.length)
    if name not in manifest.files:
        raise BrokenCheckpoint(f"reads {name}, which is not in the manifest")
    valid = all(type(number) is int and number >= 0 for number in location)
    if not valid or sum(location) > manifest.files[name].size:
        raise BrokenCheckpoint(
            f"reads {info.length} bytes at {info.offset}, beyond the end of {name}"
        )
    if info.transform_descriptors:
        raise BrokenCheckpoint(f"has {name} unpacked, and a save packs nothing")


def _entry(tensor: dcp_metadata.TensorStorageMetadata) -> TensorEntry:
    """Return data type and shape of a tensor in the table. Raises ValueError unless its parts lie
    within it, begin at different places and have all its elements."""
    chunks, shape = tensor.chunks, tensor.size
    for size in (shape, *(each for chunk in chunks for each in (chunk.sizes, chunk.offsets))):
        if not isinstance(size, torch.Size) or any(length < 0 for length in size):
            raise ValueError(f"{size!r} is no size of a tensor")

    for chunk in chunks:
        sizes, offsets = list(chunk.sizes), list(chunk.offsets)
        ends = [offset + length for offset, length in zip(offsets, sizes, strict=True)]
        if len(ends) != len(shape) or any(
            end > bound for end, bound in zip(ends, shape, strict=True)
        ):
            part = f"a part of {sizes} at {offsets}"
            raise ValueError(f"{part} is not within a tensor of {list(shape)}")

    begins = [chunk.offsets for chunk in chunks if math.prod(chunk.sizes)]
    if len(set(begins)) < len(begins):
        raise ValueError(f"{len(begins)} parts of a tensor begin at {len(set(begins))} places")
    stored, whole = sum(math.prod(chunk.sizes) for chunk in chunks), math.prod(shape)
    if stored != whole:
        raise ValueError(f"it has {stored} of the {whole} elements of a tensor")
    return TensorEntry(_DTYPE_NAMES[tensor.properties.dtype], tuple(shape))


class SafeReader(FileSystemReader):
    """Reader of the checkpoint in a folder.

    The constructor raises BrokenCheckpoint unless the manifest and DCP's table can be read and
    agree. It does not look at the other files: see `broken_files`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.manifest = read_manifest(folder)
        self._table = _read_table(folder, self.manifest)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's table, which the constructor has read."""
        return self._table

    def load(self, state: dict[str, Tensor], *, group: dist.ProcessGroup | None = None) -> None:
        """Read tensors into `state`, together with all ranks of `group`; without a group, in this
        process alone. Raises BrokenCheckpoint."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                options = {"process_group": group, "no_dist": group is None}
                dcp.load(state, storage_reader=self, planner=SafePlanner(), **options)
        except CheckpointException as error:
            raise BrokenCheckpoint(first_failure(error)) from error

    def read_whole(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return tensors by name, all if no names are given, whole and on the CPU. Raises
        BrokenCheckpoint if one is missing or cannot be read."""
        tensors = {}
        for name in self.manifest.tensors if names is None else names:
            if name not in self.manifest.tensors:
                raise BrokenCheckpoint(f"has no tensor {name}")
            entry = self.manifest.tensors[name]
            tensors[name] = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
        self.load(tensors)
        return tensors


class SafePlanner(DefaultLoadPlanner):
    """Planner that loads tensors and nothing else."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raise BrokenCheckpoint: an entry that is not a tensor would be unpickled."""
        raise BrokenCheckpoint(f"{read_item.dest_index.fqn} is not a tensor")


def first_failure(error: CheckpointException) -> str:
    """Return the cause on the first rank that failed in DCP, on one line."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return f"rank {rank}: {type(cause).__name__}: {' '.join(str(cause).split())}"
