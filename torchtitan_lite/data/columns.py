"""Reading of a text column: of parquet files and of Hugging Face datasets.

The libraries are heavy and optional, so they are imported when they are used.
"""

from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from torchtitan_lite.errors import DataError

from .rows import MAX_ROW_BYTES, TextRow, reading

BATCH_ROWS = 64  # in memory at a time; few, because texts can be long
SAVED_SHARD_BYTES = 2**26
"""Size of the pieces that a dataset saved on disk is read in."""


def read_parquet(path: Path, text_field: str) -> Iterator[TextRow]:
    """Yield the rows of a parquet file. Raises DataError if it is broken or has no such column."""
    pyarrow = _import("pyarrow", wanted_by=path, extra="parquet")
    parquet = _import("pyarrow.parquet", wanted_by=path, extra="parquet")
    with (
        reading(path, OSError, pyarrow.ArrowException),
        parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file,
    ):
        columns = file.schema_arrow.names
        if text_field not in columns:
            raise DataError(f'{path}: has no column "{text_field}" among {columns!r:.100}')
        batches = file.iter_batches(BATCH_ROWS, columns=[text_field])
        binary = pyarrow.large_binary()
        values = (value for batch in batches for value in batch.column(0).cast(binary).to_pylist())
        yield from _rows(values, str(path), text_field)


def open_dataset(
    name: str, *, config: str | None, split: str, text_field: str
) -> tuple[list[Any], str]:
    """Return the text column of a Hugging Face dataset, in pieces, and its fingerprint.

    `name` is a folder written by `save_to_disk` (memory-mapped), a folder of data files, or a
    dataset on the hub (both streamed, a piece for each data file). Raises DataError.
    """
    datasets = _import("datasets", wanted_by=f"hf:{name}", extra="hf")
    folder = Path(name).expanduser()
    saved = [path for path in (folder, folder / split) if (path / "state.json").is_file()]
    with reading(f"hf:{name}", Exception):  # the library lets errors of many libraries pass
        if saved:
            table = datasets.load_from_disk(saved[0])
            pieces = min(len(table), table.data.nbytes // SAVED_SHARD_BYTES) or 1
            dataset, fingerprint = table.to_iterable_dataset(pieces), table._fingerprint
        else:
            path = str(folder) if folder.exists() else name
            builder = datasets.load_dataset_builder(path, config)
            dataset = builder.as_streaming_dataset(split=split)
            fingerprint = f"{builder.hash} {builder.config_id}"
        dataset = dataset.select_columns([text_field])
        count = dataset.num_shards
        return [dataset.shard(count, i) for i in range(count)], f"{fingerprint} {split}"


def read_dataset(piece: Any, name: str, text_field: str) -> Iterator[TextRow]:
    """Yield the rows of a piece of a dataset. Raises DataError if it cannot be read."""
    with reading(name, Exception):  # as above
        yield from _rows((row[text_field] for row in piece), name, text_field)


def _rows(values: Iterable[object], file: str, text_field: str) -> Iterator[TextRow]:
    for line, value in enumerate(values, start=1):
        data, problem = value.encode() if isinstance(value, str) else value, ""
        if not isinstance(data, bytes):
            data, problem = b"", f'field "{text_field}" holds {type(value).__name__}, not a string'
        elif len(data) > MAX_ROW_BYTES:
            data, problem = b"", f"longer than {MAX_ROW_BYTES} bytes"
        yield TextRow(file, 0, line, "text", data, problem)


def _import(module: str, *, wanted_by: object, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        fix = f'pip install "torchtitan-lite[{extra}]"'
        raise DataError(f"{wanted_by}: needs {package}; {fix}") from error
