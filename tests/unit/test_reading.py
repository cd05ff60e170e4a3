"""Reading checkpoints: the tensors come back bit by bit, and nothing that is in the files is
run."""

import copyreg
import io
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sample_checkpoints import add_manifest, renew_manifest, save, small_tensors, write_checkpoint
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, ChunkStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchtitan_lite.checkpoint.manifest import (
    BrokenCheckpoint,
    FileEntry,
    TensorEntry,
    read_manifest,
    write_manifest,
)
from torchtitan_lite.checkpoint.reading import (
    NAMES,
    SafePlanner,
    SafeReader,
    _Record,
    _size,
    _TableUnpickler,
    first_failure,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Payload:
    """Makes a folder when it is unpickled: the code of an attacker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "code was run"


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path, 10)


@pytest.fixture
def world() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def edit_table(path, edit):
    """Change DCP's table, and the manifest with it."""
    table = pickle.loads((path / ".metadata").read_bytes())
    edit(table)
    (path / ".metadata").write_bytes(pickle.dumps(table))
    renew_manifest(path)


def place_of(table):
    """Where a table has the first part of model.w."""
    return next(info for index, info in table.storage_data.items() if index.fqn == "model.w")


def read_whole_file(checkpoint):
    """Have the table take each part of a tensor to be the whole of the only file."""
    size = (checkpoint / "__0_0.distcp").stat().st_size

    def edit(table):
        for info in table.storage_data.values():
            info.offset, info.length = 0, size

    edit_table(checkpoint, edit)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def test_tensors_come_back(checkpoint):
    expected = small_tensors(10)
    read = SafeReader(checkpoint).read_whole()
    assert read.keys() == expected.keys()
    assert all(same(read[name], expected[name]) for name in expected)
    assert SafeReader(checkpoint).manifest.tensors == {
        "model.w": TensorEntry("float32", (3, 4)),
        "model.b": TensorEntry("bfloat16", (5,)),
        "optimizer.w.step": TensorEntry("float32", ()),
    }


def test_some_tensors_are_read_alone(checkpoint):
    reader = SafeReader(checkpoint)
    for name in ("model.b", "model.w"):
        assert same(reader.read_whole([name])[name], small_tensors(10)[name])
    assert SafeReader(checkpoint).read_whole(["model.b"]).keys() == {"model.b"}
    with pytest.raises(BrokenCheckpoint, match=r"^has no tensor model\.x$"):
        SafeReader(checkpoint).read_whole(["model.x"])


def test_sharded_tensors_come_back(world, tmp_path):
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    whole = {"model.w": torch.randn(4, 6), "model.b": torch.arange(3)}
    sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    dcp.save(sharded, storage_writer=FileSystemWriter(tmp_path))
    add_manifest(tmp_path, whole, 10)
    assert all(same(SafeReader(tmp_path).read_whole()[name], whole[name]) for name in whole)
    target = {name: torch.zeros_like(tensor) for name, tensor in sharded.items()}
    dcp.load(target, storage_reader=SafeReader(tmp_path), planner=SafePlanner())
    assert all(same(target[name].full_tensor(), whole[name]) for name in whole)


def test_the_layout_of_the_writer_does_not_matter(checkpoint):
    """A tensor in two parts, as two ranks save it."""
    halves = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(6.0, 12.0).reshape(2, 3)}
    path = checkpoint.parent / "halves"
    save(path, halves)

    def join(table):
        first, second = (table.state_dict_metadata.pop(name) for name in halves)
        second.chunks[0].offsets = torch.Size((2, 0))
        first.chunks += second.chunks
        first.size = torch.Size((4, 3))
        table.state_dict_metadata["w"] = first
        infos = {index.fqn: info for index, info in table.storage_data.items()}
        offsets = {"a": (0, 0), "b": (2, 0)}
        make = type(next(iter(table.storage_data)))
        table.storage_data = {make("w", offsets[name]): infos[name] for name in halves}

    add_manifest(path, {"w": torch.empty(4, 3)}, 10)
    edit_table(path, join)
    assert same(SafeReader(path).read_whole()["w"], torch.arange(12.0).reshape(4, 3))

    edit_table(path, lambda table: table.state_dict_metadata["w"].chunks.pop())
    with pytest.raises(BrokenCheckpoint, match=r"it has 6 of the 12 elements of a tensor"):
        SafeReader(path).read_whole()


