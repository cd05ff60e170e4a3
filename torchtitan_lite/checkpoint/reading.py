"""Read the tensors of a checkpoint without running code from its files.

torch.distributed.checkpoint (DCP) unpickles its table of tensors, `.metadata`, and each entry that
is not a tensor, and a pickle can run any code. Here the table's unpickler finds only NAMES, entries
that are not tensors are rejected unread, and torch loads the tensors with `weights_only=True`. Not
bounded are the time to read a malicious table, and time and memory to read malicious tensors.
"""

import hashlib
import io
import math
import pickle
import pickletools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan_lite.base.collectives import on_all_ranks
from torchtitan_lite.base.files import ABSENT, is_remote
from torchtitan_lite.base.jsonfile import read_regular

from .folders import find_problems
from .manifest import BrokenCheckpoint, FileEntry, TensorEntry, listed, read_manifest, unreadable

METADATA = ".metadata"
MAX_TABLE_BYTES = 1 << 30
"""Largest table that is read. It has 143 bytes per part of a tensor, so up to 7 million parts."""
MEMO_BY_NUMBER = {"PUT", "BINPUT", "LONG_BINPUT"}
"""Opcodes with a number that decides how many memo entries the unpickler allocates. pickle does not
write them with protocol 4 or later, the default since Python 3.8."""


class _Filled:
    """Base of DCP's classes in a table. An unpickled object gets the fields of its class only, and
    the class is not changed, nor called: it would copy arguments that many calls may share."""

    def __init__(self) -> None:
        pass

    def __setstate__(self: Any, fields: dict[str, Any]) -> None:
        if not fields.keys() <= self.__dataclass_fields__.keys():
            raise ValueError("an object has fields that its class has not")
        vars(self).update(fields)


def _size(lengths: tuple[Any, ...]) -> torch.Size:
    """Return a shape or an offset. Raises ValueError for anything else."""
    # Not copied before its length is known, because calls may share a long tuple.
    if len(lengths) > 64 or not all(type(each) is int and 0 <= each < 2**63 for each in lengths):
        raise ValueError("a size is not of at most 64 whole numbers")
    return torch.Size(lengths)


DTYPES = {name: each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}
DCP = "torch.distributed.checkpoint"
NAMES: dict[str, Any] = {
    **{
        f"{each.__module__}.{each.__name__}": type("", (_Filled, each), {})
        for each in (Metadata, MetadataIndex, StorageMeta, BytesStorageMetadata)
        + (ChunkStorageMetadata, TensorStorageMetadata, _StorageInfo)
    },
    **{f"torch.{name}": dtype for name, dtype in DTYPES.items()},
    f"{DCP}.metadata.TensorProperties": TensorProperties,
    f"{DCP}.metadata._MEM_FORMAT_ENCODING": lambda number: _MEM_FORMAT_ENCODING(number),
    "torch.Size": _size,
    # Python 3.11.0 to 3.11.3 pickle a member of an enum as a call of getattr.
    "builtins.getattr": lambda _, name: _MEM_FORMAT_ENCODING[name],
    # Nothing reads a tensor's layout, or the path at which the table was saved.
    "torch.serialization._get_layout": lambda _: None,
    "pathlib.PosixPath": lambda *_: None,
    "pathlib._local.PosixPath": lambda *_: None,  # Python 3.13
}
"""All names in DCP's pickled tables, and what the unpickler takes for each."""


class _TableUnpickler(pickle.Unpickler):
    """Unpickler that finds only NAMES."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what NAMES has for a name. Raises BrokenCheckpoint if it has nothing."""
        if (full := f"{module}.{name}") not in NAMES:
            raise BrokenCheckpoint(f"names {full}, which no table of tensors does")
        return NAMES[full]


def _unpickle(content: bytes) -> Any:
    """Return a pickled table. Raises any error."""
    # genops also rejects a length beyond the end, which the unpickler would allocate first.
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(content)}
    if by_number := opcodes & MEMO_BY_NUMBER:
        raise BrokenCheckpoint(f"holds the opcode {min(by_number)}, which no table of tensors does")
    return _TableUnpickler(io.BytesIO(content)).load()


def read_table(
    folder: Path,
    sizes: Mapping[str, int],
    *,
    written: FileEntry | None = None,
    rename: Callable[[str], str | None] = lambda name: name,
) -> Metadata:
    """Return DCP's table of tensors in `folder`, whose files have these `sizes` in bytes.

    `written`: what the table must be, if that is known. `rename` maps the name of each entry to a
    new name, or to None to skip it unread. Raises BrokenCheckpoint."""
    try:
        content = read_regular(folder / METADATA, max_bytes=MAX_TABLE_BYTES)
        if written and written != FileEntry(len(content), hashlib.sha256(content).hexdigest()):
            raise BrokenCheckpoint("its contents have changed")
        table = _unpickle(content)

        places: dict[MetadataIndex, _StorageInfo] = {}
        for index, place in table.storage_data.items():
            if (name := rename(index.fqn)) is not None:
                _check_place(index, place, sizes)
                places[MetadataIndex(name, index.offset)] = place
        tensors: dict[str, Any] = {}
        for entry, tensor in table.state_dict_metadata.items():
            if (name := rename(entry)) is None:
                continue
            if name in tensors:
                raise BrokenCheckpoint(f"has two tensors {name}")
            _check_tensor(name, tensor)
            tensors[name] = tensor

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


