"""Tables: rows of parquet files and of Hugging Face datasets."""

import gzip
import json
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.data import sources
from torchtitan_lite.data.rows import BadRow, Parser, TextRow
from torchtitan_lite.data.sources import open_source, read_parquet

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.parquet"


def write(path: Path, values: object, *, column: str = "text", **options: object) -> Path:
    table = pyarrow.table({"id": range(len(values)), column: values})
    parquet.write_table(table, path, **options)
    return path


def rows(path: Path, *, text_field: str = "text") -> list[TextRow]:
    return list(read_parquet(path, text_field))


# ----- read_parquet -----


def test_rows_are_numbered_from_1(path):
    write(path, ["one\r\n", "café"], column="body")
    assert rows(path, text_field="body") == [
        TextRow(str(path), 0, 1, "text", b"one\r\n"),
        TextRow(str(path), 0, 2, "text", "café".encode()),
    ]


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "string_view", "dictionary"])
def test_any_kind_of_string_is_text(path, kind):
    arguments = ("int32", "string") if kind == "dictionary" else ()
    write(path, pyarrow.array(["a", "é"]).cast(getattr(pyarrow, kind)(*arguments)))
    assert [row.data for row in rows(path)] == [b"a", "é".encode()]


def test_rows_without_text_are_bad(path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_ROW_BYTES", 20)
    values = [b"a", None, b"", b"x" * 20, b"x" * 21, b"\xff", b"b"]
    texts, bad = [], []
    for row in rows(write(path, pyarrow.array(values, "binary"))):
        try:
            texts.append(Parser("text")(row))
        except BadRow as error:
            bad.append(str(error).removeprefix(f"{path}, line "))
    assert texts == ["a", "x" * 20, "b"]
    assert bad == [
        '2: field "text" holds NoneType, not a string',
        "3: empty text",
        "5: longer than 20 bytes",
        "6: not UTF-8: byte 0xff, invalid start byte",
    ]


def test_all_row_groups_and_batches_are_read(path, monkeypatch):
    monkeypatch.setattr(sources, "BATCH_ROWS", 3)
    write(path, [f"text {i}" for i in range(25)], row_group_size=10)
    assert [row.data for row in rows(path)] == [b"text %d" % i for i in range(25)]


def test_column_must_be_there_and_hold_text(path):
    write(path, [["a"]])
    with pytest.raises(DataError, match=r"a\.parquet: .* \"body\" among \['id', 'text'\]"):
        rows(path, text_field="body")
    for column in ("id", "text"):
        with pytest.raises(DataError, match=r"a\.parquet: cannot be read: .* to large_binary"):
            rows(path, text_field=column)


def test_broken_files_are_refused(path, monkeypatch):
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    content = write(path, [f"text {i}" for i in range(1000)], **options).read_bytes()
    half, changed = content[: len(content) // 2], content.replace(b"text 500", b"text 5x0")
    for broken in (b"", b"PAR1", content[:-1], half, changed):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"a\.parquet: cannot be read: \S+"):
            rows(path)
    path.unlink()
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read: .*No such file or directory"):
        rows(path)

    # Whatever the library raises.
    path.write_bytes(content)
    for error in (IndexError, MemoryError, RuntimeError, TypeError):
        fail = Mock(side_effect=error("no such page"))
        monkeypatch.setattr(parquet.ParquetFile, "iter_batches", fail)
        with pytest.raises(DataError, match=r"a\.parquet: cannot be read: no such page$"):
            rows(path)


@pytest.mark.parametrize(
    ("module", "extra"),
    [("pyarrow", "parquet"), ("pyarrow.parquet", "parquet"), ("datasets", "hf")],
)
def test_a_missing_library_is_named_with_its_extra(path, monkeypatch, module, extra):
    source = f"hf:{path.parent}" if module == "datasets" else str(write(path, ["a"]))
    monkeypatch.setitem(sys.modules, module, None)
    package = module.partition(".")[0]
    with pytest.raises(DataError, match=rf'{source}: needs {package}; .*-lite\[{extra}\]"'):
        list(open_source(source).documents())


# ----- open_source, HF_PREFIX -----


@pytest.fixture
def datasets(monkeypatch, tmp_path_factory):
    """The library, without a network. It reads its settings when it is imported."""
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    library.disable_progress_bars()
    yield library
    library.enable_progress_bars()


def check_reading(path: str, texts: list[str], *, chunks: int = 1, **options: str) -> None:
    """The source has these texts, in so many chunks, whose rows are numbered from 1."""
    source = open_source(path, **options)
    found = [list(chunk()) for chunk in source.chunks()]
    assert (source.name, len(found)) == (path, chunks)
    assert [source.parser(row) for rows in found for row in rows] == texts
    assert list(source.documents()) == texts
    for number, of_chunk in enumerate(found, start=1):
        name = path if chunks == 1 else f"{path} part {number}"
        places = [(name, line) for line in range(1, len(of_chunk) + 1)]
        assert [(row.file, row.line) for row in of_chunk] == places


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
    with pytest.raises(DataError, match=r"^hf:allenai/c4: .*; check the network, .*HF_HOME: hf:F"):
        open_source("c4")


def test_rows_of_a_dataset_without_text_are_bad(tmp_path, datasets):
    datasets.Dataset.from_dict({"text": ["a", None, ""], "id": [1, 2, 3]}).save_to_disk(tmp_path)
    for field, reason in (("text", "line 2: .* holds NoneType,"), ("id", "line 1: .* holds int,")):
        with pytest.raises(DataError, match=f"^hf:{tmp_path}, {reason}"):
            list(open_source(f"hf:{tmp_path}", text_field=field).documents())


def test_a_dataset_that_is_not_there_or_breaks_off_is_refused(tmp_path, datasets):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n' * 3)
    for options in ({"text_field": "body"}, {"hf_split": "test"}, {"hf_name": "english"}):
        with pytest.raises(
            DataError, match=f"^hf:{tmp_path}: (cannot be read: |.* no column .body)"
        ):
            open_source(f"hf:{tmp_path}", **options)
    source = open_source(f"hf:{tmp_path}")
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(DataError, match=f"^hf:{tmp_path}: cannot be read: "):
        list(source.documents())
    with pytest.raises(DataError, match="cannot be read: .* doesn't contain any data files"):
        open_source(f"hf:{tmp_path}")


def test_fingerprint_of_a_dataset(tmp_path, datasets):
    split = datasets.Dataset.from_dict({"text": ["a"], "body": ["b"]})
    datasets.DatasetDict(train=split, test=split).save_to_disk(tmp_path / "saved")
    split.save_to_disk(tmp_path / "other")
    file = tmp_path / "files/train.jsonl"
    file.parent.mkdir()
    file.write_text('{"text": "a"}\n')

    def fingerprint(name: str, **options: str) -> str:
        return open_source(f"hf:{tmp_path}/{name}", **options).fingerprint

    seen = [fingerprint(name) for name in ("saved", "other", "files")]
    assert [fingerprint(name) for name in ("saved", "other", "files")] == seen
    seen += [fingerprint("saved", text_field="body"), fingerprint("saved", hf_split="test")]
    file.write_text('{"text": "ab"}\n')
    assert len({*seen, fingerprint("files")}) == 6
