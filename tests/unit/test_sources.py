"""Sources: which files are read, what a document is, and where bad input is."""

import os
import sysconfig
from pathlib import Path

import pytest

from torchtitan_lite.data import sources
from torchtitan_lite.data.sources import build_source
from torchtitan_lite.errors import DataError


def write(folder: Path, files: dict[str, bytes | str]) -> str:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder)


def documents(path: str, **options: str) -> list[str]:
    return list(build_source("pystdlib", path, **options).documents())


def test_pystdlib_is_the_running_library():
    source = build_source("pystdlib", None)
    texts = list(source.documents())
    library = Path(sysconfig.get_path("stdlib"))
    assert (library / "json" / "decoder.py").read_bytes().decode() in texts
    assert source.name == "pystdlib"
    assert sum(map(len, texts)) > 5_000_000
    assert "" not in texts


def test_pystdlib_without_packages_and_tests(tmp_path, monkeypatch):
    write(
        tmp_path,
        {
            "b.py": "b",
            "a/z.py": "az",
            "a/empty.py": "",
            "odd.py": b"caf\xe9",
            "LICENSE.txt": "no module",
            "site-packages/x.py": "no",
            "dist-packages/x.py": "no",
            "test/x.py": "no",
            "a/tests/x.py": "no",
            "a/idle_test/x.py": "no",
        },
    )
    monkeypatch.setattr(sysconfig, "get_path", lambda name: {"stdlib": str(tmp_path)}[name])
    assert list(build_source("pystdlib", None).documents()) == ["az", "b", "caf"]


def test_folder_is_read_in_order_of_names(tmp_path):
    write(
        tmp_path,
        {"b.txt": "1", "a/c.MD": "2", "a/b.rst": "3", "a.py": "4", "z.bin": b"\xff", "d.jsonl": '{"text": "5"}'},
    )
    assert documents(str(tmp_path)) == ["4", "3", "2", "1", "5"]


def test_files_keep_every_character_but_the_byte_order_mark(tmp_path):
    write(tmp_path, {"a.txt": b"\xef\xbb\xbfone\r\n\ttwo \n\n", "b.jsonl": b'\xef\xbb\xbf{"text": " three\\n"}\r\n'})
    assert documents(str(tmp_path / "a.txt")) == ["one\r\n\ttwo \n\n"]
    assert documents(str(tmp_path / "b.jsonl")) == [" three\n"]


def test_empty_documents_do_not_affect_the_next(tmp_path):
    rows = ['{"text": "a"}', '{"text": ""}', "", "  ", '{"text": "b"}', '{"text": ""}', '{"text": "c"}']
    write(tmp_path, {"a.jsonl": "\n".join(rows), "b.txt": "", "c.txt": "d"})
    assert documents(str(tmp_path)) == ["a", "b", "c", "d"]


def test_text_field(tmp_path):
    write(tmp_path, {"a.jsonl": '{"body": "x", "text": 1}\n'})
    assert documents(str(tmp_path / "a.jsonl"), text_field="body") == ["x"]


def test_a_long_text_is_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PART_BYTES", 8)
    write(tmp_path, {"a.txt": "12345\n12345\nab\n" + "é" * 20 + "\nend"})
    texts = documents(str(tmp_path / "a.txt"))
    assert texts == ["12345\n12345\n", "ab\n" + "é" * 20 + "\n", "end"]
    write(tmp_path, {"a.txt": b"12345\n12345\nab\n12345\n\xff\n"})
    with pytest.raises(DataError, match="line 5: "):
        documents(str(tmp_path / "a.txt"))


def test_reading_is_lazy(tmp_path):
    write(tmp_path, {"a.txt": "good", "b.txt": b"\xff"})
    texts = build_source("pystdlib", str(tmp_path)).documents()
    assert next(texts) == "good"
    with pytest.raises(DataError, match=r"b\.txt, line 1: 'utf-8' codec can't decode byte 0xff .*; make it UTF-8"):
        next(texts)


BAD_ROWS = {
    b'{"text": "a"': "Expecting ',' delimiter",
    b"[" * 100_000: "recursion",
    b'{"text": "\xff"}': "can't decode byte 0xff",
    b'{"text": "\\ud800"}': "surrogates not allowed",
    b'{"body": "a"}': "text_field = \"text\" names no string in {'body': 'a'}",
    b'{"text": null}': 'text_field = "text" names no string',
    b'["text"]': 'text_field = "text" names no string',
    b"7": 'text_field = "text" names no string in 7',
}


@pytest.mark.parametrize("row", BAD_ROWS, ids=[row[:12].decode(errors="replace") for row in BAD_ROWS])
def test_bad_row_is_named(tmp_path, row):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + row + b"\n")
    with pytest.raises(
        DataError, match=r'^\[training\] dataset_path = ".*": .*rows\.jsonl, line 3: .*; mend the row'
    ) as error:
        documents(str(path))
    assert BAD_ROWS[row] in str(error.value)


def test_missing_path_is_named_by_its_key(tmp_path):
    with pytest.raises(
        DataError, match=r'^\[validation\] dataset_path = ".*none": .*none does not exist; name a folder'
    ):
        build_source("pystdlib", str(tmp_path / "none"), key="[validation] dataset_path")


@pytest.mark.parametrize("files", [{}, {"data.parquet": "x", "README": "y"}])
def test_folder_without_text(tmp_path, files):
    with pytest.raises(DataError, match=r"holds 0 files of the kinds \.txt \.md \.rst \.py \.jsonl; name one"):
        build_source("pystdlib", write(tmp_path, files))


def test_file_of_another_kind(tmp_path):
    with pytest.raises(DataError, match="holds 0 files of the kinds"):
        build_source("pystdlib", write(tmp_path, {"a.parquet": "x"}) + "/a.parquet")


def test_only_empty_files(tmp_path):
    source = build_source("pystdlib", write(tmp_path, {"a.txt": "", "b.jsonl": "\n"}))
    with pytest.raises(DataError, match="0 bytes of text in 2 files"):
        list(source.documents())


def test_file_that_vanishes(tmp_path):
    source = build_source("pystdlib", write(tmp_path, {"a.txt": "a"}))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"a\.txt cannot be read: No such file or directory"):
        list(source.documents())


def test_folder_that_cannot_be_listed(tmp_path, monkeypatch):
    write(tmp_path, {"a.txt": "a", "locked/b.txt": "b"})
    scandir = os.scandir

    def denying(path):
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denying)
    with pytest.raises(DataError, match="locked cannot be read: Permission denied"):
        build_source("pystdlib", str(tmp_path))


def test_fingerprint_follows_names_sizes_times_and_field(tmp_path):
    def fingerprint(**options: str) -> str:
        return build_source("pystdlib", str(tmp_path), **options).fingerprint

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
