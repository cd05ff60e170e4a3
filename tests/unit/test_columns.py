"""Tables: rows of parquet files and of Hugging Face datasets."""

import gzip
import json
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.catalog.datasets import NamedDataset
from torchtitan_lite.data import columns
from torchtitan_lite.data import rows as row_module
from torchtitan_lite.data.columns import read_parquet
from torchtitan_lite.data.rows import Row
from torchtitan_lite.data.sources import open_source

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.parquet"


def write(path: Path, values: object, *, column: str = "text", **options: object) -> Path:
    table = pyarrow.table({"id": range(len(values)), column: values})
    parquet.write_table(table, path, **options)
    return path


def rows(path: Path, *, text_field: str = "text") -> list[Row]:
    return list(read_parquet(path, NamedDataset("", text_field=text_field)))


# ----- read_parquet -----


def test_rows_are_numbered_from_1(path):
    write(path, ["one\r\n", "café"], column="body")
    assert rows(path, text_field="body") == [
        Row(f"{path}, line 1", "one\r\n"),
        Row(f"{path}, line 2", "café"),
    ]


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "string_view", "dictionary"])
def test_any_kind_of_string_is_text(path, kind):
    arguments = ("int32", "string") if kind == "dictionary" else ()
    write(path, pyarrow.array(["a", "é"]).cast(getattr(pyarrow, kind)(*arguments)))
    assert [row.text for row in rows(path)] == ["a", "é"]


def test_rows_without_text_are_bad(path, monkeypatch):
    monkeypatch.setattr(row_module, "MAX_ROW_BYTES", 20)
    values = [b"a", None, b"", b"x" * 20, b"x" * 21, b"\xff", b"b"]
    found = rows(write(path, pyarrow.array(values, "binary")))
    assert [row.text for row in found if row.text] == ["a", "x" * 20, "b"]
    bad = [f"{row.place}: {row.problem}" for row in found if row.problem]
    assert [row.removeprefix(f"{path}, line ") for row in bad] == [
        '2: field "text" holds NoneType, not a string',
        "3: empty text",
        "5: longer than 20 bytes",
        "6: not UTF-8: byte 0xff, invalid start byte",
    ]


def test_all_row_groups_and_batches_are_read(path, monkeypatch):
    monkeypatch.setattr(columns, "BATCH_ROWS", 3)
    write(path, [f"text {i}" for i in range(25)], row_group_size=10)
    assert [row.text for row in rows(path)] == [f"text {i}" for i in range(25)]


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
    [("pyarrow.parquet", "parquet"), ("datasets", "hf")],
)
def test_a_missing_library_is_named_with_its_extra(path, monkeypatch, module, extra):
    source = f"hf:{path.parent}" if module == "datasets" else str(write(path, ["a"]))
    monkeypatch.setitem(sys.modules, module, None)
    package = module.partition(".")[0]
    with pytest.raises(DataError, match=rf'{source}: needs {package}; .*-lite\[{extra}\]"'):
        list(open_source(source).documents())


# ----- open_source, open_hf_dataset -----


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


def check_reading(path: str, parts: list[list[str]], **options: str) -> None:
    """The source has these texts, in so many chunks, whose rows are numbered from 1."""
    source = open_source(path, **options)
    assert source.name == path
    assert [list(chunk()) for chunk in source.chunks()] == [
        [Row(f"{path} part {part}, line {line}", text) for line, text in enumerate(texts, start=1)]
        for part, texts in enumerate(parts, start=1)
    ]


def test_a_folder_of_data_files_is_read_file_by_file(tmp_path, datasets):
    for name, text in (("train-2", "c"), ("train-1", "b"), ("train-0", "a"), ("test", "d")):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"body": "{text}", "id": 1}}\n' * 2)
    options = {"text_field": "body"}
    check_reading(f"hf:{tmp_path}", [["a", "a"], ["b", "b"], ["c", "c"]], **options)
    check_reading(f"hf:{tmp_path}", [["d", "d"]], hf_split="test", hf_name="default", **options)


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

    check_reading(f"hf:{tmp_path}", [["a"], ["b"]], hf_name="en")
    check_reading(f"hf:{tmp_path}", [["c"]], hf_name="en", hf_split="validation")
    with pytest.raises(DataError, match=r"Config name is missing(.|\n)*\['en', 'other'\]"):
        open_source(f"hf:{tmp_path}")


def test_a_dataset_that_is_not_there_or_breaks_off_is_refused(tmp_path, datasets):
    with pytest.raises(DataError, match="^hf:allenai/c4: cannot be read: "):
        open_source("c4")
    (tmp_path / "train.jsonl").write_text('{"text": "a", "id": 1}\n{"text": null, "id": 2}\n' * 3)
    for options in ({"text_field": "body"}, {"hf_split": "test"}, {"hf_name": "english"}):
        with pytest.raises(
            DataError, match=f"^hf:{tmp_path}: (cannot be read: |.* no column .body)"
        ):
            open_source(f"hf:{tmp_path}", **options)
    for field, reason in (("text", "line 2: .* holds NoneType,"), ("id", "line 1: .* holds int,")):
        with pytest.raises(DataError, match=f"^hf:{tmp_path} part 1, {reason}"):
            list(open_source(f"hf:{tmp_path}", text_field=field).documents())
    source = open_source(f"hf:{tmp_path}")
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(DataError, match=f"^hf:{tmp_path} part 1: cannot be read: "):
        list(source.documents())
    with pytest.raises(DataError, match="cannot be read: .* doesn't contain any data files"):
        open_source(f"hf:{tmp_path}")


def test_fingerprint_of_a_dataset(tmp_path, datasets):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for split in ("train", "test"):
            (tmp_path / name / f"{split}.jsonl").write_text('{"text": "a", "body": "b"}\n')

    def fingerprint(name: str, **options: str) -> str:
        return open_source(f"hf:{tmp_path}/{name}", **options).fingerprint

    seen = [fingerprint("a"), fingerprint("b")]
    assert [fingerprint("a"), fingerprint("b")] == seen
    seen += [fingerprint("a", text_field="body"), fingerprint("a", hf_split="test")]
    (tmp_path / "a" / "train.jsonl").write_text('{"text": "ab"}\n')
    assert len({*seen, fingerprint("a")}) == 5
