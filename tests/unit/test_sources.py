"""Sources: which files are read and in which order, and how it is cut into chunks."""

import gzip
import os
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.catalog.datasets import DATASETS, NamedDataset
from torchtitan_lite.data import sources
from torchtitan_lite.data.rows import Row
from torchtitan_lite.data.sources import open_source


def write(folder: Path, files: dict[str, bytes | str]) -> str:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder)


def documents(path: str, **options: str) -> list[str]:
    return [row.text for chunk in open_source(path, **options).chunks() for row in chunk()]


# ----- open_source, DATASETS -----


def test_pystdlib_is_the_running_library():
    texts = documents("pystdlib")
    library = Path(sysconfig.get_path("stdlib"))
    assert (library / "json" / "decoder.py").read_bytes().decode() in texts
    assert open_source("pystdlib").name == "pystdlib"
    assert sum(map(len, texts)) > 5_000_000
    assert "" not in texts


def test_pystdlib_without_packages_and_tests(tmp_path, monkeypatch, notices):
    skipped = ("site-packages", "dist-packages", "test", "a/tests", "a/idle_test")
    files = {"b.py": "b", "a/z.py": "az", "a/empty.py": "", "NO.txt": "no"}
    write(tmp_path, files | {f"{folder}/x.py": "no" for folder in skipped})
    monkeypatch.setitem(DATASETS, "pystdlib", replace(DATASETS["pystdlib"], path=str(tmp_path)))
    assert documents("pystdlib") == ["az", "b"]
    assert notices.messages == []


def test_a_dataset_is_a_row_of_the_table(tmp_path, monkeypatch):
    write(tmp_path, {"a.jsonl": '{"body": "x"}', "b.txt": "y", "old/c.jsonl": "z"})
    row = NamedDataset(str(tmp_path), (".jsonl",), frozenset({"old"}), text_field="body")
    monkeypatch.setitem(DATASETS, "mine", row)
    assert documents("mine") == ["x"]
    assert open_source("mine").name == "mine"


def test_all_readable_kinds(tmp_path):
    files = {
        "a.txt": "1",
        "b.MD": "2",
        "c.rst.gz": gzip.compress(b"3"),
        "d.py.ZST": zstd.compress(b"4"),
        "e.jsonl": '{"text": "5"}',
        "f.jsonl.gz": gzip.compress(b'{"text": "6"}'),
        "g.jsonl.zst": zstd.compress(b'{"text": "7"}'),
    }
    others = dict.fromkeys(("h.bin", "i.gz", "j.txt.bz2", "k.parquet"), b"\xff")
    empty = {"0.txt": "", "dd.jsonl": "\n"}
    write(tmp_path, files | others | empty)
    assert documents(str(tmp_path)) == list("1234567")
    assert documents(str(tmp_path / "d.py.ZST")) == ["4"]


NAMES = st.text("aB.-0/é", min_size=1, max_size=6).filter(
    lambda name: not any(part.startswith(".") or not part for part in name.split("/"))
)


@given(names=st.lists(NAMES, min_size=1, max_size=12))
@settings(max_examples=100, deadline=None)
def test_files_come_in_the_order_of_their_paths(tmp_path_factory, names):
    folder = tmp_path_factory.mktemp("order")
    paths = {f"{name}.txt" for name in names} | {f"{name}/x.txt" for name in names}
    write(folder, {path: path for path in paths})
    assert documents(str(folder)) == sorted(paths)


def test_hidden_files_are_no_text(tmp_path):
    write(tmp_path, dict.fromkeys((".a.txt", ".git/a.txt", ".checkpoints/a.json"), "no"))
    refused(tmp_path, "holds 0 files of .* not hidden")
    assert documents(str(tmp_path / ".git")) == ["no"]
    write(tmp_path, {"README.md": "read", "en/a.json.gz": gzip.compress(b'{"text": "a"}')})
    assert documents(str(tmp_path)) == ["read", "a"]


def test_the_longest_window_of_zstd_is_read(tmp_path):
    """As `zstd --long=31` writes it, from a pipe."""
    frame = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 31})
    write(tmp_path, {"a.txt.zst": frame.compress(b"text") + frame.flush()})
    assert documents(str(tmp_path)) == ["text"]


def test_a_bad_row_has_its_place_and_problem(tmp_path):
    write(tmp_path, {"a.txt": "good", "b.jsonl": '{"text": "good"}\n\n{"text": ""}\n'})
    (chunk,) = open_source(str(tmp_path)).chunks()
    assert [row.text for row in chunk()] == ["good", "good", ""]
    assert [*chunk()][-1] == Row(f"{tmp_path}/b.jsonl, line 3", "", "empty text")


