"""Reading checkpoints: tensors come back bit by bit, and nothing in the files is run."""

import importlib
import io
import os
import pickle
import random
import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import sample_checkpoints as samples
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sample_checkpoints import differing, edit_manifest, edit_table, save, write_checkpoint
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    TensorProperties,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchtitan_lite.checkpoint import reading
from torchtitan_lite.checkpoint.manifest import BrokenCheckpoint, FileEntry, TensorEntry
from torchtitan_lite.checkpoint.reading import SafeReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SHARD = "__0_0.distcp"
NOT_A_TABLE = "not a table of tensors: "


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "code was run"


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path, 10)


def refuses(checkpoint, reason):
    """Check that the checkpoint cannot be opened, with the whole reason as a pattern."""
    with pytest.raises(BrokenCheckpoint, match=rf"^\.metadata: {reason}$"):
        SafeReader(checkpoint)


def set_table(checkpoint, content):
    """Replace the table, as one who can write into the folder could."""
    (checkpoint / ".metadata").write_bytes(content)
    samples.renew_manifest(checkpoint)


# ----- SafeReader -----


def test_tensors_come_back(checkpoint):
    expected, reader = samples.small_tensors(10), SafeReader(checkpoint)
    assert differing(reader.read_whole(), expected) == []
    for name in ("model.b", "model.w"):
        assert differing(reader.read_whole([name]), {name: expected[name]}) == []
    assert reader.manifest.tensors == {
        "model.w": TensorEntry("float32", (3, 4)),
        "model.b": TensorEntry("bfloat16", (5,)),
        "optimizer.w.step": TensorEntry("float32", ()),
    }
    os.truncate(checkpoint / SHARD, 100)
    with pytest.raises(BrokenCheckpoint, match=r"^rank 0: \w+: .*\Z"):  # on one line
        reader.read_whole()


def test_sharded_tensors_come_back(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    whole = {"model.w": torch.randn(4, 6), "model.b": torch.arange(3)}
    sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    dcp.save(sharded, storage_writer=FileSystemWriter(tmp_path))
    samples.add_manifest(tmp_path, whole, 10)
    assert differing(SafeReader(tmp_path).read_whole(), whole) == []
    target = {name: torch.zeros_like(tensor) for name, tensor in sharded.items()}
    dcp.load(target, storage_reader=SafeReader(tmp_path))
    loaded = {name: tensor.full_tensor() for name, tensor in target.items()}
    assert differing(loaded, whole) == []


def test_the_layout_of_the_writer_does_not_matter(tmp_path):
    """A tensor in two parts, as two ranks save it."""
    halves = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(6.0, 12.0).reshape(2, 3)}
    save(tmp_path, halves)

    def join(table):
        whole, _ = (table.state_dict_metadata.pop(name) for name in halves)
        whole.size = torch.Size((4, 3))
        whole.chunks += [ChunkStorageMetadata(torch.Size((2, 0)), torch.Size((2, 3)))]
        table.state_dict_metadata["w"] = whole
        offsets = {"a": (0, 0), "b": (2, 0)}
        places = table.storage_data.items()
        table.storage_data = {replace(at, fqn="w", offset=offsets[at.fqn]): x for at, x in places}

    samples.add_manifest(tmp_path, {"w": torch.empty(4, 3)}, 10)
    edit_table(tmp_path, join)
    whole = {"w": torch.arange(12.0).reshape(4, 3)}
    assert differing(SafeReader(tmp_path).read_whole(), whole) == []


# ----- SafeReader: tables that run code -----


def test_a_table_that_runs_code_is_refused(checkpoint, marker):
    payload = pickle.dumps(samples.Payload(marker))
    pickle.loads(payload)
    marker.rmdir()  # it works
    names = r"names posix\.mkdir, which no table of tensors does"
    edit_table(checkpoint, lambda table: setattr(table, "planner_data", [samples.Payload(marker)]))
    refuses(checkpoint, names)
    set_table(checkpoint, payload)
    refuses(checkpoint, names)
    assert not marker.exists()
    set_table(checkpoint, b"cbuiltins\ngetattr\n(ctorch\nSize\nS'__base__'\ntR.")
    refuses(checkpoint, f"{NOT_A_TABLE}KeyError: '__base__'")  # getattr finds memory formats


@pytest.mark.parametrize("name", reading.NAMES)
def test_a_table_changes_no_class_and_no_function_of_this_process(checkpoint, name):
    """BUILD sets attributes of an object, which may be a class, and REDUCE calls one."""
    module, _, function = name.rpartition(".")
    found = f"c{module}\n{function}\n".encode()
    set_table(checkpoint, found + b"(N(S'parent'\nS'/evil'\ndtb.")
    refuses(checkpoint, f"{NOT_A_TABLE}.*")
    assert Path("/a/b").parent == Path("/a")
    if "pathlib" not in name:
        assert not hasattr(getattr(importlib.import_module(module), function), "parent")
    if isinstance(reading.NAMES[name], type) and "Properties" not in name:
        set_table(checkpoint, found + b"(I1\ntR.")
        refuses(checkpoint, f"{NOT_A_TABLE}TypeError: .*__init__.*")


