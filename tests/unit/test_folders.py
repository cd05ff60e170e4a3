"""The folder of checkpoints: what is a checkpoint, what is foreign, and what a kill at any moment
leaves."""

import logging
import os
import shutil
from pathlib import Path

import pytest
from sample_checkpoints import write_checkpoint

from torchtitan_lite.checkpoint.folders import (
    commit,
    committed_steps,
    draft_folder,
    find_kind,
    find_problems,
    named_steps,
    prune,
    remove_drafts,
    set_aside_after,
    start_draft,
    step_folder,
)
from torchtitan_lite.checkpoint.manifest import MANIFEST
from torchtitan_lite.errors import CheckpointError, StorageError


class Killed(BaseException):
    """The end of the process."""


@pytest.fixture
def kill(monkeypatch):
    """Ends the process before the `after`-th change to the disk from now, or not if that is
    None."""
    changes = {"left": -1}

    def counted(original):
        def change(*args, **kwargs):
            if changes["left"] == 0:
                raise Killed
            changes["left"] -= 1
            return original(*args, **kwargs)

        return change

    for name in ("rename", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    monkeypatch.setattr(os, "fsync", counted(os.fsync))

    def arm(after):
        changes["left"] = -1 if after is None else after

    return arm


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


def sound_steps(folder):
    return [
        step
        for step in committed_steps(folder)
        if not find_problems(step_folder(folder, step), hashes=True)
    ]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def damage(folder, step):
    """Change one byte."""
    path = step_folder(folder, step) / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[-200] ^= 1
    path.write_bytes(content)


def make_draft(folder, step):
    """The complete draft of a step, of other bytes than the checkpoint's if there is one."""
    draft = draft_folder(folder, step)
    write_checkpoint(folder.parent / "elsewhere", step, save_id="1" * 32).rename(draft)
    return draft


def test_names():
    assert step_folder(Path("x"), 100) == Path("x/step-00000100")
    assert draft_folder(Path("x"), 100) == Path("x/.tmp-step-00000100")


def test_only_folders_with_a_manifest_are_checkpoints(folder):
    (folder / "step-00000050").mkdir()
    (folder / "step-60").mkdir()
    (folder / "step-00000070").touch()
    make_draft(folder, 80)
    assert committed_steps(folder) == [10, 20, 30, 40]
    assert named_steps(folder) == [10, 20, 30, 40, 50]
    assert committed_steps(folder / "missing") == named_steps(folder / "missing") == []


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "rank-00000.json", MANIFEST])
def test_damage_is_found(folder, name):
    path = step_folder(folder, 20) / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert len(find_problems(path.parent, hashes=False)) == 1
    path.unlink()
    assert find_problems(path.parent, hashes=False) == [f"{name}: No such file or directory"]
    path.write_bytes(content)
    assert find_problems(path.parent, hashes=True) == []


def test_a_shard_of_another_step_is_found(folder):
    shard = "__0_0.distcp"
    shutil.copy(step_folder(folder, 10) / shard, step_folder(folder, 20) / shard)
    assert find_problems(step_folder(folder, 20), hashes=False) == []
    assert find_problems(step_folder(folder, 20), hashes=True) == [
        f"{shard}: its contents have changed"
    ]


def test_a_checkpoint_under_the_name_of_another_step_is_found(folder):
    step_folder(folder, 40).rename(step_folder(folder, 50))
    assert find_problems(step_folder(folder, 50), hashes=True) == ["manifest.json: is of step 40"]
    aside = step_folder(folder, 30).rename(folder / "best")
    assert find_problems(aside, hashes=True) == []


def test_a_draft_is_new_and_empty(folder):
    draft = start_draft(folder / "deeper" / "still", 50)
    assert draft == folder / "deeper" / "still" / ".tmp-step-00000050"
    for name in (
        ".metadata.tmp",
        ".metadata",
        "__0_0.distcp",
        "rank-00012.json",
        ".manifest.json.host.1",
        MANIFEST,
    ):
        (draft / name).touch()
    assert names(start_draft(folder / "deeper" / "still", 50)) == []


