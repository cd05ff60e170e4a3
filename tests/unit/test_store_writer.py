"""Shards as they are written: a writer goes on from what was committed, and cuts off what came
after."""

import json

import numpy as np
from sample_stores import RECIPE, stream

from torchtitan_lite.data.rows import START, Position
from torchtitan_lite.data.store_writer import Progress, StoreWriter

FIRST, SECOND = [[10, 11, 12], [20]], [list(range(30, 42)), [5]]


def append(writer: StoreWriter, documents: list[list[int]], position: Position) -> None:
    lengths = np.array([len(ids) + 2 for ids in documents])
    writer.append(np.array(stream(documents), "<u2"), lengths, skipped=1, position=position)


def test_a_writer_goes_on_from_what_was_committed(tmp_path):
    with StoreWriter(tmp_path, Progress(RECIPE)) as writer:
        append(writer, FIRST, Position(0, 9, 3))
        writer.commit()
        committed = writer.progress
        append(writer, [[99] * 30], Position(0, 99, 4))
    assert (committed.tokens, committed.documents, committed.skipped_rows) == (8, 2, 1)
    saved = json.loads((tmp_path / "progress.json").read_text())
    assert (saved["position"], saved["tokens"]) == ([0, 9, 3], 8)
    with StoreWriter(tmp_path, committed) as writer:
        append(writer, SECOND, START)
        manifest = writer.finish()
    shards = [
        np.fromfile(tmp_path / f"tokens-0000{shard}.bin", "<u2").tolist() for shard in range(3)
    ]
    assert sum(shards, []) == stream(FIRST + SECOND)
    assert (
        [len(shard) for shard in shards]
        == [shard.tokens for shard in manifest.shards]
        == [10, 10, 5]
    )
    assert (manifest.documents, manifest.max_token_id, manifest.skipped_rows) == (4, 41, 2)
