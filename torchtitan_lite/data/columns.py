"""Rows of what has columns, one of them with text: parquet files and Hugging Face datasets.
Positions count rows.

The libraries are heavy and optional, so they are imported when they are used.
"""

from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from torchtitan_lite.errors import DataError

from .rows import MAX_ROW_BYTES, Position, Row, reading

BATCH_ROWS = 64  # in memory at a time; few, because texts can be long


def read_parquet(path: Path, start: Position, *, text_field: str) -> Iterator[Row]:
    """The rows of a parquet file from `start` on. Raises DataError if it is broken or has no such
    column of text."""
    pyarrow = _import("pyarrow", wanted_by=path, extra="parquet")
    parquet = _import("pyarrow.parquet", wanted_by=path, extra="parquet")
    with (
        reading(path, OSError, pyarrow.ArrowException),
        parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file,
    ):
        columns = file.schema_arrow.names
        if text_field not in columns:
            raise DataError(f'{path}: has no column "{text_field}" among {columns!r:.100}')
        values = _values(file, text_field, first=start.offset, dtype=pyarrow.large_binary())
        row_bytes = path.stat().st_size / max(1, file.metadata.num_rows)
        yield from _rows(values, start, file=str(path), text_field=text_field, row_bytes=row_bytes)


def _values(file: Any, column: str, *, first: int, dtype: Any) -> Iterator[bytes | None]:
    """A column of a parquet file from row `first`, counted from 0; the row groups before it are not
    read."""
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if first >= rows:
            first -= rows
            continue
        for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=[column]):
            yield from batch.column(0)[first:].cast(dtype).to_pylist()
            first = max(0, first - len(batch))


def open_dataset(name: str, *, config: str | None, split: str, text_field: str) -> tuple[Any, str]:
    """The column of text of a split of a Hugging Face dataset, to be read by `read_dataset`, and
    its fingerprint. `name` is that of a folder written by `save_to_disk`, which is memory-mapped,
    of a folder of data files, or of a dataset on the hub; these are streamed. Raises DataError if
    there is none."""
    datasets = _import("datasets", wanted_by=f"hf:{name}", extra="hf")
    folder = Path(name).expanduser()
    saved = [path for path in (folder, folder / split) if (path / "state.json").is_file()]
    with reading(f"hf:{name}", Exception):  # it lets errors of many libraries pass
        if saved:
            table = datasets.load_from_disk(saved[0])
            dataset, fingerprint = table.to_iterable_dataset(), table._fingerprint
        else:
            builder = datasets.load_dataset_builder(
                str(folder) if folder.exists() else name, config
            )
            dataset, fingerprint = (
                builder.as_streaming_dataset(split=split),
                f"{builder.hash} {builder.config_id}",
            )
        return dataset.select_columns([text_field]), f"{fingerprint} {split}"


def read_dataset(dataset: Any, start: Position, *, name: str, text_field: str) -> Iterator[Row]:
    """The rows of a dataset of `open_dataset` from `start` on. Raises DataError for what cannot be
    read."""
    with reading(name, Exception):  # as above
        values = (row[text_field] for row in dataset.skip(start.offset))
        yield from _rows(values, start, file=name, text_field=text_field, row_bytes=0)


def _rows(
    values: Iterable[object], start: Position, *, file: str, text_field: str, row_bytes: float
) -> Iterator[Row]:
    for number, value in enumerate(values, start.line):
        data, problem = value.encode() if isinstance(value, str) else value, ""
        if not isinstance(data, bytes):
            data, problem = b"", f'field "{text_field}" holds {type(value).__name__}, not a string'
        elif len(data) > MAX_ROW_BYTES:
            data, problem = b"", f"longer than {MAX_ROW_BYTES} bytes"
        end = Position(start.file, number, number + 1)
        yield Row(file, number, "text", data, problem, end, round(number * row_bytes))


def _import(module: str, *, wanted_by: object, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(
            f'{wanted_by}: needs {package}; pip install "torchtitan-lite[{extra}]"'
        ) from error
