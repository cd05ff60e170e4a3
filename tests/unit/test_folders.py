"""The folder of checkpoints: what is a checkpoint, what is foreign, and what a kill at any moment
leaves."""

import math
import os
import shutil
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from sample_checkpoints import flip_bit, write_checkpoint

from torchtitan_lite.base.errors import CheckpointError, StorageError
from torchtitan_lite.checkpoint import folders
from torchtitan_lite.checkpoint.folders import (
    find_problems,
    prune,
    step_folder,
    steps_with_manifest,
)
from torchtitan_lite.checkpoint.manifest import MANIFEST

SHARD = "__0_0.distcp"
CHANGED = [f"{SHARD}: its contents have changed"]
STEPS = [f"step-000000{step}" for step in (10, 20, 30, 40)]


class Killed(BaseException):
    """The end of the process."""


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Checkpoints of steps 10, 20, 30 and 40, to copy."""
    folder = tmp_path_factory.mktemp("originals")
    for step in (10, 20, 30, 40):
        write_checkpoint(folder, step)
    return folder


@pytest.fixture
def folder(originals, tmp_path):
    return shutil.copytree(originals, tmp_path / "checkpoint")


@pytest.fixture
def folders_of_kills(originals, tmp_path, monkeypatch):
    """Return an iterator of the folders that an action leaves if the process ends before its first
    change to the disk, before its second one and so on, and at last after all of them."""
    left = math.inf

    def counted(original):
        def change(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return original(*args, **kwargs)

        return change

    def each_kill(action, *, prepare=lambda folder: None):
        nonlocal left
        for after in range(100):
            folder = shutil.copytree(originals, tmp_path / str(after) / "checkpoint")
            prepare(folder)
            left = after
            with suppress(Killed):
                action(folder)
            killed, left = left < 0, math.inf
            yield folder
            if not killed:
                return

    for name in ("rename", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    return each_kill


def sound_steps(folder):
    steps = steps_with_manifest(folder)
    return [step for step in steps if not find_problems(step_folder(folder, step), hashes=True)]


def names(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def make_draft(folder, step):
    """The complete draft of a step, of other bytes than the checkpoint's if there is one."""
    draft = folders.draft_folder(folder, step)
    write_checkpoint(folder.parent / "elsewhere", step, world_size=3).rename(draft)
    return draft


def save(folder, step):
    """Make and commit a draft."""
    folders.commit(make_draft(folder, step), step_folder(folder, step))


# ----- steps_with_manifest, steps_with_folder, find_problems -----


def test_only_folders_with_a_manifest_are_checkpoints(folder):
    for name in ("step-00000050", "step-60"):
        (folder / name).mkdir()
    (folder / "step-00000070").touch()
    make_draft(folder, 80)
    assert steps_with_manifest(folder) == [10, 20, 30, 40]
    assert folders.steps_with_folder(folder) == [10, 20, 30, 40, 50]
    missing = folder / "missing"
    assert steps_with_manifest(missing) == folders.steps_with_folder(missing) == []


def test_problems_of_a_checkpoint(folder):
    ten, twenty, thirty, forty = (step_folder(folder, step) for step in (10, 20, 30, 40))
    assert find_problems(ten, hashes=True) == []
    shutil.copy(ten / SHARD, twenty / SHARD)
    assert find_problems(twenty, hashes=False) == []
    assert find_problems(twenty, hashes=True) == CHANGED
    os.truncate(twenty / SHARD, 9)
    assert "has 9 bytes" in find_problems(twenty, hashes=False)[0]
    (twenty / MANIFEST).unlink()
    assert find_problems(twenty, hashes=False) == ["manifest.json: No such file or directory"]
    wrong_name = forty.rename(step_folder(folder, 50))
    assert find_problems(wrong_name, hashes=True) == ["manifest.json: is of step 40"]
    assert find_problems(thirty.rename(folder / "best"), hashes=True) == []


# ----- start_draft, remove_drafts -----


def test_a_draft_is_new_and_empty(folder):
    deep = folder / "deeper" / "still"
    draft = folders.start_draft(deep, 50)
    assert draft == deep / ".tmp-step-00000050"
    for name in (".metadata", SHARD, "rank-00012.json", ".metadata.tmp", ".manifest.json.a.1"):
        (draft / name).touch()
    (draft / MANIFEST).touch()
    folders.draft_folder(deep, 60).mkdir()  # of another killed save
    assert names(folders.start_draft(deep, 50)) == []
    assert names(deep) == [".tmp-step-00000050"]


@pytest.mark.parametrize("foreign", ["notes.txt", "weights.distcp", "rank-00000.json.bak"])
def test_foreign_files_in_drafts_are_never_deleted(folder, foreign):
    draft = make_draft(folder, 50)
    (draft / foreign).touch()
    before = names(draft)
    with pytest.raises(StorageError, match=rf"00050/{foreign} is in the way of a save, "):
        folders.start_draft(folder, 50)
    folders.remove_drafts(folder)
    assert names(draft) == before


