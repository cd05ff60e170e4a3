"""Files that are old or new, and whole."""

import os
from pathlib import Path

import pytest

from torchtitan_lite.files import fsync_folder, hash_sources, remove_folder, replace_file


class Killed(BaseException):
    """The end of the process."""


@pytest.mark.parametrize("content", ["neü", b"new"])
def test_a_file_is_replaced(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_text("old")
    replace_file(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_fails_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    path.write_text("old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_content_is_on_disk_before_the_name_and_the_name_before_the_return(
    tmp_path, monkeypatch
):
    path = tmp_path / "x.json"
    synced = []

    def fsync(descriptor):
        synced.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    replace_file(path, "new")
    (draft, replaced), last = synced
    assert Path(draft).parent == tmp_path and Path(draft).name.startswith(".x.json.")
    assert draft.endswith(f".{os.getpid()}")
    assert (replaced, last) == (False, (str(tmp_path), True))


def test_a_kill_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    path.write_text("old")

    def killed(descriptor):
        raise Killed

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(Killed):
        replace_file(path, "new")
    assert path.read_text() == "old"


def test_only_folders_are_synced_as_folders(tmp_path):
    fsync_folder(tmp_path)
    (tmp_path / "x").touch()
    with pytest.raises(NotADirectoryError):
        fsync_folder(tmp_path / "x")


def test_a_hash_of_sources_changes_with_names_and_contents_of_python_files_only(
    tmp_path: Path,
) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/a.py").write_text("x = 1")
    first = hash_sources(tmp_path)
    (tmp_path / "inner/notes.txt").write_text("x = 2")
    (tmp_path / "inner/__pycache__").mkdir()
    assert hash_sources(tmp_path) == first
    (tmp_path / "inner/a.py").rename(tmp_path / "inner/b.py")
    assert hash_sources(tmp_path) != first
    (tmp_path / "inner/b.py").rename(tmp_path / "inner/a.py")
    (tmp_path / "inner/a.py").write_text("x = 3")
    assert hash_sources(tmp_path) != first


def test_a_folder_is_removed_and_of_a_link_the_link_alone(tmp_path):
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    (folder / "mine").touch()
    link.symlink_to(folder)
    remove_folder(link)
    assert not link.is_symlink() and (folder / "mine").exists()
    remove_folder(folder)
    assert list(tmp_path.iterdir()) == []