def set_places(table, fields):
    """Change where all parts of tensors are."""
    for place in table.storage_data.values():
        vars(place).update(fields)


def test_a_table_finds_only_names_that_tensors_need(checkpoint):
    for name in ("builtins.eval", "torch.load", "os.system", "torch.hub"):
        set_table(checkpoint, "c{}\n{}\n.".format(*name.split(".")).encode())
        refuses(checkpoint, f"names {name}, which no table of tensors does")


def test_tables_of_other_versions_of_python(checkpoint):
    """3.11.0 to 3.11.3 pickle members of enums as calls of getattr; 3.13 has other paths."""
    table = pickle.loads((checkpoint / ".metadata").read_bytes())

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj):
            if isinstance(obj, _MEM_FORMAT_ENCODING):
                return getattr, (type(obj), obj.name)
            return NotImplemented

    file = io.BytesIO()
    Pickler(file).dump(table)
    assert b"getattr" in file.getvalue()
    set_table(checkpoint, file.getvalue())
    assert differing(SafeReader(checkpoint).read_whole(), samples.small_tensors(10)) == []
    assert reading.NAMES["pathlib._local.PosixPath"]("a", "b") is None


def test_an_entry_that_is_not_a_tensor_is_refused(tmp_path, marker):
    path = tmp_path / "entry"
    save(path, {"model.w": torch.ones(2), "extra": samples.Payload(marker)})
    samples.add_manifest(path, {"model.w": torch.ones(2)}, 10)
    refuses(path, "has a part of extra without an offset")

    def forget_place(table):
        table.storage_data = {i: at for i, at in table.storage_data.items() if i.fqn != "extra"}

    edit_table(path, forget_place)
    refuses(path, "has extra, which is not a tensor")
    assert not marker.exists()


def test_a_tensor_that_runs_code_is_refused(checkpoint, marker):
    file = checkpoint / SHARD
    torch.save(samples.Payload(marker), file)
    torch.load(file, weights_only=False)
    marker.rmdir()  # it works
    whole = {"offset": 0, "length": file.stat().st_size}
    edit_table(checkpoint, lambda table: set_places(table, whole))
    with pytest.raises(BrokenCheckpoint, match="^rank 0: UnpicklingError: Weights only load faile"):
        SafeReader(checkpoint).read_whole(["model.w"])
    assert not marker.exists()


# ----- read_table: numbers that cannot be -----


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"relative_path": "../elsewhere.distcp"}, r"reads \S+where\.distcp, which is not one of"),
        ({"relative_path": "/etc/passwd"}, "reads /etc/passwd, which is not one of its files"),
        ({"relative_path": "__7_0.distcp"}, r"reads __7_0\.distcp, which is not one of its files"),
        ({"offset": -1}, r"reads \d+ bytes at -1, beyond the end of __0_0\.distcp"),
        ({"length": -1}, r"reads -1 bytes at \d+, beyond the end of __0_0\.distcp"),
        ({"length": 2**50}, r"reads 1125899906842624 bytes at \d+, beyond the end of __0_0\.dist"),
        ({"offset": 0.5}, r"reads \d+ bytes at 0\.5, beyond the end of __0_0\.distcp"),
        ({"transform_descriptors": ["stream.zstd/1"]}, r"has __0_0\.distcp unpacked, and a save "),
    ],
)
def test_places_that_are_not_in_the_files_are_refused(checkpoint, fields, reason):
    edit_table(checkpoint, lambda table: set_places(table, fields))
    refuses(checkpoint, f"{reason}.*")


def describe(checkpoint, name="model.w", **fields):
    """Change how the table describes a tensor."""
    edit_table(checkpoint, lambda table: vars(table.state_dict_metadata[name]).update(fields))


def test_tensors_that_are_larger_than_the_files_are_refused(checkpoint):
    size = torch.Size((2**45,))
    part = ChunkStorageMetadata(torch.Size((0,)), size)
    describe(checkpoint, "model.b", size=size, chunks=[part])
    tensors = reading.read_manifest(checkpoint).tensors
    edit_manifest(checkpoint, tensors=tensors | {"model.b": TensorEntry("bfloat16", tuple(size))})
    refuses(checkpoint, "has tensors of 70368744177716 bytes, and the files .*")


def test_a_size_or_data_type_of_another_kind_is_refused(checkpoint):
    describe(checkpoint, size=[10**30, 0])
    refuses(checkpoint, r"has model\.w with a size of another type")
    describe(checkpoint, size=torch.Size((4, 4)))
    refuses(checkpoint, r"has 12 of the 16 elements of model\.w")
    for lengths in [(10**30, 0), (2**63,), (-1, 2), (0.5,), (True, 1), ("3", 4), (1,) * 65]:
        with pytest.raises(ValueError, match="^a size is not of at most 64 whole numbers$"):
            reading._size(lengths)
    assert reading._size((2**63 - 1, 0) * 32) == torch.Size((2**63 - 1, 0) * 32)
    describe(checkpoint, size=torch.Size((3, 4)), properties=TensorProperties("save"))
    refuses(checkpoint, f"{NOT_A_TABLE}AttributeError: 'str' .*itemsize.*")


