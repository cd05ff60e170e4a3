"""Hugging Face datasets: which rows are read, in which parts, and what is refused."""

import gzip
import json
import sys

import pytest

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.data.rows import Row
from torchtitan_lite.data.sources import Source, open_source

# ----- open_hf_dataset -----


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


def read(source: Source) -> list[list[Row]]:
    """The rows of each chunk."""
    return [list(chunk()) for chunk in source.chunks()]


def check_reading(path: str, parts: list[list[str]], **options: str) -> None:
    """The source has these texts, in so many chunks, whose rows are numbered from 1."""
    source = open_source(path, **options)
    assert source.name == path
    assert read(source) == [
        [Row(f"{path} part {part}, line {line}", text) for line, text in enumerate(texts, start=1)]
        for part, texts in enumerate(parts, start=1)
    ]


def test_a_folder_of_data_files_is_read_file_by_file(tmp_path, datasets):
    for name, text in (("train-2", "c"), ("train-1", "b"), ("train-0", "a"), ("test", "d")):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"body": "{text}", "id": 1}}\n' * 2)
    options = {"text_field": "body"}
    check_reading(f"hf:{tmp_path}", [["a", "a"], ["b", "b"], ["c", "c"]], **options)
    check_reading(f"hf:{tmp_path}", [["d", "d"]], hf_split="test", hf_name="default", **options)


def test_a_folder_of_parquet_files_is_read(tmp_path, datasets):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.core.pa.table({"id": [1, 2, 3], "body": ["a", None, "é"]})
    parquet.write_table(table, tmp_path / "train.parquet")
    (rows,) = read(open_source(f"hf:{tmp_path}", text_field="body"))
    assert [row.text for row in rows] == ["a", "", "é"]
    assert rows[1].problem == 'field "body" holds NoneType, not a string'
    file = tmp_path / "train.parquet"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=f"^hf:{tmp_path}: cannot be read: .*footer"):
        read(open_source(f"hf:{tmp_path}", text_field="body"))


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
    for field, line, kind in (("text", 2, "NoneType"), ("id", 1, "int")):
        (rows,) = read(open_source(f"hf:{tmp_path}", text_field=field))
        assert rows[line - 1].place == f"hf:{tmp_path} part 1, line {line}"
        assert rows[line - 1].problem == f'field "{field}" holds {kind}, not a string'
    source = open_source(f"hf:{tmp_path}")
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(DataError, match=f"^hf:{tmp_path} part 1: cannot be read: "):
        read(source)
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


def test_without_the_package_datasets_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r'^hf:x: needs the package datasets; .*-lite\[hf\]"'):
        open_source("hf:x")
