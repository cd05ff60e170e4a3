"""Rows of Hugging Face datasets, by the package datasets: heavy, optional, and imported when used.

For a broken file it raises anything.
"""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.catalog.datasets import HF_PREFIX, NamedDataset
from torchtitan_lite.config import expand_user

from .rows import Row, build_row, check_string, reading


def open_hf_dataset(dataset: NamedDataset) -> tuple[list[Callable[[], Iterator[Row]]], str]:
    """Open a dataset on the hub, or a folder of data files, as a stream. Return a reader for each
    of its files, and its fingerprint. Raises DataError."""
    try:
        import datasets
    except ImportError as error:
        fix = 'pip install "torchtitan-lite[hf]"'
        raise DataError(f"{dataset.path}: needs the package datasets; {fix}") from error

    datasets.disable_progress_bars()  # they move the cursor
    name, field = dataset.path.removeprefix(HF_PREFIX), dataset.text_field
    with reading(dataset.path, Exception):
        folder = Path(expand_user(name))
        path = str(folder) if folder.exists() else name
        builder = datasets.load_dataset_builder(path, dataset.hf_name)
        stream = builder.as_streaming_dataset(split=dataset.hf_split).select_columns([field])
        count = stream.num_shards
        readers: list[Callable[[], Iterator[Row]]] = [
            partial(_read_shard, stream.shard(count, number), dataset, number)
            for number in range(count)
        ]
        inputs = f"{dataset.path}\n{builder.hash} {builder.config_id} {dataset.hf_split}\n{field}"
        return readers, hashlib.sha256(inputs.encode()).hexdigest()


def _read_shard(shard: Any, dataset: NamedDataset, number: int) -> Iterator[Row]:
    name, field = f"{dataset.path} part {number + 1}", dataset.text_field
    with reading(name, Exception):
        for line, row in enumerate(shard, start=1):
            yield build_row(f"{name}, line {line}", check_string, row[field], field)