# ----- chunks, CHUNK_BYTES -----
@pytest.mark.parametrize(("chunk_bytes", "chunks"), [(1, 9), (100, 3), (10_000, 1)])
def test_chunks_have_the_rows_of_the_source_in_order(tmp_path, monkeypatch, chunk_bytes, chunks):
    text = b"one line\nanother line\n" * 4
    files = {"empty.txt": b"", "a/text.md": text, "a/rows.jsonl": b'{"text": "a"}\n{' * 3}
    packed = {f"b/{name}.gz": gzip.compress(content) for name, content in files.items()}
    packed |= {f"b/{name}.zst": zstd.compress(content) for name, content in files.items()}
    source = open_source(write(tmp_path, files | packed))

    def read(*, backwards: bool = False) -> list[Row]:
        """All rows. Chunks can be read in any order."""
        found = [list(chunk()) for chunk in [*source.chunks()][:: -1 if backwards else 1]]
        return [row for rows in found[:: -1 if backwards else 1] for row in rows]

    whole = read()
    assert len({row.place.partition(",")[0] for row in whole}) == 6  # all but the empty ones
    monkeypatch.setattr(sources, "CHUNK_BYTES", chunk_bytes)
    assert read() == read(backwards=True) == whole
    assert len(list(source.chunks())) == chunks


# ----- open_source: links, other files, DataError -----


def test_linked_files_and_folders_are_read(tmp_path):
    write(tmp_path, {"corpus/a.txt": "a", "elsewhere/b.txt": "b", "elsewhere/c/d.txt": "d"})
    corpus = tmp_path / "corpus"
    (corpus / "link").symlink_to(tmp_path / "elsewhere")
    (corpus / "again").symlink_to(tmp_path / "elsewhere" / "c")
    (corpus / "e.txt").symlink_to(tmp_path / "elsewhere" / "b.txt")
    assert documents(str(corpus)) == ["a", "d", "b", "b", "d"]


def refused(path: Path, message: str) -> None:
    with pytest.raises(DataError, match=message):
        documents(str(path))


def test_a_link_that_leads_nowhere_is_refused(tmp_path):
    corpus = tmp_path / "corpus"
    write(corpus, {"a.txt": "a"})
    (corpus / "passed over.bin").symlink_to("nowhere")
    assert documents(str(corpus)) == ["a"]
    (corpus / "b.txt").symlink_to("nowhere")
    refused(corpus, r"corpus/b\.txt: is missing, a broken link or no regular file; remove it")
    (corpus / "b.txt").unlink()
    (corpus / "b.txt").symlink_to("b.txt")
    refused(corpus, "corpus: cannot be read: Too many levels of symbolic links")


def test_a_link_back_is_refused(tmp_path):
    write(tmp_path, {"a/b/c.txt": "c"})
    (tmp_path / "a" / "b" / "loop").symlink_to(tmp_path / "a")
    refused(tmp_path, "a/b/loop/.*: cannot be read: (Too many levels|File name too long)")


@pytest.mark.timeout(20)
def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    refused(tmp_path, r"a\.txt: is missing, a broken link or no regular file")
    refused(tmp_path / "a.txt", r"a\.txt: is no file of")


def test_files_of_other_kinds_are_counted(tmp_path, notices):
    write(tmp_path, {"a.txt": "a", "f.tar.bz2": b"", "x/g.bz2": b"", "LICENSE": b""})
    assert documents(str(tmp_path)) == ["a"]
    (message,) = notices.messages
    assert message.startswith(f"{tmp_path}: 3 files are not read: they are no .txt ")


def test_the_ending_decides_and_nothing_in_a_file(tmp_path):
    for name in ("a.txt.gz", "b.md.ZST"):
        write(tmp_path, {name: b"no such format"})
        refused(tmp_path / name, f"{name}: cannot be read: ")


@pytest.mark.parametrize(("files", "name", "message"), [
    ({}, "none", r"/none: does not exist; name a folder, or a file of \.txt \.md \.rst"),
    ({}, ".", r"^\.: holds 0 files of \.txt .*; name another; .* hf:FOLDER"),
    ({"data.bin": "x", "README": "y"}, ".", r"^\.: holds 0 files of "),
    ({}, "x" * 300, r"^x+: cannot be read: File name too long$"),
    ({"a.csv": "x"}, "a.csv", r"a\.csv: is no file of \.txt .*; name one, or a folder; "),
])  # fmt: skip
def test_what_holds_no_text_is_refused(tmp_path, monkeypatch, files, name, message):
    monkeypatch.chdir(write(tmp_path, files))
    refused(name, message)


def test_file_that_vanishes(tmp_path):
    source = open_source(write(tmp_path, {"a.txt": "a"}) + "/a.txt")
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"a\.txt: is missing, a broken link or no regular file"):
        list(source.chunks())


def test_folder_that_cannot_be_listed(tmp_path, monkeypatch):
    write(tmp_path, {"a.txt": "a", "locked/b.txt": "b"})
    scandir = os.scandir

    def denying(path):
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denying)
    refused(tmp_path, "locked: cannot be read: Permission denied")


# ----- fingerprint_now -----
def test_fingerprint_follows_names_sizes_times_and_field(tmp_path):
    def fingerprint(**options: str) -> str:
        return open_source(str(tmp_path), **options).fingerprint

    write(tmp_path, {"a.txt": "a", "passed over": "x"})
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    seen = [fingerprint()]
    (tmp_path / "passed over").unlink()
    assert fingerprint() == seen[0]
    seen.append(fingerprint(text_field="body"))
    os.utime(tmp_path / "a.txt", ns=(1, 2))
    seen.append(fingerprint())
    write(tmp_path, {"a.txt": "ab"})
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    seen.append(fingerprint())
    write(tmp_path, {"b.txt": ""})
    seen.append(fingerprint())
    assert len(set(seen)) == 5
