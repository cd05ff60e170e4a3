"""The manifest of a checkpoint: damage to it, and to the files that it lists."""

import errno
import hashlib
import json
import platform
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_hostile import edits

from torchtitan_lite.checkpoint import manifest
from torchtitan_lite.checkpoint.folders import format_summaries, summarize
from torchtitan_lite.checkpoint.manifest import (
    MANIFEST,
    NEW_RUN,
    BrokenCheckpoint,
    CheckpointManifest,
    FileEntry,
    TensorEntry,
    TrainingProgress,
    broken_files,
    hash_file,
    read_manifest,
    write_manifest,
)
from torchtitan_lite.documents import MAX_JSON_BYTES, hash_fields
from torchtitan_lite.errors import CheckpointError, StorageError

FILES = {
    ".metadata": b"table",
    "__0_0.distcp": b"a" * 9000,
    "__1_0.distcp": b"",
    "rank-00000.json": b"{}",
}
SAMPLE = CheckpointManifest(
    save_id="f" * 32,
    progress=TrainingProgress(
        10, 80, 5120, {"seed": 0, "store 1": "abc", "store 1 held out": 7}, 2, 1, 3.25
    ),
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


def edit(folder, **changes):
    """Change fields, and the hash with them."""
    fields = json.loads((folder / MANIFEST).read_text())
    fields.pop("sha256")
    fields |= changes
    (folder / MANIFEST).write_text(json.dumps(fields | {"sha256": hash_fields(fields)}))


def test_what_is_written_is_read(folder):
    assert read_manifest(folder) == SAMPLE
    fields = json.loads((folder / MANIFEST).read_text())
    assert (fields["format"], fields["progress"]["step"], fields["progress"]["loss_mean"]) == (
        1,
        10,
        3.25,
    )
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, MANIFEST])


@pytest.mark.parametrize(
    ("excluded", "changes"),
    [
        ([], {}),
        (["optimizer"], {}),
        (["dataloader"], {"samples": 0, "data": {}}),
        (["lr_scheduler"], {"schedule_start": 10}),
        (
            ["optimizer", "lr_scheduler", "dataloader"],
            {"samples": 0, "data": {}, "schedule_start": 10},
        ),
        (["train_state"], {"step": 0, "tokens": 0, "skipped_steps": 0, "schedule_start": -7}),
        (
            ["train_state", "lr_scheduler"],
            {"step": 0, "tokens": 0, "skipped_steps": 0, "schedule_start": 0},
        ),
    ],
)
def test_what_is_excluded_starts_afresh_and_the_rest_goes_on(excluded, changes):
    progress = TrainingProgress(
        10, samples=80, tokens=5120, data={"seed": 0}, skipped_steps=2, schedule_start=3
    )
    assert progress.without(excluded) == replace(progress, **changes)


def test_rope_scaling_of_earlier_versions_is_read_by_the_names_of_today(folder):
    old = {"dim": 4, "rope_scaling": {"factor": 8.0, "original_max_seq_len": 8192}}
    write_manifest(folder, replace(read_manifest(folder), model=old))
    scaling = {"factor": 8.0, "original_max_position_embeddings": 8192}
    assert read_manifest(folder).model == {"dim": 4, "rope_scaling": scaling}


