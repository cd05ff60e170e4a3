"""Tables: rows of parquet files and of Hugging Face datasets."""

import gzip
import json
import sys
from pathlib import Path

import pytest

from torchtitan_lite.data import sources
from torchtitan_lite.data.rows import BadRow, Parser, TextRow
from torchtitan_lite.data.sources import open_source, read_parquet
from torchtitan_lite.errors import DataError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def write(path: Path, values: object, *, column: str = "text", **options: object) -> Path:
    table = pyarrow.table({"id": range(len(values)), column: values})
    parquet.write_table(table, path, **options)
    return path


def rows(path: Path, *, text_field: str = "text") -> list[TextRow]:
    return list(read_parquet(path, text_field))


def test_rows_are_numbered_from_1(tmp_path):
    path = write(tmp_path / "a.parquet", ["one\r\n", "café"], column="body")
    assert rows(path, text_field="body") == [
        TextRow(str(path), 0, 1, "text", b"one\r\n"),
        TextRow(str(path), 0, 2, "text", "café".encode()),
    ]


@pytest.mark.parametrize("dtype", ["string", "large_string", "binary", "string_view", "dictionary"])
def test_any_kind_of_string_is_text(tmp_path, dtype):
    kind = (
        pyarrow.dictionary("int32", "string")
        if dtype == "dictionary"
        else getattr(pyarrow, dtype)()
    )
    path = write(tmp_path / "a.parquet", pyarrow.array(["a", "é"]).cast(kind))
    assert [row.data for row in rows(path)] == [b"a", "é".encode()]


def test_rows_without_text_are_bad(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_ROW_BYTES", 20)
    values = pyarrow.array([b"a", None, b"", b"x" * 20, b"x" * 21, b"\xff", b"b"], "binary")
    texts, bad = [], []
    for row in rows(write(tmp_path / "a.parquet", values)):
        try:
            texts.append(Parser("text")(row))
        except BadRow as error:
            bad.append(str(error).removeprefix(f"{tmp_path}/a.parquet, "))
    assert texts == ["a", "x" * 20, "b"]
    assert bad == [
        'line 2: field "text" holds NoneType, not a string',
        "line 3: empty text",
        "line 5: longer than 20 bytes",
        "line 6: not UTF-8: byte 0xff, invalid start byte",
    ]


def test_all_row_groups_and_batches_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BATCH_ROWS", 3)
    path = write(tmp_path / "a.parquet", [f"text {i}" for i in range(25)], row_group_size=10)
    assert [row.data for row in rows(path)] == [b"text %d" % i for i in range(25)]


def test_column_must_be_there_and_hold_text(tmp_path):
    path = write(tmp_path / "a.parquet", [["a"]])
    with pytest.raises(
        DataError, match=r"a\.parquet: has no column \"body\" among \['id', 'text'\]"
    ):
        rows(path, text_field="body")
    for column in ("id", "text"):
        with pytest.raises(
            DataError, match=r"a\.parquet: cannot be read: Unsupported cast from .* to large_binary"
        ):
            rows(path, text_field=column)


def test_broken_files_are_refused(tmp_path):
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    path = write(tmp_path / "a.parquet", [f"text {i}" for i in range(1000)], **options)
    content = path.read_bytes()
    for broken in (
        b"",
        b"PAR1",
        content[:-1],
        content[: len(content) // 2],
        content.replace(b"text 500", b"text 5x0"),
    ):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"a\.parquet: cannot be read: \S+"):
            rows(path)
    path.unlink()
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read: .*No such file or directory"):
        rows(path)


@pytest.mark.parametrize("error", [IndexError, MemoryError, RuntimeError, TypeError])
def test_any_error_of_the_library_names_the_file(tmp_path, monkeypatch, error):
    def broken(*args: object, **options: object) -> None:
        raise error("no such page")

    path = write(tmp_path / "a.parquet", ["a"])
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", broken)
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read: no such page$"):
        rows(path)


@pytest.mark.parametrize(
    ("module", "extra"),
    [("pyarrow", "parquet"), ("pyarrow.parquet", "parquet"), ("datasets", "hf")],
)
def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch, module, extra):
    path = write(tmp_path / "a.parquet", ["a"])
    monkeypatch.setitem(sys.modules, module, None)
    source = f"hf:{tmp_path}" if module == "datasets" else str(path)
    package = module.partition(".")[0]
    with pytest.raises(
        DataError, match=rf'{source}: needs {package}; pip install "torchtitan-lite\[{extra}\]"'
    ):
        list(open_source(source).documents())


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    library = pytest.importorskip("datasets")
    library.disable_progress_bars()
    return library


def check_reading(path: str, texts: list[str], *, chunks: int = 1, **options: str) -> None:
    """The source has these texts, in so many chunks, whose rows are numbered from 1."""
    source = open_source(path, **options)
    found = [list(chunk()) for chunk in source.chunks()]
    assert (source.name, len(found)) == (path, chunks)
    assert [source.parser(row) for rows in found for row in rows] == texts
    assert list(source.documents()) == texts
    for number, of_chunk in enumerate(found, start=1):
        name = path if chunks == 1 else f"{path} part {number}"
        assert [(row.file, row.line) for row in of_chunk] == [
            (name, line) for line in range(1, len(of_chunk) + 1)
        ]