def test_a_table_that_differs_from_the_manifest_is_refused(checkpoint):
    edit_table(checkpoint, lambda table: table.state_dict_metadata.pop("model.w"))
    refuses(checkpoint, r"model\.w is not as in the manifest")
    edit_manifest(checkpoint, files={})
    refuses(checkpoint, "its contents have changed")


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80\x04.", b"garbage", pickle.dumps(None), pickle.dumps({"state_dict_metadata": {}})],
)
def test_damaged_tables(checkpoint, content):
    (checkpoint / ".metadata").write_bytes(content)
    refuses(checkpoint, "its contents have changed")
    samples.renew_manifest(checkpoint)
    refuses(checkpoint, rf"{NOT_A_TABLE}\w+: .*")
    (checkpoint / ".metadata").unlink()
    refuses(checkpoint, "No such file or directory")


# ----- read_table, open_checkpoint: bounded memory -----


class SharedSize:
    """Pickled as a size; all share a long tuple."""

    lengths = tuple(range(100_000))

    def __reduce__(self):
        return torch.Size, (self.lengths,)


class SharingPart:
    """Pickled as a call of a class; all share a large dictionary of fields."""

    fields = {f"field {number}": number for number in range(5000)}

    def __reduce__(self):
        return ChunkStorageMetadata, ((), ()), self.fields


def part_with_fields():
    """A part of a tensor; all have the same large dictionary of fields."""
    part = object.__new__(ChunkStorageMetadata)
    part.__dict__ = SharingPart.fields
    return part


CALLS, FIELDS, SIZES = (
    pickle.dumps([make() for _ in range(20_000)])
    for make in (SharingPart, part_with_fields, SharedSize)
)
HUGE = (2**40).to_bytes(8, "little")
HOSTILE_TABLES = {
    "LONG_BINPUT": (b"Nr\xff\xff\xff\x7f.", "holds the opcode LONG_BINPUT, which no table"),
    "BINPUT": (b"Nq\x05.", "holds the opcode BINPUT, which no table"),
    "PUT": (b"Np2000000000\n.", "holds the opcode PUT, which no table"),
    "BYTEARRAY8": (b"\x96" + HUGE + b".", f"{NOT_A_TABLE}ValueError: expected 10995"),
    "BINBYTES": (b"B\xff\xff\xff\x7f.", f"{NOT_A_TABLE}ValueError: expected 21474"),
    "BINBYTES8": (b"\x8e" + HUGE + b".", f"{NOT_A_TABLE}ValueError: expected 10995"),
    "BINUNICODE8": (b"\x8d" + HUGE + b".", f"{NOT_A_TABLE}ValueError: expected 10995"),
    "LONG4": (b"\x8b\xff\xff\xff\x7f.", f"{NOT_A_TABLE}ValueError: not enough data"),
    "FRAME": (b"\x95" + HUGE + b".", f"{NOT_A_TABLE}UnpicklingError: pickle data was trunc"),
    "calls": (CALLS, f"{NOT_A_TABLE}TypeError: .*__init__"),
    "fields": (FIELDS, f"{NOT_A_TABLE}ValueError: an object has fields that its class "),
    "sizes": (SIZES, f"{NOT_A_TABLE}ValueError: a size is not of at most 64"),
}


@pytest.fixture
def little_memory():
    """Leaves this process 512 MiB."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**29, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("table", "reason"), HOSTILE_TABLES.values(), ids=HOSTILE_TABLES)
def test_no_table_gets_much_memory(checkpoint, little_memory, table, reason):
    set_table(checkpoint, table)
    refuses(checkpoint, f"{reason}.*")


@pytest.mark.timeout(60)
def test_flipped_bits_in_a_table_end_in_a_message_or_in_tensors(checkpoint, little_memory):
    table, flips = (checkpoint / ".metadata").read_bytes(), random.Random(0)
    read, known = 0, r"\.metadata|rank 0: |has no tensor"
    for _ in range(150):
        flipped = bytearray(table)
        flipped[flips.randrange(len(table))] ^= 1 << flips.randrange(8)
        set_table(checkpoint, flipped)
        try:
            SafeReader(checkpoint).read_whole()
            read += 1
        except BrokenCheckpoint as broken:
            assert re.match(known, str(broken)) and "MemoryError" not in str(broken)
    assert 15 < read < 75  # of names that are not looked at, such as the save's


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("name", ["manifest.json", ".metadata", SHARD])
def test_only_regular_files_are_read(checkpoint, little_memory, name, make):
    files = reading.read_manifest(checkpoint).files
    if name in files:
        edit_manifest(checkpoint, files=files | {name: FileEntry(0, "")})
    (checkpoint / name).unlink()
    make(checkpoint / name)
    with pytest.raises(BrokenCheckpoint, match=rf"^{name}:? is not a regular file$"):
        reading.open_checkpoint(checkpoint, hashes=True)
    if name == ".metadata":
        refuses(checkpoint, f"{NOT_A_TABLE}ValueError: is not a regular file")