def test_windows_held_out_are_by_store():
    assert (SAMPLE.progress.held_out(1), SAMPLE.progress.held_out(2), NEW_RUN.held_out(1)) == (
        7,
        0,
        0,
    )
    for no_count in ("7", 2**63):
        assert replace(NEW_RUN, data={"store 1 held out": no_count}).held_out(1) == 0
    assert (NEW_RUN.step, NEW_RUN.samples, NEW_RUN.tokens, NEW_RUN.loss_mean) == (0, 0, 0, None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": 2}, r"its format is 2, this version reads 1"),
        ({"surplus": 1}, r"surplus: Unexpected"),
        ({"world_size": "2"}, r"world_size: Input should be a valid integer"),
        ({"world_size": 0}, r"world_size: Input should be greater than or equal to 1"),
        (
            {"tensors": {"w": {"dtype": "float32", "shape": [-1]}}},
            r"tensors\.w\.shape\.0: Input should be greater",
        ),
        (
            {"files": {"__0_0.distcp": {"size": -1, "sha256": ""}}},
            r"files\..*size: Input should be greater",
        ),
        (
            {"files": {"__0_0.distcp": {"size": 2**63, "sha256": ""}}},
            r"files\..*size: Input should be less",
        ),
        ({"world_size": True}, r"world_size: Input should be a valid integer"),
        (
            {"tensors": {"w": {"dtype": "float32", "shape": [1.5]}}},
            r"tensors\.w\.shape\.0: Input should be .* integer",
        ),
        ({"progress": {"step": 1}}, r"progress\.samples: Field required"),
        ({"progress": None}, r"progress: Input should be"),
        (
            {"progress": PROGRESS | {"skipped_steps": 10**30}},
            r"progress\.skipped_steps: Input should be less",
        ),
        (
            {"progress": PROGRESS | {"data": {"store 1 held out": -1}}},
            r"progress\.data\.store 1 held out.*: Input should be greater",
        ),
        ({"config": "not [ toml"}, r"config: Value error, not valid TOML: Expected '='"),
        ({"config": "a = 1"}, r"config: Value error, has a key outside of a table"),
        ({"config": "a = " + "[" * 50_000}, r".*(recursion|nest)"),
    ]
    + [
        ({"files": {name: {"size": 1, "sha256": ""}}}, r"files.*: String should match pattern")
        for name in (
            "../x",
            "/etc/passwd",
            "..",
            "",
            "a/__0_0.distcp",
            "__0_0.distcp\n",
            ".metadata/../../x",
            "notes",
        )
    ],
)
def test_a_manifest_that_is_not_right(folder, changes, reason):
    edit(folder, **changes)
    with pytest.raises(BrokenCheckpoint, match=rf"^manifest\.json: {reason}"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{", "not JSON: Expecting property name"),
        (b"\xff\xfe{}", "not JSON: 'utf-8' codec can't decode|not JSON: Expecting"),
        (b"[" * 100_000, "not JSON: maximum recursion depth"),
        (
            b"9" * 5000,
            "not JSON: Exceeds the limit" if sys.version_info >= (3, 11) else "not a JSON object",
        ),
        (b" " * (MAX_JSON_BYTES + 1), "has 16777217 bytes, and the limit is 16777216"),
        (b"[]", "not a JSON object"),
        (b"{}", "its format is None, this version reads 1"),
        (b'{"format": 1}', "its contents have changed"),
        (None, "No such file or directory"),
    ],
)
def test_what_is_no_manifest(folder, text, reason):
    (folder / MANIFEST).unlink()
    if text is not None:
        (folder / MANIFEST).write_bytes(text)
    with pytest.raises(BrokenCheckpoint, match=rf"^manifest\.json:? (?:{reason})") as caught:
        read_manifest(folder)
    assert isinstance(caught.value, CheckpointError) and "\n" not in str(caught.value)


def test_an_edited_manifest_is_refused(folder):
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"step": 10', '"step": 11'))
    with pytest.raises(BrokenCheckpoint, match=r"^manifest\.json: its contents have changed$"):
        read_manifest(folder)


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_manifest_is_found(tmp_path_factory, at, bit):
    folder = tmp_path_factory.mktemp("flip")
    write_manifest(folder, SAMPLE)
    content = bytearray((folder / MANIFEST).read_bytes())
    content[at % len(content)] ^= 1 << bit
    (folder / MANIFEST).write_bytes(content)
    with suppress(BrokenCheckpoint):
        assert read_manifest(folder) == SAMPLE  # of white space


@given(fields=edits(json.loads(json.dumps({"format": 1, **asdict(SAMPLE)}))))
@settings(max_examples=150, deadline=None)
def test_any_value_in_a_manifest_is_read_or_refused(tmp_path_factory, fields):
    folder = tmp_path_factory.mktemp("hostile")
    text = json.dumps(fields | {"sha256": hash_fields(fields)})
    (folder / MANIFEST).write_text(text)
    try:
        read_manifest(folder)
    except BrokenCheckpoint as broken:
        assert "\n" not in str(broken)
    assert format_summaries([summarize(folder)])