@pytest.mark.parametrize("foreign", ["notes.txt", "weights.distcp", "rank-00000.json.bak"])
def test_foreign_files_in_drafts_are_never_deleted(folder, foreign):
    draft = make_draft(folder, 50)
    (draft / foreign).touch()
    before = names(draft)
    with pytest.raises(
        StorageError,
        match=rf"\.tmp-step-00000050/{foreign} is in the way of a save; move it out of ",
    ):
        start_draft(folder, 50)
    remove_drafts(folder)
    assert names(draft) == before


def test_folders_in_drafts_are_foreign(folder):
    (draft_folder(folder, 50) / ".metadata").mkdir(parents=True)
    remove_drafts(folder)
    assert names(draft_folder(folder, 50)) == [".metadata"]


def test_only_drafts_are_removed(folder):
    make_draft(folder, 50)
    draft_folder(folder, 60).mkdir()
    (folder / ".tmp-step-7").mkdir()
    (folder / ".tmp-step-00000070").touch()
    (folder / "step-00000080").mkdir()
    (folder / ".tmp-step-00000080-hf" / "deeper").mkdir(parents=True)
    (folder / ".tmp-step-00000090-hf").touch()
    (folder / ".tmp-step-00000080-hf-mine").mkdir()
    remove_drafts(folder)
    foreign = ["step-00000070", "step-00000080-hf-mine", "step-00000090-hf", "step-7"]
    steps = [f"step-000000{step}" for step in (10, 20, 30, 40, 80)]
    assert names(folder) == [*(f".tmp-{name}" for name in foreign), *steps]
    remove_drafts(folder / "missing")


def test_a_commit_gives_the_draft_its_name(folder):
    commit(make_draft(folder, 50), step_folder(folder, 50))
    assert sound_steps(folder) == [10, 20, 30, 40, 50]
    assert not draft_folder(folder, 50).exists()


def test_a_commit_survives_a_power_cut(folder, monkeypatch):
    draft, target = make_draft(folder, 50), step_folder(folder, 50)
    synced = []

    def fsync(descriptor):
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, target.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    commit(draft, target)
    assert synced == [(draft.name, False), (folder.name, True)]


def test_what_was_committed_and_verifies_is_kept(folder):
    before = (step_folder(folder, 40) / MANIFEST).read_text()
    commit(make_draft(folder, 40), step_folder(folder, 40))
    assert (step_folder(folder, 40) / MANIFEST).read_text() == before
    assert names(folder) == [f"step-000000{step}" for step in (10, 20, 30, 40)]


def test_what_was_committed_and_is_broken_is_renamed(folder, caplog):
    damage(folder, 40)
    commit(make_draft(folder, 40), step_folder(folder, 40))
    assert sound_steps(folder) == [10, 20, 30, 40]
    [aside] = folder.glob("broken-step-00000040-*")
    assert find_problems(aside, hashes=True) == ["__0_0.distcp: its contents have changed"]
    assert f"broken: __0_0.distcp: its contents have changed; kept as {aside}" in caplog.text


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("folder", "is in the way of a save: mine.txt in it was written by no save"),
        ("file", "cannot be written: Not a direct"),
    ],
)
def test_a_foreign_folder_in_the_way_is_named(folder, kind, reason):
    foreign = step_folder(folder, 50)
    if kind == "folder":
        foreign.mkdir()
        (foreign / "mine.txt").write_text("mine")
    else:
        foreign.touch()
    draft = make_draft(folder, 50)
    with pytest.raises(StorageError, match=rf"step-00000050 {reason}"):
        commit(draft, foreign)
    assert foreign.is_file() or names(foreign) == ["mine.txt"]
    assert find_problems(draft, hashes=True) == []


def test_a_checkpoint_that_lost_its_manifest_makes_room(folder):
    (step_folder(folder, 40) / "manifest.json").unlink()
    commit(make_draft(folder, 40), step_folder(folder, 40))
    assert sound_steps(folder)[-1] == 40
    (step_folder(folder, 40) / "manifest.json").unlink()
    set_aside_after(folder, 20)
    assert named_steps(folder) == [10, 20]