class PicklerOfPython3113(pickle.Pickler):
    """Pickles the members of enums as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, thing):
        return (getattr, (type(thing), thing.name)) if isinstance(thing, Enum) else NotImplemented


def test_a_table_that_another_python_wrote_is_read(checkpoint):
    table = io.BytesIO()
    PicklerOfPython3113(table).dump(pickle.loads((checkpoint / ".metadata").read_bytes()))
    assert b"getattr" in table.getvalue()
    (checkpoint / ".metadata").write_bytes(table.getvalue())
    renew_manifest(checkpoint)
    assert all(
        same(tensor, small_tensors(10)[name])
        for name, tensor in SafeReader(checkpoint).read_whole().items()
    )


def test_a_table_gets_no_attribute_of_anything_else(checkpoint):
    (checkpoint / ".metadata").write_bytes(b"cbuiltins\ngetattr\n(ctorch\nSize\nS'__base__'\ntR.")
    renew_manifest(checkpoint)
    with pytest.raises(
        BrokenCheckpoint,
        match=r"^\.metadata: not a table of tensors: AttributeError: .*fields",
    ):
        SafeReader(checkpoint)


SET_VALUE = b"(K\x00tR(N(S'_value_'\nK\x63dtb0"  # of the member 0 of the enum before it


def test_a_table_cannot_change_how_the_process_saves(checkpoint):
    """The members of an enum are the whole process's; DCP pickles this one with every table."""
    change = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n" + SET_VALUE
    (checkpoint / ".metadata").write_bytes(change + (checkpoint / ".metadata").read_bytes())
    renew_manifest(checkpoint)
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    try:
        assert same(SafeReader(checkpoint).read_whole()["model.w"], small_tensors(10)["model.w"])
        assert member._value_ == 0
    finally:
        member._value_ = 0


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (
            [(2, 4, 0, 0), (1, 4, 3, 0)],
            r"a part of \[1, 4\] at \[3, 0\] is not within a tensor of \[3, 4\]",
        ),
        (
            [(3, 4, 0, 10**9)],
            r"a part of \[3, 4\] at \[0, 1000000000\] is not within a tensor of \[3, 4\]",
        ),
        ([(12, 0)], r"a part of \[12\] at \[0\] is not within a tensor of \[3, 4\]"),
        ([(2, 4, 0, 0), (1, 4, 0, 0)], "2 parts of a tensor begin at 1 places"),
    ],
)
def test_parts_that_do_not_make_a_tensor_are_refused(checkpoint, parts, reason):
    def cut(table):
        table.state_dict_metadata["model.w"].chunks = [
            ChunkStorageMetadata(
                sizes=torch.Size(part[: len(part) // 2]), offsets=torch.Size(part[len(part) // 2 :])
            )
            for part in parts
        ]

    edit_table(checkpoint, cut)
    with pytest.raises(
        BrokenCheckpoint, match=rf"^\.metadata: not a table of tensors: ValueError: {reason}$"
    ):
        SafeReader(checkpoint)


def test_empty_parts_may_share_a_place(checkpoint):
    empty = ChunkStorageMetadata(sizes=torch.Size((0, 4)), offsets=torch.Size((3, 0)))
    edit_table(
        checkpoint, lambda table: table.state_dict_metadata["model.w"].chunks.extend([empty, empty])
    )
    SafeReader(checkpoint)


@pytest.mark.parametrize(
    "found",
    ["pathlib PosixPath", "torch.distributed.checkpoint.metadata StorageMeta", "torch Size"],
)
def test_a_table_cannot_change_what_it_names(found, checkpoint):
    """Pickle's BUILD sets attributes, of a class too: here `parent`, of every path in this
    process."""
    module, name = found.split()
    set_parent = f"c{module}\n{name}\n(N(S'parent'\nS'/evil'\ndtb.".encode()
    if found != "torch Size":
        made = pickle.loads(set_parent)
        assert made.parent == "/evil"  # it works
        del made.parent
    (checkpoint / ".metadata").write_bytes(set_parent)
    renew_manifest(checkpoint)
    with pytest.raises(
        BrokenCheckpoint, match=r"^\.metadata: not a table of tensors: TypeError: .*__setstate__"
    ):
        SafeReader(checkpoint)
    assert Path("/a/b").parent == Path("/a")


def test_a_table_that_runs_code_is_refused(checkpoint, marker):
    payload = pickle.dumps(Payload(marker))
    pickle.loads(payload)
    marker.rmdir()  # it works
    (checkpoint / ".metadata").write_bytes(payload)
    renew_manifest(checkpoint)
    with pytest.raises(
        BrokenCheckpoint, match=r"^\.metadata: names posix\.mkdir, which no table of tensors does$"
    ):
        SafeReader(checkpoint)
    assert not marker.exists()


def test_code_within_a_table_is_refused(checkpoint, marker):
    def plant(table):
        table.planner_data = [Payload(marker)]

    edit_table(checkpoint, plant)
    with pytest.raises(BrokenCheckpoint, match=r"names posix\.mkdir"):
        SafeReader(checkpoint).read_whole()
    assert not marker.exists()


@pytest.mark.parametrize(
    "name", ["builtins.eval", "torch.load", "torch.serialization.load", "os.system", "torch.hub"]
)
def test_a_table_finds_nothing_but_what_tensors_need(name):
    module, _, function = name.rpartition(".")
    with pytest.raises(BrokenCheckpoint, match=f"names {name}, which no table of tensors does"):
        _TableUnpickler(io.BytesIO(f"c{module}\n{function}\n.".encode())).load()


@pytest.mark.parametrize("name", sorted(NAMES))
def test_what_a_table_names_is_only_a_record(name):
    module, _, last = name.rpartition(".")
    record = _TableUnpickler(io.BytesIO(f"c{module}\n{last}\n(Va\ntR.".encode())).load()
    assert type(record) is _Record and record.args == ("a",) and not hasattr(record, "fields")


def test_an_entry_that_is_not_a_tensor_is_refused(tmp_path, marker):
    path = tmp_path / "entry"
    save(path, {"model.w": torch.ones(2), "extra": Payload(marker)})
    add_manifest(path, {"model.w": torch.ones(2)}, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"extra": 0}, checkpoint_id=path, no_dist=True)
    marker.rmdir()  # it works
    with pytest.raises(
        BrokenCheckpoint, match=r"^\.metadata: not a table of tensors: KeyError: 'offset'$"
    ):
        SafeReader(path)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(
            {"extra": 0}, storage_reader=FileSystemReader(path), planner=SafePlanner(), no_dist=True
        )
    assert first_failure(caught.value) == "rank 0: BrokenCheckpoint: extra is not a tensor"
    assert not marker.exists()


def test_a_tensor_that_runs_code_is_refused(checkpoint, marker):
    file = checkpoint / "__0_0.distcp"
    torch.save(Payload(marker), file)
    read_whole_file(checkpoint)
    torch.load(file, weights_only=False)
    marker.rmdir()  # it works
    with pytest.raises(
        BrokenCheckpoint, match=r"^rank 0: UnpicklingError: Weights only load failed"
    ):
        SafeReader(checkpoint).read_whole(["model.w"])
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../elsewhere.distcp", "/etc/passwd", "__7_0.distcp"])
def test_a_table_that_reads_other_files_is_refused(checkpoint, name):
    def redirect(table):
        next(iter(table.storage_data.values())).relative_path = name

    edit_table(checkpoint, redirect)
    with pytest.raises(
        BrokenCheckpoint, match=rf"^\.metadata: reads {name}, which is not one of its files$"
    ):
        SafeReader(checkpoint)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"offset": -1}, r"reads \d+ bytes at -1, beyond the end of __0_0\.distcp"),
        ({"length": -1}, r"reads -1 bytes at \d+, beyond the end of __0_0\.distcp"),
        (
            {"length": 2**50},
            r"reads 1125899906842624 bytes at \d+, beyond the end of __0_0\.distcp",
        ),
        ({"offset": 0.5}, r"reads \d+ bytes at 0\.5, beyond the end of __0_0\.distcp"),
        (
            {"transform_descriptors": ["stream.zstd/1"]},
            r"has __0_0\.distcp unpacked, and a save packs nothing",
        ),
    ],
)
def test_a_table_whose_places_are_not_in_the_files_is_refused(checkpoint, fields, reason):
    edit_table(checkpoint, lambda table: vars(place_of(table)).update(fields))
    with pytest.raises(BrokenCheckpoint, match=rf"^\.metadata: {reason}$"):
        SafeReader(checkpoint)


