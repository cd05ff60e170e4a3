"""Read the tensors of a checkpoint without running code from its files.

torch.distributed.checkpoint (DCP) unpickles its table of tensors, `.metadata`, and each entry that
is not a tensor, and a pickle can run any code. Here the table's unpickler accepts only the names in
NAMES, and creates inert records instead of objects. DCP's objects are then built from the checked
numbers in these records. Entries that are not tensors are rejected unread. torch loads the tensors
with `weights_only=True`.

To find damage, the table is first compared with its hash. To bound memory, every size in the table
is then compared with the sizes of the files. So memory is at most a multiple of the table's size.
The time to read a malicious table is not bounded, nor are time and memory to read a malicious file
of tensors.
"""

import hashlib
import io
import math
import pickle
import pickletools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from torchtitan_lite.base.collectives import on_all_ranks
from torchtitan_lite.base.files import ABSENT
from torchtitan_lite.base.jsonfile import read_regular

from .folders import find_problems
from .manifest import BrokenCheckpoint, FileEntry, TensorEntry, read_manifest, unreadable

R = TypeVar("R", bound="TableReader")

METADATA = ".metadata"
MAX_TABLE_BYTES = 1 << 30
"""Largest table that is read. It has 143 bytes per part of a tensor, so up to 7 million parts."""
MAX_DIMENSIONS = 64
MEMO_BY_NUMBER = {"PUT", "BINPUT", "LONG_BINPUT"}
"""Opcodes with a number that decides how many memo entries the unpickler allocates. pickle does not
write them with protocol 4 or later, the default since Python 3.8."""
_DTYPES = {name: each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}
NAMES = {
    "builtins.getattr",  # Python 3.11.0 to 3.11.3 pickle a member of an enum as a call of it
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",  # Python 3.13
    "torch.Size",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.serialization._get_layout",
}
"""All names in DCP's pickled tables, except data types."""


class _Record:
    """An inert stand-in for an object in a pickled table: its arguments and fields. Fields that
    objects share are not copied."""

    args: tuple[Any, ...]
    fields: Any

    def __new__(cls, *args: Any) -> "_Record":
        record = super().__new__(cls)
        record.args = args
        return record

    def __setstate__(self, fields: Any) -> None:
        self.fields = fields


class _TableUnpickler(pickle.Unpickler):
    """Unpickler that creates a `_Record` for every object except data types."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the data type, or `_Record` for a name in NAMES. Raises BrokenCheckpoint."""
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if f"{module}.{name}" not in NAMES:
            raise BrokenCheckpoint(f"names {module}.{name}, which no table of tensors does")
        return _Record


def _unpickle(content: bytes) -> _Record:
    """Return the record of a pickled table. Raises any error."""
    # genops also rejects a length beyond the end, which the unpickler would allocate first.
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(content)}
    if by_number := opcodes & MEMO_BY_NUMBER:
        opcode = min(by_number)
        raise BrokenCheckpoint(f"holds the opcode {opcode}, which no table of tensors does")
    return _TableUnpickler(io.BytesIO(content)).load()


def read_table(
    folder: Path,
    sizes: Mapping[str, int],
    *,
    written: FileEntry | None = None,
    rename: Callable[[str], str | None] = lambda name: name,
) -> Metadata:
    """Return DCP's table of tensors in `folder`. `sizes` are the sizes of its files in bytes.

    If size and hash of the table as it was `written` are known, it must match them. `rename` maps
    the name of each entry to a new name, or to None to skip it unread. Raises BrokenCheckpoint."""
    try:
        content = read_regular(folder / METADATA, max_bytes=MAX_TABLE_BYTES)
        if written and written != FileEntry(len(content), hashlib.sha256(content).hexdigest()):
            raise BrokenCheckpoint("its contents have changed")

        table = _unpickle(content).fields
        places = {
            MetadataIndex(name, _size(key.fields["offset"])): _place(place, sizes)
            for key, place in table["storage_data"].items()
            if (name := rename(key.fields["fqn"])) is not None
        }
        tensors: dict[str, Any] = {}
        for entry, described in table["state_dict_metadata"].items():
            if (name := rename(entry)) in tensors:
                raise BrokenCheckpoint(f"has two tensors {name}")
            if name is not None:
                tensors[name] = _tensor(described)

        # The tensors must be no larger than the files.
        lengths = (
            math.prod(each.size) * each.properties.dtype.itemsize for each in tensors.values()
        )
        if (wanted := sum(lengths)) > (stored := sum(sizes.values())):
            raise BrokenCheckpoint(f"has tensors of {wanted} bytes, and the files have {stored}")
        return Metadata(tensors, storage_data=places)
    except ABSENT as error:
        raise BrokenCheckpoint(f"{METADATA}: {error.strerror}") from error
    except OSError as error:
        raise unreadable(folder / METADATA, error) from error
    except BrokenCheckpoint as broken:
        raise BrokenCheckpoint(f"{METADATA}: {broken}") from broken
    except Exception as error:  # damaged bytes can raise any
        reason = " ".join(str(error).split())  # on one line
        raise BrokenCheckpoint(
            f"{METADATA}: not a table of tensors: {type(error).__name__}: {reason}"
        ) from error


def _size(record: _Record) -> torch.Size:
    """Return a record's shape or offsets. Raises ValueError for anything else."""
    (lengths,) = record.args
    if len(lengths) > MAX_DIMENSIONS:
        raise ValueError(f"a tensor has {len(lengths)} dimensions")
    if not all(type(length) is int and 0 <= length < 2**63 for length in lengths):
        raise ValueError("the size of a tensor is not of whole numbers")
    return torch.Size(lengths)


