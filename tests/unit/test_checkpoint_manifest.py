"""The manifest of a checkpoint: damage to it, and to the files that it lists."""

import errno
import hashlib
import json
import platform
import subprocess
import sys
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError

import pytest
from hypothesis import given, settings
from sample_checkpoints import flip_bit
from sample_hostile import edits

from torchtitan_lite.base.errors import CheckpointError, StorageError
from torchtitan_lite.base.files import hash_file
from torchtitan_lite.base.jsonfile import hash_fields
from torchtitan_lite.checkpoint import manifest
from torchtitan_lite.checkpoint.manifest import (
    MANIFEST,
    NEW_RUN,
    BrokenCheckpoint,
    CheckpointManifest,
    FileEntry,
    TensorEntry,
    TrainingProgress,
    broken_files,
    installed_versions,
    read_manifest,
    write_manifest,
)
from torchtitan_lite.cli.checkpoint import format_checkpoints

SHARD, EMPTY_SHARD, RANDOM = "__0_0.distcp", "__1_0.distcp", "rank-00000.json"
FILES = {".metadata": b"table", SHARD: b"a" * 9000, EMPTY_SHARD: b"", RANDOM: b"{}"}
DATA = {"seed": 0, "store 1": "abc", "store 1 held out": 7}
SAMPLE = CheckpointManifest(
    progress=TrainingProgress(10, 80, 5120, DATA, 2, 1, 3.25, last_step=40),
    world_size=2,
    mesh={"dp_shard": 2, "tp": 1},
    versions={"torch": "2.13.0"},
    model={"dim": 4, "rope_scaling": {"factor": 8.0}, "document_bos_id": None},
    config="[job]\n",
    files={
        name: FileEntry(len(content), hashlib.sha256(content).hexdigest())
        for name, content in FILES.items()
    },
    tensors={
        "model.w": TensorEntry("float32", (3, 4)),
        "optimizer.w.step": TensorEntry("float32", ()),
    },
)
PROGRESS = asdict(SAMPLE.progress)