def test_tensors_that_are_larger_than_the_files_are_refused(checkpoint):
    size = torch.Size((2**45,))

    def grow(table):
        tensor = table.state_dict_metadata["model.b"]
        tensor.size = size
        tensor.chunks = [ChunkStorageMetadata(offsets=torch.Size((0,)), sizes=size)]

    edit_table(checkpoint, grow)
    manifest = read_manifest(checkpoint)
    tensors = manifest.tensors | {"model.b": TensorEntry("bfloat16", tuple(size))}
    write_manifest(checkpoint, replace(manifest, tensors=tensors))
    with pytest.raises(
        BrokenCheckpoint, match=r"^\.metadata: has tensors of 70368744177716 bytes, and the files"
    ):
        SafeReader(checkpoint)


def test_a_size_that_is_none(checkpoint):
    edit_table(
        checkpoint, lambda table: setattr(table.state_dict_metadata["model.w"], "size", [10**30, 0])
    )
    with pytest.raises(BrokenCheckpoint, match=r"not a table of tensors: AttributeError: 'list'"):
        SafeReader(checkpoint)


@pytest.mark.parametrize("lengths", [(10**30, 0), (-1, 2), (0.5,), (True, 1), ("3", 4)])
def test_a_size_that_is_not_of_whole_numbers(lengths):
    with pytest.raises(ValueError, match=r"^the size of a tensor is not of whole numbers$"):
        _size(_Record(lengths))


