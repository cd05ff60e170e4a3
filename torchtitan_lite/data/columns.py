"""Rows of parquet files and of Hugging Face datasets.

Their libraries are heavy and optional: imported when used. For a broken file they raise anything.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.catalog.datasets import NamedDataset
from torchtitan_lite.config import expand_user

from .rows import NO_FIELD, Row, build_row, check_string, decode, reading

HF_PREFIX = "hf:"
BATCH_ROWS = 64  # of a table in memory at a time; few, because texts can be long


def read_parquet(path: Path, dataset: NamedDataset) -> Iterator[Row]:
    """Yield the rows of a parquet file. Raises DataError if it is broken or has no such column."""
    field = dataset.text_field
    parquet = _import("pyarrow.parquet", wanted_by=path, extra="parquet")
    with (
        reading(path, Exception),
        parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file,
    ):
        _check_column(path, field, file.schema_arrow.names)
        batches = file.iter_batches(BATCH_ROWS, columns=[field])
        # Not decoded here, so that only its own row is bad.
        columns = (batch.column(0).cast("large_binary").to_pylist() for batch in batches)
        yield from _rows(chain.from_iterable(columns), str(path), field)


def open_hf_dataset(dataset: NamedDataset) -> tuple[list[Callable[[], Iterator[Row]]], str]:
    """Open a dataset on the hub, or a folder of data files, as a stream. Return a reader for each
    of its files, and its fingerprint. Raises DataError."""
    datasets = _import("datasets", wanted_by=dataset.path, extra="hf")
    datasets.disable_progress_bars()  # they move the cursor
    name, field = dataset.path.removeprefix(HF_PREFIX), dataset.text_field
    with reading(dataset.path, Exception):
        folder = Path(expand_user(name))
        path = str(folder) if folder.exists() else name
        builder = datasets.load_dataset_builder(path, dataset.hf_name)
        stream = builder.as_streaming_dataset(split=dataset.hf_split)
        if stream.column_names is not None:
            _check_column(dataset.path, field, stream.column_names)
        stream = stream.select_columns([field])
        count = stream.num_shards
        readers: list[Callable[[], Iterator[Row]]] = [
            partial(_read_hf_shard, stream.shard(count, number), dataset, number)
            for number in range(count)
        ]
        state = f"{builder.hash} {builder.config_id} {dataset.hf_split}"
        content = f"{dataset.path}\n{state}\n{field}"
        return readers, hashlib.sha256(content.encode()).hexdigest()


def _read_hf_shard(shard: Any, dataset: NamedDataset, number: int) -> Iterator[Row]:
    name, field = f"{dataset.path} part {number + 1}", dataset.text_field
    with reading(name, Exception):
        yield from _rows((row[field] for row in shard), name, field)


def _check_column(name: object, field: str, columns: list[str]) -> None:
    if field not in columns:
        problem = NO_FIELD.format("column", field, f"{columns!r:.100}")
        raise DataError(f"{name}: has {problem}")


def _rows(values: Iterable[object], name: str, field: str) -> Iterator[Row]:
    for line, value in enumerate(values, start=1):
        yield build_row(f"{name}, line {line}", _text, value, field)


def _text(value: object, field: str) -> str:
    return decode(value) if isinstance(value, bytes) else check_string(value, field)


def _import(module: str, *, wanted_by: object, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        fix = f'pip install "torchtitan-lite[{extra}]"'
        raise DataError(f"{wanted_by}: needs {package}; {fix}") from error