def _place(record: _Record, sizes: Mapping[str, int]) -> _StorageInfo:
    """Return where a part of a tensor is stored. Raises BrokenCheckpoint unless it is within one of
    the files of these `sizes`, without DCP's transforms."""
    fields = record.fields
    name, offset, length = (fields[key] for key in ("relative_path", "offset", "length"))
    if name not in sizes:
        raise BrokenCheckpoint(f"reads {name}, which is not one of its files")
    valid = all(type(number) is int and number >= 0 for number in (offset, length))
    if not valid or offset + length > sizes[name]:
        raise BrokenCheckpoint(f"reads {length} bytes at {offset}, beyond the end of {name}")
    if fields.get("transform_descriptors"):
        raise BrokenCheckpoint(f"has {name} unpacked, and a save packs nothing")
    return _StorageInfo(name, offset, length)


def _tensor(record: _Record) -> TensorStorageMetadata:
    """Return a tensor's metadata. Raises ValueError unless its parts lie within it, begin at
    different offsets and together have as many elements."""
    shape = _size(record.fields["size"])
    parts = [
        ChunkStorageMetadata(_size(part.fields["offsets"]), _size(part.fields["sizes"]))
        for part in record.fields["chunks"]
    ]
    for part in parts:
        inside = len(part.offsets) == len(part.sizes) == len(shape) and all(
            offset + size <= length
            for offset, size, length in zip(part.offsets, part.sizes, shape, strict=True)
        )
        if not inside:
            where = f"a part of {list(part.sizes)} at {list(part.offsets)}"
            raise ValueError(f"{where} is not within a tensor of {list(shape)}")

    begins = [part.offsets for part in parts if math.prod(part.sizes)]
    if len(set(begins)) < len(begins):
        raise ValueError(f"{len(begins)} parts of a tensor begin at {len(set(begins))} places")
    stored, whole = sum(math.prod(part.sizes) for part in parts), math.prod(shape)
    if stored != whole:
        raise ValueError(f"it has {stored} of the {whole} elements of a tensor")
    dtype, *_ = record.fields["properties"].fields
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor has no data type of torch")
    return TensorStorageMetadata(TensorProperties(dtype), shape, parts)


class TableReader(FileSystemReader):
    """Reader of the tensors in a checked table, from the files in a folder."""

    def __init__(self, folder: Path, table: Metadata) -> None:
        super().__init__(folder)
        self._table = table
        self.tensors = {
            name: TensorEntry(str(each.properties.dtype).removeprefix("torch."), tuple(each.size))
            for name, each in table.state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's table."""
        return self._table

    def load(self, state: dict[str, Tensor], *, group: dist.ProcessGroup | None = None) -> None:
        """Read tensors into `state`. With a `group`, all its ranks must call this; without one,
        only this process reads. Raises BrokenCheckpoint."""
        try:
            options = {"process_group": group, "no_dist": group is None}
            dcp.load(state, storage_reader=self, planner=SafePlanner(), **options)
        except CheckpointException as error:
            raise BrokenCheckpoint(first_failure(error)) from error


class SafeReader(TableReader):
    """Reader of the checkpoint in a folder.

    The constructor raises BrokenCheckpoint unless the manifest and DCP's table are readable and
    agree. It does not check the other files; `broken_files` does."""

    def __init__(self, folder: Path) -> None:
        self.manifest = read_manifest(folder)
        files = self.manifest.files
        sizes = {name: entry.size for name, entry in files.items()}
        written = files.get(METADATA, FileEntry(0, ""))
        super().__init__(folder, read_table(folder, sizes, written=written))
        if differing := sorted(
            name for name, _ in self.tensors.items() ^ self.manifest.tensors.items()
        ):
            raise BrokenCheckpoint(f"{METADATA}: {differing[0]} is not as in the manifest")

    def read_whole(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return the named tensors (default: all), unsharded and on the CPU. Raises
        BrokenCheckpoint if one is missing or cannot be read."""
        tensors = {}
        for name in self.manifest.tensors if names is None else names:
            if name not in self.manifest.tensors:
                raise BrokenCheckpoint(f"has no tensor {name}")
            entry = self.manifest.tensors[name]
            tensors[name] = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
        self.load(tensors)
        return tensors


def open_on_all_ranks(open_reader: Callable[[], R]) -> R:
    """Call `open_reader` on each rank, and return this rank's result. Collective. A RunError on one
    rank is raised on all."""
    readers: list[R] = []  # not gathered, which would be slow for large tables
    on_all_ranks(lambda: readers.append(open_reader()))
    return readers[0]


class SafePlanner(DefaultLoadPlanner):
    """Planner that loads tensors and nothing else."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raise BrokenCheckpoint: an entry that is not a tensor would be unpickled."""
        raise BrokenCheckpoint(f"{read_item.dest_index.fqn} is not a tensor")


def first_failure(error: CheckpointException) -> str:
    """Return the error of the lowest rank that failed in DCP, on one line."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return f"rank {rank}: {type(cause).__name__}: {' '.join(str(cause).split())}"


def verify_checkpoint(path: Path, *, hashes: bool) -> list[str]:
    """Return the problems of the checkpoint at `path`, one line each. Check its files first and, if
    they have no problem, its table of tensors."""
    if problems := find_problems(path, hashes=hashes):
        return problems
    try:
        SafeReader(path)
    except BrokenCheckpoint as broken:
        return [str(broken)]
    return []