def test_a_size_of_very_many_dimensions():
    with pytest.raises(ValueError, match=r"^a tensor has 65 dimensions$"):
        _size(_TableUnpickler(io.BytesIO(pickle.dumps(torch.Size([1] * 65)))).load())


def test_a_table_that_the_manifest_does_not_list(checkpoint):
    manifest = read_manifest(checkpoint)
    files = {name: entry for name, entry in manifest.files.items() if name != ".metadata"}
    write_manifest(checkpoint, replace(manifest, files=files))
    with pytest.raises(BrokenCheckpoint, match=r"^\.metadata: its contents have changed$"):
        SafeReader(checkpoint)


class SharingPickler(pickle.Pickler):
    """Pickles every part of a tensor as one that has the same, large dictionary of fields."""

    fields = {f"field {number}": number for number in range(5000)}

    def reducer_override(self, thing):
        if not isinstance(thing, ChunkStorageMetadata):
            return NotImplemented
        return copyreg.__newobj__, (ChunkStorageMetadata,), self.fields


def quadratic_table() -> bytes:
    table = io.BytesIO()
    SharingPickler(table).dump(
        [ChunkStorageMetadata(torch.Size(), torch.Size()) for _ in range(20_000)]
    )
    return table.getvalue()


HUGE = (2**40).to_bytes(8, "little")
HOSTILE_TABLES = {
    "LONG_BINPUT": (
        b"Nr\xff\xff\xff\x7f.",
        r"\.metadata: holds the opcode LONG_BINPUT, which no table",
    ),
    "BINPUT": (b"Nq\x05.", r"\.metadata: holds the opcode BINPUT, which no table"),
    "PUT": (b"Np2000000000\n.", r"\.metadata: holds the opcode PUT, which no table"),
    "BYTEARRAY8": (
        b"\x96" + HUGE + b".",
        r"\.metadata: not a table of tensors: ValueError: expected 10995",
    ),
    "BINBYTES": (
        b"B\xff\xff\xff\x7f.",
        r"\.metadata: not a table of tensors: ValueError: expected 21474",
    ),
    "BINBYTES8": (
        b"\x8e" + HUGE + b".",
        r"\.metadata: not a table of tensors: ValueError: expected 10995",
    ),
    "BINUNICODE8": (
        b"\x8d" + HUGE + b".",
        r"\.metadata: not a table of tensors: ValueError: expected 10995",
    ),
    "LONG4": (
        b"\x8b\xff\xff\xff\x7f.",
        r"\.metadata: not a table of tensors: ValueError: not enough data",
    ),
    "FRAME": (
        b"\x95" + HUGE + b".",
        r"\.metadata: not a table of tensors: UnpicklingError: pickle data was trunc",
    ),
    "fields": (
        quadratic_table(),
        r"\.metadata: not a table of tensors: AttributeError: 'list' object has no",
    ),
}
LIMITED = """
import resource, sys
from pathlib import Path
from torchtitan_lite.checkpoint.reading import BrokenCheckpoint, SafeReader, verify_checkpoint

size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**29,) * 2)
for folder in map(Path, sys.argv[1:]):
    try:
        problems = verify_checkpoint(folder, hashes=True)
        print(problems[0] if problems else SafeReader(folder).read_whole() and "read")
    except BrokenCheckpoint as broken:
        print(broken)
"""