def test_datasets_are_read_in_pieces(tmp_path, datasets, monkeypatch):
    texts = [f"text {i}\n" for i in range(7)]
    monkeypatch.setattr(sources, "CHUNK_BYTES", 30)
    table = datasets.Dataset.from_dict({"text": texts})
    table.save_to_disk(tmp_path / "saved")
    check_reading(f"hf:{tmp_path}/saved", texts, chunks=table.data.nbytes // 30)
    folder = tmp_path / "files"
    folder.mkdir()
    for name, text in (("train-2", "c"), ("train-1", "b"), ("train-0", "a")):
        (folder / f"{name}.jsonl").write_text(f'{{"text": "{text}"}}\n' * 2)
    check_reading(f"hf:{folder}", ["a", "a", "b", "b", "c", "c"], chunks=3)


def test_saved_dataset(tmp_path, datasets):
    texts = [f"text {i}\n" for i in range(7)]
    split = datasets.Dataset.from_dict({"id": range(7), "body": texts})
    split.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=split, test=split.select([2])).save_to_disk(tmp_path / "two")
    check_reading(f"hf:{tmp_path}/one", texts, text_field="body")
    check_reading(f"hf:{tmp_path}/two", texts, text_field="body")
    check_reading(f"hf:{tmp_path}/two", texts[2:3], text_field="body", hf_split="test")


def test_folder_of_data_files(tmp_path, datasets):
    (tmp_path / "train.jsonl").write_text('{"text": "a", "id": 1}\n{"text": "b", "id": 2}\n')
    (tmp_path / "test.jsonl").write_text('{"text": "c", "id": 3}\n')
    check_reading(f"hf:{tmp_path}", ["a", "b"])
    check_reading(f"hf:{tmp_path}", ["c"], hf_split="test", hf_name="default")


def test_a_copy_of_c4_has_its_splits_and_configurations(tmp_path, datasets):
    """The hub's layout: lines of JSON in .json.gz files that README.md sorts into splits."""
    (tmp_path / "en").mkdir()
    for name, text in (("train.0", "a"), ("train.1", "b"), ("validation.0", "c")):
        content = json.dumps({"text": text, "timestamp": "2019", "url": ""}).encode()
        (tmp_path / f"en/c4-{name}.json.gz").write_bytes(gzip.compress(content))
    files = "  data_files:\n" + "".join(
        f"  - split: {split}\n    path: en/c4-{split}.*.json.gz\n"
        for split in ("train", "validation")
    )
    readme = f"---\nconfigs:\n- config_name: en\n{files}- config_name: other\n{files}---\n"
    (tmp_path / "README.md").write_text(readme)

    check_reading(f"hf:{tmp_path}", ["a", "b"], chunks=2, hf_name="en")
    check_reading(f"hf:{tmp_path}", ["c"], hf_name="en", hf_split="validation")
    with pytest.raises(DataError, match=r"Config name is missing(.|\n)*\['en', 'other'\]"):
        open_source(f"hf:{tmp_path}")


def test_without_a_network_the_way_to_a_copy_is_named(datasets):
    message = r"^hf:allenai/c4: .*; check the network, or name a downloaded copy in HF_HOME: hf:F"
    with pytest.raises(DataError, match=message):
        open_source("c4")


def test_rows_of_a_dataset_without_text_are_bad(tmp_path, datasets):
    datasets.Dataset.from_dict({"text": ["a", None, ""], "id": [1, 2, 3]}).save_to_disk(tmp_path)
    for field, reason in (
        ("text", "line 2: .* holds NoneType, not a string"),
        ("id", "line 1: .* holds int, not a"),
    ):
        with pytest.raises(DataError, match=f"^hf:{tmp_path}, {reason}"):
            list(open_source(f"hf:{tmp_path}", text_field=field).documents())


def test_a_dataset_that_is_not_there_is_refused(tmp_path, datasets):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    for options in ({"text_field": "body"}, {"hf_split": "test"}, {"hf_name": "english"}):
        with pytest.raises(DataError, match=f"^hf:{tmp_path}: cannot be read: "):
            open_source(f"hf:{tmp_path}", **options)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        DataError, match=r"empty: cannot be read: .* doesn't contain any data files"
    ):
        open_source(f"hf:{tmp_path}/empty")


def test_a_dataset_that_breaks_off_is_refused(tmp_path, datasets):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n' * 3)
    source = open_source(f"hf:{tmp_path}")
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(DataError, match=f"^hf:{tmp_path}: cannot be read: "):
        list(source.documents())


def test_fingerprint_of_a_dataset(tmp_path, datasets):
    split = datasets.Dataset.from_dict({"text": ["a"], "body": ["b"]})
    datasets.DatasetDict(train=split, test=split).save_to_disk(tmp_path / "saved")
    split.save_to_disk(tmp_path / "other")
    files = tmp_path / "files"
    files.mkdir()
    (files / "train.jsonl").write_text('{"text": "a"}\n')

    def fingerprint(name: str, **options: str) -> str:
        return open_source(f"hf:{tmp_path}/{name}", **options).fingerprint

    seen = [
        fingerprint("saved"),
        fingerprint("saved", text_field="body"),
        fingerprint("saved", hf_split="test"),
    ]
    seen += [fingerprint("other"), fingerprint("files")]
    assert seen[0] == fingerprint("saved")
    assert seen[-1] == fingerprint("files")
    (files / "train.jsonl").write_text('{"text": "ab"}\n')
    seen.append(fingerprint("files"))
    assert len(set(seen)) == 6
