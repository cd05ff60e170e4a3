"""The part of waits.py that tokenizes text and reads windows."""

import json
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import environment, measure_pairs, seconds_of, tell, watch

from torchtitan_lite.data.sources import open_source
from torchtitan_lite.data.token_store import TokenStore

LENGTH, PAIRS = 8193, 3
MAP = """
import sys
import datasets
import sentencepiece
source, target, model = sys.argv[1:]
datasets.disable_progress_bars()
processor = sentencepiece.SentencePieceProcessor(model_file=model)
def encode(rows):
    return {"ids": processor.encode(rows["text"])}
rows = datasets.load_dataset("json", data_files=source, split="train", cache_dir=target + "/cache")
rows = rows.map(encode, batched=True, num_proc=2, remove_columns=["text"])
rows.save_to_disk(target + "/tokens")
"""


def measure() -> Iterator[dict[str, Any]]:
    """Yield seconds and memory of `data make`, and seconds of reading windows."""
    from torchtitan_lite.data.tokenizer import SHIPPED_MODEL

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = [row.text for chunk in open_source("pystdlib").chunks() for row in chunk()]
        source = folder / "text.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 3))
        made = iter(range(1000))

        def ours() -> tuple[float, float]:
            words = ["data", "make", str(source), str(folder / f"ours-{next(made)}")]
            return timed([sys.executable, "-m", "torchtitan_lite", *words])

        def theirs() -> tuple[float, float]:
            target = str(folder / f"theirs-{next(made)}")
            return timed([sys.executable, "-c", MAP, str(source), target, str(SHIPPED_MODEL)])

        made_by_us, made_by_map = measure_pairs(ours, theirs, pairs=PAIRS)
        size = source.stat().st_size / 1e6
        for at, what in enumerate((f"data make of {size:.0f} MB, s", "its peak memory, MiB")):
            yield {
                "name": what,
                "peer": "datasets.map, 2 processes",
                "ours": [pair[at] for pair in made_by_us],
                "theirs": [pair[at] for pair in made_by_map],
            }

        # Both read pages that are in the page cache.
        store = TokenStore(next(folder.glob("ours-*")))
        tokens = np.asarray(store.read(0, store.tokens))
        starts = np.random.default_rng(0).integers(0, store.tokens - LENGTH, (256, 8))

        def slices() -> None:
            for some in starts:
                np.stack([tokens[start : start + LENGTH] for start in some])

        windows = partial(seconds_of, lambda: [store.windows(some, LENGTH) for some in starts])
        one, other = measure_pairs(windows, lambda: seconds_of(slices), pairs=10)
        title = f"{starts.size} windows of {LENGTH} tokens, s"
        yield {"name": title, "peer": "numpy slices", "ours": one, "theirs": other}


def timed(command: list[str]) -> tuple[float, float]:
    """Run a command. Return its seconds and the peak memory of its largest process, MiB."""
    peaks: list[float] = []
    seconds = seconds_of(lambda: peaks.append(watch(command, env=environment()).peak_mib))
    return seconds, peaks[0]


if __name__ == "__main__":
    tell(measure())