def read_in_little_memory(folders: list[Path]) -> list[str]:
    """What is wrong with each checkpoint, or "read", in a process that has little memory and
    time."""
    command = [sys.executable, "-c", LIMITED, *map(str, folders)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout.splitlines()


def copy_with_table(checkpoint: Path, name: str, table: bytes) -> Path:
    """A copy of a checkpoint whose table and manifest one has changed who can write into the
    folder."""
    copied = Path(shutil.copytree(checkpoint, checkpoint.parent / name))
    (copied / ".metadata").write_bytes(table)
    renew_manifest(copied)
    return copied


@pytest.mark.timeout(200)
def test_no_table_gets_much_memory(checkpoint):
    folders = [
        copy_with_table(checkpoint, name, table) for name, (table, _) in HOSTILE_TABLES.items()
    ]
    table, flips = (checkpoint / ".metadata").read_bytes(), random.Random(0)
    for number in range(200):
        flipped = bytearray(table)
        flipped[flips.randrange(len(table))] ^= 1 << flips.randrange(8)
        folders.append(copy_with_table(checkpoint, f"flip {number}", bytes(flipped)))
    lines = read_in_little_memory(folders)
    assert len(lines) == len(folders)
    for (_, reason), message in zip(HOSTILE_TABLES.values(), lines, strict=False):
        assert re.match(reason, message)
    of_flips = lines[len(HOSTILE_TABLES) :]
    assert all(
        message == "read" or re.match(r"\.metadata|rank 0: |has no tensor", message)
        for message in of_flips
    )
    assert not any("MemoryError" in message for message in lines)
    assert 20 < of_flips.count("read") < 100  # of names that are not looked at, such as the save's


@pytest.mark.timeout(200)
def test_only_regular_files_are_read(checkpoint):
    folders = []
    for kind in ("pipe", "device"):
        for name in ("manifest.json", ".metadata", "__0_0.distcp", "rank-00000.json"):
            copied = Path(shutil.copytree(checkpoint, checkpoint.parent / f"{kind} {name}"))
            manifest = read_manifest(copied)
            files = manifest.files | ({} if name == "manifest.json" else {name: FileEntry(0, "")})
            write_manifest(copied, replace(manifest, files=files))
            (copied / name).unlink()
            if kind == "pipe":
                os.mkfifo(copied / name)
            else:
                (copied / name).symlink_to("/dev/zero")
            folders.append(copied)
    lines = read_in_little_memory(folders)
    names = [folder.name.split()[1] for folder in folders]
    matches = [re.fullmatch(r"(.+?):? is not a regular file", line) for line in lines]
    assert [match and match[1] for match in matches] == names


def test_a_table_of_other_tensors_than_the_manifest_is_refused(checkpoint):
    def rename(table):
        table.state_dict_metadata["model.z"] = table.state_dict_metadata.pop("model.w")

    edit_table(checkpoint, rename)
    with pytest.raises(BrokenCheckpoint, match=r"^\.metadata: model\.w is not as in the manifest$"):
        SafeReader(checkpoint)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80\x04.", b"garbage", pickle.dumps(None), pickle.dumps({"state_dict_metadata": {}})],
)
def test_damaged_tables(checkpoint, content):
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(BrokenCheckpoint, match=r"^\.metadata: its contents have changed$"):
        SafeReader(checkpoint)
    renew_manifest(checkpoint)
    with pytest.raises(BrokenCheckpoint, match=r"^\.metadata: not a table of tensors: \w+: "):
        SafeReader(checkpoint)


def test_a_table_whose_dtype_is_none_of_torch(checkpoint):
    def lie(table):
        table.state_dict_metadata["model.w"].properties.dtype = "save"

    edit_table(checkpoint, lie)
    with pytest.raises(
        BrokenCheckpoint, match=r"^\.metadata: not a table .*: a tensor has no data type of torch$"
    ):
        SafeReader(checkpoint)


def test_a_table_that_is_missing(checkpoint):
    (checkpoint / ".metadata").unlink()
    with pytest.raises(BrokenCheckpoint, match=r"^\.metadata: No such file or directory$"):
        SafeReader(checkpoint)


def test_data_that_is_cut_off(checkpoint):
    file = checkpoint / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(BrokenCheckpoint, match=r"^rank 0: \w+: ") as caught:
        SafeReader(checkpoint).read_whole()
    assert "\n" not in str(caught.value)