def test_only_drafts_are_removed(folder):
    make_draft(folder, 50)
    folders.draft_folder(folder, 60).mkdir()
    (folder / ".tmp-step-00000080-hf" / "deeper").mkdir(parents=True)
    links = [".tmp-step-00000085", ".tmp-step-00000095-hf"]
    for name in links:
        (folder / name).symlink_to(step_folder(folder, 10))
    kept = [f".tmp-step-{name}" for name in ("00000065", "00000080-hf-mine", "7")]
    files = [".tmp-step-00000070", ".tmp-step-00000090-hf"]
    for name in kept:
        (folder / name / ".metadata").mkdir(parents=True)  # a folder is foreign
    for name in files:
        (folder / name).touch()
    folders.remove_drafts(folder)
    assert names(folder) == sorted(kept + files + links + STEPS)
    assert sound_steps(folder) == [10, 20, 30, 40]
    with pytest.raises(StorageError, match="00085 is in the way of a save, "):
        folders.start_draft(folder, 85)
    folders.remove_drafts(folder / "missing")


# ----- commit -----


def test_a_commit_survives_a_power_cut(folder, monkeypatch):
    draft, target = make_draft(folder, 50), step_folder(folder, 50)
    synced = []

    def fsync(descriptor):
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, target.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    folders.commit(draft, target)
    assert synced == [(draft.name, False), (folder.name, True)]


def test_a_committed_checkpoint_is_kept_if_it_verifies_and_else_makes_room(folder, notices):
    before = (step_folder(folder, 40) / MANIFEST).read_text()
    save(folder, 40)
    assert (step_folder(folder, 40) / MANIFEST).read_text() == before
    assert names(folder) == STEPS

    flip_bit(step_folder(folder, 40) / SHARD)
    save(folder, 40)
    assert sound_steps(folder) == [10, 20, 30, 40]
    [aside] = folder.glob("broken-step-00000040-*")
    assert find_problems(aside, hashes=True) == CHANGED
    assert f"broken: {CHANGED[0]}; kept as {aside}" in notices.text

    (step_folder(folder, 40) / MANIFEST).unlink()
    save(folder, 40)
    assert sound_steps(folder) == [10, 20, 30, 40]
    (step_folder(folder, 40) / MANIFEST).unlink()
    folders.set_aside_after(folder, 20)
    assert folders.steps_with_folder(folder) == [10, 20]


def test_a_foreign_folder_in_the_way_is_named(folder):
    foreign, draft = step_folder(folder, 50), make_draft(folder, 50)
    (foreign / "mine.txt").mkdir(parents=True)
    message = "step-00000050/mine.txt is in the way of a save, and no save has written it; move it"
    with pytest.raises(StorageError, match=message):
        folders.commit(draft, foreign)
    with pytest.raises(StorageError, match=message):
        folders.set_aside_after(folder, 40)
    foreign.rename(folder / "mine")
    foreign.touch()
    with pytest.raises(StorageError, match="step-00000050 cannot be written: Not a directory"):
        folders.commit(draft, foreign)
    assert foreign.is_file() and find_problems(draft, hashes=True) == []


@pytest.mark.parametrize("present", ["nothing", "sound", "broken"])
def test_a_kill_in_a_commit_loses_nothing(folders_of_kills, present):
    step = 50 if present == "nothing" else 40
    committed = [10, 20, 30] if present == "broken" else [10, 20, 30, 40]
    both, found = sorted({*committed, step}), []

    def prepare(folder):
        make_draft(folder, step)
        if present == "broken":
            flip_bit(step_folder(folder, 40) / SHARD)

    def commit(folder):
        folders.commit(folders.draft_folder(folder, step), step_folder(folder, step))

    for folder in folders_of_kills(commit, prepare=prepare):
        found.append(sound_steps(folder))
        folders.remove_drafts(folder)
        assert set(committed) <= set(sound_steps(folder))
        assert not folders.draft_folder(folder, step).exists()
        save(folder, step)
        assert sound_steps(folder) == both and found[-1] in (committed, both)
    assert len(found) > 3 and found[-1] == both


# ----- prune, set_aside_after -----


@pytest.mark.parametrize(("keep", "left"), [(0, 4), (1, 1), (2, 2), (4, 4), (9, 4)])
def test_the_newest_are_kept(folder, keep, left):
    prune(folder, keep)
    assert sound_steps(folder) == [10, 20, 30, 40][-left:]
    assert names(folder) == STEPS[-left:]


def test_broken_ones_do_not_count_and_foreign_ones_are_not_pruned(folder, notices):
    (folder / "step-00000001").mkdir()
    (step_folder(folder, 10) / "notes.txt").touch()
    for step in (20, 40):
        (step_folder(folder, step) / SHARD).unlink()
    prune(folder, 1)
    assert folders.steps_with_folder(folder) == [1, 10, 30, 40]
    assert "step-00000010 is not deleted: no save has written notes.txt in it" in notices.text
    (step_folder(folder, 30) / MANIFEST).write_text("{}")
    (step_folder(folder, 10) / "notes.txt").unlink()
    prune(folder, 1)
    assert steps_with_manifest(folder) == [10, 30, 40]  # with none that verifies, none is deleted


