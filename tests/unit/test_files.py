"""Files that are old or new, and whole."""

import errno
import hashlib
import os
import re
import resource
from pathlib import Path

import pytest

from torchtitan_lite.base.files import (
    READ_BYTES,
    allow_open_files,
    fsync_folder,
    hash_file,
    hash_sources,
    remove_folder,
    replace_file,
    storage_fix,
)


class Killed(BaseException):
    """The end of the process."""


@pytest.fixture
def old(tmp_path):
    """A file that says "old", alone in its folder."""
    path = tmp_path / "x.json"
    path.write_text("old")
    return path


@pytest.mark.parametrize("content", ["neü", b"new"])
def test_replace_file(old, content):
    replace_file(old, content)
    assert old.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(old.parent.iterdir()) == [old]


@pytest.mark.parametrize(
    ("error", "files"),
    [(OSError(28, "No space left on device"), 1), (Killed(), 2)],  # a kill leaves the draft
)
def test_replace_file_leaves_the_old_file_if_it_fails(old, monkeypatch, error, files):
    def fail(descriptor):
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(error)):
        replace_file(old, "new")
    assert old.read_text() == "old"
    assert len(list(old.parent.iterdir())) == files


def test_replace_file_syncs_the_content_before_the_rename_and_then_the_folder(
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


def test_fsync_folder_refuses_a_file(old):
    fsync_folder(old.parent)
    with pytest.raises(NotADirectoryError):
        fsync_folder(old)


@pytest.mark.parametrize("size", [0, 1, READ_BYTES - 1, READ_BYTES, 2 * READ_BYTES + 1])
def test_hash_file_reads_the_whole_file(tmp_path, size):
    content = (bytes(range(251)) * (size // 251 + 1))[:size]
    (tmp_path / "x").write_bytes(content)
    assert hash_file(tmp_path / "x") == hashlib.sha256(content).hexdigest()


def test_hash_sources_changes_with_names_and_contents_of_python_files_only(tmp_path):
    file = tmp_path / "inner/a.py"
    file.parent.mkdir()
    file.write_text("x = 1")
    first = hash_sources(tmp_path)
    (tmp_path / "inner/notes.txt").write_text("x = 2")
    assert hash_sources(tmp_path) == first
    file = file.rename(tmp_path / "inner/b.py")
    assert hash_sources(tmp_path) != first
    file.rename(tmp_path / "inner/a.py").write_text("x = 3")
    assert hash_sources(tmp_path) != first


def test_remove_folder_removes_only_the_link_of_a_link(tmp_path):
    folder, link = tmp_path / "folder", tmp_path / "link"
    (folder / "inner").mkdir(parents=True)
    link.symlink_to(folder)
    remove_folder(link)
    assert not link.is_symlink() and (folder / "inner").exists()
    remove_folder(folder)
    assert list(tmp_path.iterdir()) == []


# ----- storage_fix, allow_open_files -----


@pytest.mark.parametrize(("code", "fix"), [
    (errno.EDQUOT, "make room"),
    (errno.EROFS, "fix its permissions"),
    (errno.EMFILE, "check the path, its disk and the limits .ulimit"),
])  # fmt: skip
def test_the_fix_follows_the_error(code, fix):
    assert re.match(fix, storage_fix(OSError(code, "")))


def test_the_fix_of_a_url():
    error = OSError(errno.EIO, "Unable to locate credentials", "s3://bucket/folder")
    assert storage_fix(error) == "check the URL, the credentials and the network"


def test_allow_open_files_up_to_the_systems_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