def _check_place(index: MetadataIndex, place: _StorageInfo, sizes: Mapping[str, int]) -> None:
    """Raise BrokenCheckpoint unless a part of a tensor is in a file, without DCP's transforms."""
    name, offset, length = place.relative_path, place.offset, place.length
    if name not in sizes:
        raise BrokenCheckpoint(f"reads {name}, which is not one of its files")
    valid = all(type(number) is int and number >= 0 for number in (offset, length))
    if not valid or offset + length > sizes[name]:
        raise BrokenCheckpoint(f"reads {length} bytes at {offset}, beyond the end of {name}")
    if place.transform_descriptors:
        raise BrokenCheckpoint(f"has {name} unpacked, and a save packs nothing")
    if type(index.offset) is not torch.Size:
        raise BrokenCheckpoint(f"has a part of {index.fqn} without an offset")


def _check_tensor(name: str, tensor: Any) -> None:
    """Raise BrokenCheckpoint unless an entry is a tensor, whose parts have as many elements."""
    if not isinstance(tensor, TensorStorageMetadata):  # DCP would unpickle it
        raise BrokenCheckpoint(f"has {name}, which is not a tensor")
    sizes = [tensor.size, *(part.sizes for part in tensor.chunks)]
    if not all(type(size) is torch.Size for size in sizes):
        raise BrokenCheckpoint(f"has {name} with a size of another type")
    whole, *parts = map(math.prod, sizes)
    if sum(parts) != whole:
        raise BrokenCheckpoint(f"has {sum(parts)} of the {whole} elements of {name}")


class TableReader(FileSystemReader):
    """Reader of the tensors in a checked table, from the files in a folder."""

    def __init__(self, folder: Path, table: Metadata) -> None:
        super().__init__(str(folder))
        if is_remote(folder):
            from torch.distributed.checkpoint._fsspec_filesystem import FileSystem

            self.fs: Any = FileSystem()
            self.path = self.fs.init_path(str(folder))
        self._table, tensors = table, dict[str, Any](table.state_dict_metadata)
        self.tensors = {
            name: TensorEntry(str(each.properties.dtype).removeprefix("torch."), tuple(each.size))
            for name, each in tensors.items()
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's table."""
        return self._table

    def load(self, state: dict[str, Tensor], *, group: dist.ProcessGroup | None = None) -> None:
        """Read tensors into `state`. With a `group`, all its ranks must call this; without one,
        only this process reads. Raises BrokenCheckpoint."""
        try:
            options = {"process_group": group, "no_dist": group is None}
            dcp.load(state, storage_reader=self, **options)
        except CheckpointException as error:
            raise BrokenCheckpoint(first_failure(error)) from error


class SafeReader(TableReader):
    """Reader of the checkpoint in a folder."""

    def __init__(self, folder: Path) -> None:
        """Raises BrokenCheckpoint unless the manifest and DCP's table are readable and agree."""
        self.manifest = read_manifest(folder)
        files = self.manifest.files
        sizes = {name: entry.size for name, entry in files.items()}
        written = files.get(METADATA, FileEntry(0, ""))
        super().__init__(folder, read_table(folder, sizes, written=written))
        if differing := self.tensors.items() ^ self.manifest.tensors.items():
            name = min(name for name, _ in differing)
            raise BrokenCheckpoint(f"{METADATA}: {name} is not as in the manifest")

    def read_whole(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return the named tensors (default: all), unsharded. Raises BrokenCheckpoint."""
        tensors = {}
        for name in self.tensors if names is None else names:
            entry = self.tensors[name]
            tensors[name] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        self.load(tensors)
        return tensors


def open_on_all_ranks(open_reader: Callable[[], TableReader]) -> TableReader:
    """Return the result of `open_reader` on this rank. A RunError on one is raised on all."""
    readers: list[TableReader] = []  # not gathered, which would be slow for large tables
    on_all_ranks(lambda: readers.append(open_reader()))
    return readers[0]


def first_failure(error: CheckpointException) -> str:
    """Return the error of the lowest rank that failed in DCP, on one line."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return f"rank {rank}: {type(cause).__name__}: {' '.join(str(cause).split())}"


def open_checkpoint(path: Path, *, hashes: bool) -> SafeReader:
    """Return the reader of a checkpoint after comparing the sizes of its files with the manifest,
    or with `hashes` every byte. Raises BrokenCheckpoint."""
    if problems := find_problems(path, hashes=hashes):
        raise BrokenCheckpoint(listed(problems))
    return SafeReader(path)