@pytest.fixture
def folder(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    write_manifest(tmp_path, SAMPLE)
    return tmp_path


def write_fields(folder, fields):
    """Write a manifest of any fields, with their hash."""
    (folder / MANIFEST).write_text(json.dumps(fields | {"sha256": hash_fields(fields)}))


# ----- TrainingProgress -----


def test_held_out_windows_are_by_store():
    assert [SAMPLE.progress.held_out(store) for store in (1, 2)] == [7, 0]
    for no_count in ("7", 2**63):
        assert replace(NEW_RUN, data={"store 1 held out": no_count}).held_out(1) == 0
    assert (NEW_RUN.step, NEW_RUN.samples, NEW_RUN.tokens, NEW_RUN.loss_mean) == (0, 0, 0, None)


# ----- read_manifest, write_manifest -----


def test_a_manifest_is_read_as_written(folder):
    assert read_manifest(folder) == SAMPLE
    fields = json.loads((folder / MANIFEST).read_text())
    assert (fields["format"], fields["progress"]["step"]) == (1, 10)
    assert {path.name for path in folder.iterdir()} == {*FILES, MANIFEST}


def test_an_edited_manifest_is_refused(folder):
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"step": 10', '"step": 11'))
    with pytest.raises(BrokenCheckpoint, match=r"^manifest\.json: its contents have changed$"):
        read_manifest(folder)


def progress(**changes):
    return {"progress": PROGRESS | changes}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": 2}, r"its format is 2, this version reads 1"),
        ({"surplus": 1}, r"surplus: Unexpected"),
        ({"world_size": 0}, r"world_size: .*greater than or equal to 1"),
        ({"mesh": {"dp_shard": 0}}, r"mesh\.dp_shard: .*greater than or equal to 1"),
        (
            {"tensors": {"w": {"dtype": "float32", "shape": [-1]}}},
            r"tensors.*: .*greater",
        ),
        ({"files": {SHARD: {"size": -1, "sha256": ""}}}, r"files\..*size: .*greater"),
        ({"progress": {"step": 1}}, r"progress\.samples: Field required"),
        (progress(schedule_start=7), r"progress\.schedule_start: Input should be 0"),
        (progress(skipped_steps=10**30), r"progress\.skipped_steps: .*less"),
        (progress(data={"store 1 held out": -1}), r"progress\.data\.store 1 held out.*: .*greater"),
        ({"config": "not [ toml"}, r"config: .*not valid TOML: Expected '='"),
        ({"config": "a = 1"}, r"config: .*has a key outside of a table"),
    ],
)
def test_fields_that_are_not_right_are_refused(folder, changes, reason):
    fields = json.loads((folder / MANIFEST).read_text())
    del fields["sha256"]
    write_fields(folder, fields | changes)
    with pytest.raises(BrokenCheckpoint, match=rf"^manifest\.json: {reason}"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "", "a/__0_0.distcp", "__0_0.distcp\n", ".metadata/../x", "x"]
)
def test_files_of_other_names_are_refused(tmp_path, name):
    write_manifest(tmp_path, replace(SAMPLE, files={name: FileEntry(1, "")}))
    with pytest.raises(BrokenCheckpoint, match=r"^manifest\.json: files.*: .* match pattern"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{", "not JSON: Expecting property name"),
        (b"[]", "not a JSON object"),
        (b"{}", "its format is None, this version reads 1"),
        (b'{"format": 1}', "its contents have changed"),
        (None, "No such file or directory"),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path, text, reason):
    if text is not None:
        (tmp_path / MANIFEST).write_bytes(text)
    with pytest.raises(BrokenCheckpoint, match=rf"^manifest\.json:? {reason}") as caught:
        read_manifest(tmp_path)
    assert isinstance(caught.value, CheckpointError) and "\n" not in str(caught.value)


@given(fields=edits(json.loads(json.dumps({"format": 1, **asdict(SAMPLE)}))))
@settings(max_examples=150)
def test_any_value_in_a_manifest_is_read_or_refused(tmp_path_factory, fields):
    folder = tmp_path_factory.mktemp("hostile")
    write_fields(folder, fields)
    try:
        read_manifest(folder)
    except BrokenCheckpoint as broken:
        assert "\n" not in str(broken)
    assert format_checkpoints([folder])


# ----- broken_files -----


def test_damage_that_changes_sizes(folder):
    (folder / "notes.txt").write_text("mine")
    assert broken_files(folder, SAMPLE.files, hashes=True) == []
    (folder / SHARD).write_bytes(b"a" * 8999)
    (folder / ".metadata").unlink()
    expected = [f"{SHARD} has 8999 bytes, not 9000", ".metadata: No such file or directory"]
    for options in ({"hashes": False}, {"hashes": True, "share": (1, 2)}):  # whatever the share
        assert broken_files(folder, SAMPLE.files, **options) == expected


@pytest.mark.parametrize(
    ("name", "seen_by_hashes_only"), [(SHARD, True), (".metadata", False), (RANDOM, False)]
)
def test_damage_that_changes_hashes(folder, name, seen_by_hashes_only):
    """Of small files it is seen in any case."""
    flip_bit(folder / name, -1)
    problems = [f"{name}: its contents have changed"]
    assert broken_files(folder, SAMPLE.files, hashes=True) == problems
    quickly = broken_files(folder, SAMPLE.files, hashes=False)
    assert quickly == ([] if seen_by_hashes_only else problems)


def test_a_folder_in_place_of_a_file(folder):
    (folder / EMPTY_SHARD).unlink()
    (folder / EMPTY_SHARD).mkdir()
    files = SAMPLE.files | {EMPTY_SHARD: FileEntry((folder / EMPTY_SHARD).stat().st_size, "")}
    assert broken_files(folder, files, hashes=True) == [f"{EMPTY_SHARD} is not a regular file"]


def test_a_disk_that_fails_is_no_broken_checkpoint(folder, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(manifest, "hash_file", fail)
    with pytest.raises(StorageError, match=rf"{SHARD} cannot be read: Input/output error; check "):
        broken_files(folder, SAMPLE.files, hashes=True)
    monkeypatch.setattr(manifest.Path, "read_bytes", fail)
    with pytest.raises(StorageError, match=r"manifest\.json cannot be read: Input/output error"):
        read_manifest(folder)


def test_ranks_share_the_hashing(folder, monkeypatch):
    read, shares = [], []
    monkeypatch.setattr(
        manifest, "hash_file", lambda path, _: read.append(path.name) or hash_file(path)
    )
    for rank in range(3):
        assert broken_files(folder, SAMPLE.files, hashes=True, share=(rank, 3)) == []
        shares.append([*read])
        read.clear()
    assert shares == [[SHARD, EMPTY_SHARD], [".metadata"], [RANDOM]]  # by size


# ----- installed_versions, imports of manifest and folders -----


def test_a_package_that_is_run_from_its_folder_has_no_version(monkeypatch):
    def find(name):
        if name == "torchtitan_lite":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(manifest, "version", find)
    versions = {"torch": "1.0", "torchao": "1.0", "python": platform.python_version()}
    assert installed_versions() == versions


def test_neither_manifest_nor_folders_imports_torch():
    package = "torchtitan_lite.checkpoint"
    code = f"import sys, {package}.manifest, {package}.folders; print('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