@pytest.mark.parametrize("present", ["nothing", "sound", "broken"])
def test_a_kill_in_a_commit_loses_nothing(originals, tmp_path, kill, present):
    target_step = 50 if present == "nothing" else 40
    committed = {"nothing": [10, 20, 30, 40], "sound": [10, 20, 30, 40], "broken": [10, 20, 30]}[
        present
    ]
    for after in range(100):
        folder = shutil.copytree(originals, tmp_path / str(after) / "checkpoint")
        if present == "broken":
            damage(folder, 40)
        draft = make_draft(folder, target_step)
        kill(after)
        try:
            commit(draft, step_folder(folder, target_step))
        except Killed:
            kill(None)
            assert sound_steps(folder) in (committed, sorted({*committed, target_step}))
            remove_drafts(folder)
            assert set(committed) <= set(sound_steps(folder))
            assert not draft.exists()
            commit(make_draft(folder, target_step), step_folder(folder, target_step))
            assert sound_steps(folder) == sorted({*committed, target_step})
        else:
            break
    kill(None)
    assert sound_steps(folder) == sorted({*committed, target_step})
    assert after >= 3


@pytest.mark.parametrize(
    ("keep", "left"),
    [(0, [10, 20, 30, 40]), (1, [40]), (2, [30, 40]), (4, [10, 20, 30, 40]), (9, [10, 20, 30, 40])],
)
def test_the_newest_are_kept(folder, keep, left):
    prune(folder, keep)
    assert sound_steps(folder) == left
    assert names(folder) == [f"step-000000{step}" for step in left]


def test_broken_ones_do_not_count(folder):
    (step_folder(folder, 40) / "__0_0.distcp").unlink()
    (step_folder(folder, 20) / "__0_0.distcp").unlink()
    prune(folder, 1)
    assert committed_steps(folder) == [30, 40]
    (step_folder(folder, 30) / MANIFEST).write_text("{}")
    prune(folder, 1)
    assert committed_steps(folder) == [30, 40]  # with none that verifies, none is deleted


def test_foreign_folders_and_files_are_not_pruned(folder, caplog):
    (folder / "step-00000001").mkdir()
    (step_folder(folder, 10) / "notes.txt").touch()
    prune(folder, 1)
    assert named_steps(folder) == [1, 10, 40]
    assert "step-00000010 is not deleted: notes.txt in it was written by no save" in caplog.text


@pytest.fixture
def archive(folder):
    """The checkpoint of step 10 on another disk, with a link to it in its place."""
    moved = step_folder(folder, 10).rename(folder.parent / "archive")
    step_folder(folder, 10).symlink_to(moved)
    return moved


def test_pruning_a_linked_checkpoint_removes_the_link_only(folder, archive):
    prune(folder, 1)
    assert names(folder) == ["step-00000040"]
    assert len(names(archive)) == 4


@pytest.mark.parametrize("action", [remove_drafts, lambda folder: start_draft(folder, 50).rmdir()])
@pytest.mark.parametrize("target", ["archive", "missing"])
def test_a_linked_draft_makes_room_and_its_target_stays(folder, archive, action, target):
    draft_folder(folder, 50).symlink_to(folder.parent / target)
    action(folder)
    assert not draft_folder(folder, 50).is_symlink()
    assert len(names(archive)) == 4


@pytest.mark.parametrize("state", ["sound", "broken", "missing"])
def test_a_link_under_the_name_of_a_commit_is_kept_or_renamed(folder, archive, state):
    if state == "missing":
        shutil.rmtree(archive)
    elif state == "broken":
        damage(folder, 10)
    before = names(archive) if archive.exists() else []
    commit(make_draft(folder, 10), step_folder(folder, 10))
    assert step_folder(folder, 10).is_symlink() == (state == "sound")
    assert sound_steps(folder) == [10, 20, 30, 40]
    assert len(list(folder.glob("broken-step-00000010-*"))) == (state != "sound")
    assert (names(archive) if archive.exists() else []) == before


def test_a_linked_checkpoint_of_a_later_step_is_set_aside(folder, archive):
    step_folder(folder, 10).rename(step_folder(folder, 50))
    set_aside_after(folder, 40)
    [aside] = folder.glob("superseded-step-00000050-*")
    assert aside.readlink() == archive
    assert len(names(archive)) == 4