def test_a_kill_while_pruning_leaves_whole_checkpoints_or_none(folders_of_kills):
    found = []
    for folder in folders_of_kills(lambda folder: prune(folder, 2)):
        found.append(sound_steps(folder))
        assert found[-1] == steps_with_manifest(folder) and {30, 40} <= set(found[-1])
        folders.remove_drafts(folder)
        prune(folder, 2)
        assert names(folder) == ["step-00000030", "step-00000040"]
    # Two checkpoints: a rename, three files and the folder each.
    assert len(found) == 1 + 10 and found[-1] == [30, 40]


def test_later_steps_are_set_aside(folder, notices):
    shutil.rmtree(folder / "step-00000040")  # its export is set aside all the same
    for step in (20, 30, 40):
        (folder / f"step-000000{step}-hf").mkdir()
    folders.set_aside_after(folder, 20)
    assert steps_with_manifest(folder) == [10, 20]
    assert [path.name for path in folder.glob("step-*-hf")] == ["step-00000020-hf"]
    [aside] = folder.glob("superseded-step-00000030-[0-9]*")
    assert find_problems(aside, hashes=True) == []
    assert f"step-00000030 is past step 20: kept as {aside}" in notices.text
    for step in (30, 40):
        assert len(list(folder.glob(f"superseded-step-000000{step}-hf-*"))) == 1


# ----- steps_with_folder, commit: links -----
def test_links_are_refused_and_not_followed(folder):
    archive = step_folder(folder, 10).rename(folder.parent / "archive")
    draft, target = make_draft(folder, 10), step_folder(folder, 10)
    target.symlink_to(archive)
    for action in (folders.steps_with_folder, lambda folder: prune(folder, 1)):
        with pytest.raises(CheckpointError, match="step-00000010 is a link, .* move the folder"):
            action(folder)
    with pytest.raises(StorageError, match="step-00000010 is in the way of a save, "):
        folders.commit(draft, target)
    with pytest.raises(StorageError, match="step-00000010 is in the way of a save, "):
        folders.set_aside_after(folder, 5)
    assert target.readlink() == archive and find_problems(archive, hashes=True) == []


# ----- storage_errors -----
@pytest.mark.parametrize(
    "action",
    [
        lambda folder: folders.start_draft(folder, 50),
        lambda folder: folders.commit(folder / ".tmp-step-00000060", step_folder(folder, 60)),
        lambda folder: prune(folder, 1),
        lambda folder: folders.set_aside_after(folder, 10),
        lambda folder: folders.remove_drafts(folder),
    ],
)
def test_a_disk_that_fails_raises_a_storage_error(folder, monkeypatch, action):
    make_draft(folder, 60)
    full = Mock(side_effect=OSError(28, "No space left on device", str(folder / "file")))
    for name in ("mkdir", "rename", "unlink"):
        monkeypatch.setattr(Path, name, full)
    message = r"^\[checkpoint\] .*/file cannot be written: No space left on device; make"
    with pytest.raises(StorageError, match=message):
        action(folder)


# ----- find_kind -----


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ("config.json .metadata manifest.json", "torchtitan_lite"),
        ("config.json .metadata", "torchtitan"),
        ("config.json", "Hugging Face"),
        ("model-00001-of-00002.safetensors", "Hugging Face"),
    ],
)
def test_a_folder_has_the_kind_of_its_files(tmp_path, files, kind):
    for name in files.split():
        (tmp_path / name).touch()
    assert folders.find_kind(tmp_path) == kind


def test_a_checkpoint_without_its_manifest_is_not_torchtitans(folder):
    (step_folder(folder, 10) / MANIFEST).unlink()
    assert folders.find_kind(step_folder(folder, 10)) == "torchtitan_lite"
    (folder / "step-100").mkdir()
    (folder / "step-100/.metadata").touch()
    assert folders.find_kind(folder / "step-100") == "torchtitan"


def test_a_folder_without_weights_is_refused_with_what_is_there(folder, tmp_path):
    for path in ("empty", "other", "theirs/checkpoint/step-100"):
        (tmp_path / path).mkdir(parents=True)
    for path in ("other/notes.txt", "file", "theirs/checkpoint/step-100/.metadata"):
        (tmp_path / path).touch()
    kinds = r" It takes .*\(with manifest\.json\) or .*\(\.metadata .*\), or .*\(config\.json "
    for name, reason in (
        ("empty", "empty holds nothing"),
        ("other", r"other holds notes\.txt"),
        ("file", "file cannot be listed: Not a directory"),
        ("none/x", "none/x cannot be listed: No such file or directory"),
        ("theirs", "theirs holds checkpoint"),
        ("checkpoint", "holds step-00000010, .*, step-00000040"),
    ):
        with pytest.raises(CheckpointError, match=rf"initial_load_path: .*{reason}\.{kinds}"):
            folders.find_kind(tmp_path / name)