@pytest.mark.parametrize(
    "changes", [{"mesh": {"dp_shard": 0}}, {"mesh": {"dp_shard": -2}}, {"mesh": {"tp": 10**40}}]
)
def test_a_degree_that_is_none(folder, changes):
    edit(folder, **changes)
    with pytest.raises(BrokenCheckpoint, match=r"^manifest\.json: mesh\.\w+: Input should be"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "size", [0, 1, manifest.BLOCK_BYTES - 1, manifest.BLOCK_BYTES, 2 * manifest.BLOCK_BYTES + 1]
)
def test_a_hash_is_of_the_whole_file(tmp_path, size):
    content = bytes(range(251)) * (size // 251 + 1)
    (tmp_path / "x").write_bytes(content[:size])
    assert hash_file(tmp_path / "x") == FileEntry(size, hashlib.sha256(content[:size]).hexdigest())


def test_sound_files_beside_others(folder):
    (folder / "notes.txt").write_text("mine")
    assert broken_files(folder, SAMPLE.files, hashes=True) == []


def test_damage_that_changes_sizes(folder):
    (folder / "__0_0.distcp").write_bytes(b"a" * 8999)
    (folder / ".metadata").unlink()
    expected = ["__0_0.distcp has 8999 bytes, not 9000", ".metadata: No such file or directory"]
    assert broken_files(folder, SAMPLE.files, hashes=False) == expected
    assert (
        broken_files(folder, SAMPLE.files, hashes=True, share=(1, 2)) == expected
    )  # whatever the share


@pytest.mark.parametrize("damage", [b"a" * 8999 + b"b", b"a" * 4000 + b"\0" * 4096 + b"a" * 904])
def test_damage_that_changes_only_hashes(folder, damage):
    (folder / "__0_0.distcp").write_bytes(damage)
    assert broken_files(folder, SAMPLE.files, hashes=False) == []
    assert broken_files(folder, SAMPLE.files, hashes=True) == [
        "__0_0.distcp: its contents have changed"
    ]


def test_a_file_that_cannot_be_read(folder):
    (folder / "__1_0.distcp").unlink()
    (folder / "__1_0.distcp").mkdir()
    size = (folder / "__1_0.distcp").stat().st_size
    sized = SAMPLE.files | {"__1_0.distcp": FileEntry(size, "")}
    assert broken_files(folder, sized, hashes=True) == ["__1_0.distcp is not a regular file"]


@pytest.mark.parametrize("hashes", [False, True])
def test_small_files_are_read_in_any_case(folder, hashes):
    (folder / "rank-00000.json").write_bytes(b"[]")
    (folder / ".metadata").write_bytes(b"tablE")
    problems = [
        ".metadata: its contents have changed",
        "rank-00000.json: its contents have changed",
    ]
    assert broken_files(folder, SAMPLE.files, hashes=hashes) == problems


def test_a_disk_that_fails_is_no_broken_checkpoint(folder, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(manifest, "hash_file", fail)
    with pytest.raises(
        StorageError, match=r"__0_0\.distcp cannot be read: Input/output error; fix the disk"
    ):
        broken_files(folder, SAMPLE.files, hashes=True)
    monkeypatch.setattr(manifest.Path, "read_bytes", fail)
    with pytest.raises(StorageError, match=r"manifest\.json cannot be read: Input/output error"):
        read_manifest(folder)


def test_ranks_share_the_hashing(folder, monkeypatch):
    read = []
    monkeypatch.setattr(
        manifest, "hash_file", lambda path: read.append(path.name) or hash_file(path)
    )
    shares = []
    for rank in range(3):
        assert broken_files(folder, SAMPLE.files, hashes=True, share=(rank, 3)) == []
        shares.append(tuple(read))
        read.clear()
    assert shares == [
        ("__0_0.distcp", "__1_0.distcp"),
        (".metadata",),
        ("rank-00000.json",),
    ]  # by size


def test_a_package_that_is_run_from_its_folder_has_no_version(monkeypatch):
    def find(name: str) -> str:
        if name == "torchtitan_lite":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(manifest, "version", find)
    assert manifest.installed_versions() == {
        "torch": "1.0",
        "torchao": "1.0",
        "python": platform.python_version(),
    }


def test_neither_manifests_nor_folders_import_torch():
    modules = ", ".join(f"torchtitan_lite.checkpoint.{name}" for name in ("manifest", "folders"))
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "False\n"