def test_a_kill_while_pruning_leaves_whole_checkpoints_or_none(originals, tmp_path, kill):
    for after in range(100):
        folder = shutil.copytree(originals, tmp_path / str(after))
        kill(after)
        try:
            prune(folder, 2)
        except Killed:
            kill(None)
            assert sound_steps(folder) == committed_steps(folder)
            assert {30, 40} <= set(sound_steps(folder))
            remove_drafts(folder)
            prune(folder, 2)
            assert names(folder) == ["step-00000030", "step-00000040"]
        else:
            break
    kill(None)
    assert sound_steps(folder) == [30, 40]
    assert after == 12  # two checkpoints: a rename, four files and the folder each


def test_later_steps_are_set_aside(folder, caplog):
    caplog.set_level(logging.INFO)
    for step in (20, 30):
        (folder / f"step-000000{step}-hf").mkdir()
    shutil.rmtree(folder / "step-00000040")
    (folder / "step-00000040-hf").mkdir()
    set_aside_after(folder, 20)
    assert committed_steps(folder) == [10, 20]
    assert [path.name for path in folder.glob("step-*-hf")] == ["step-00000020-hf"]
    [aside] = folder.glob("superseded-step-00000030-[0-9]*")
    assert find_problems(aside, hashes=True) == []
    assert f"step-00000030 is of a run past step 20: kept as {aside}" in caplog.text
    for step in (30, 40):  # also where its checkpoint was removed
        assert len(list(folder.glob(f"superseded-step-000000{step}-hf-*"))) == 1


@pytest.mark.parametrize(
    "action",
    [
        lambda folder: start_draft(folder, 50),
        lambda folder: commit(folder / ".tmp-step-00000060", step_folder(folder, 60)),
        lambda folder: prune(folder, 1),
        lambda folder: set_aside_after(folder, 10),
        lambda folder: remove_drafts(folder),
    ],
    ids=["start_draft", "commit", "prune", "set_aside_after", "remove_drafts"],
)
def test_a_disk_that_fails_raises_a_storage_error(folder, monkeypatch, action):
    make_draft(folder, 60)

    def fail(path, *args, **kwargs):
        raise OSError(28, "No space left on device", str(path))

    for name in ("mkdir", "rename", "unlink"):
        monkeypatch.setattr(Path, name, fail)
    with pytest.raises(
        StorageError,
        match=r"^\[checkpoint\] .*checkpoint.* cannot be written: No space left on devic",
    ):
        action(folder)


def test_the_kind_of_a_folder_is_told_by_its_files(folder, tmp_path):
    for name, kind in (
        ("manifest.json", "torchtitan_lite"),
        ("rank-00000.json", "torchtitan_lite"),  # without its manifest, it is broken
        (".metadata", "torchtitan"),
        ("config.json", "Hugging Face"),
        ("model-00001-of-00002.safetensors", "Hugging Face"),
    ):
        path = tmp_path / f"with {name}"
        path.mkdir()
        (path / name).touch()
        assert find_kind(path) == kind
    assert find_kind(step_folder(folder, 10)) == "torchtitan_lite"


def test_what_has_no_weights_is_said_with_what_is_there(folder, tmp_path):
    empty, other, file, theirs = (tmp_path / name for name in ("empty", "other", "file", "theirs"))
    for path in (empty, other):
        path.mkdir()
    (other / "notes.txt").touch()
    file.touch()
    (theirs / "checkpoint/step-100").mkdir(parents=True)
    (theirs / "checkpoint/step-100/.metadata").touch()
    kinds = (
        r" It takes the folder of a checkpoint of torchtitan_lite \(with manifest\.json\) or "
        r"torchtitan \(\.metadata .*\), or of a Hugging Face model \(config\.json "
    )
    for path, reason in (
        (empty, "empty holds nothing"),
        (other, r"other holds notes\.txt"),
        (file, "file cannot be listed: Not a directory"),
        (tmp_path / "none/x", "none/x is missing; .*step-00000010, .*: name one"),
        (theirs, "theirs holds .*/theirs/checkpoint/step-100"),
        (folder, "is no checkpoint; .* holds .*/step-00000010, .*: name one"),
    ):
        with pytest.raises(CheckpointError, match=rf"initial_load_path: .*{reason}\.{kinds}"):
            find_kind(path)
