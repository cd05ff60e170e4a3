"""Stores that are killed while they are made, by SIGKILL, as a user's machine would."""

import json
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from launching import ENV, ROOT

KILLS = 20
COMMAND = (
    "from torchtitan_lite.data import sources, store_writer; "
    "store_writer.BATCH_BYTES = 20_000; sources.CHUNK_BYTES = 60_000; "
    "from torchtitan_lite.__main__ import main; main()"
)
"""torchtitan-lite data, but with chunks and batches so small that it can be killed between many
of them."""


def start(corpus: Path, store: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "data", "make", str(corpus), str(store)],
        cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(corpus: Path, store: Path) -> str:
    process = start(corpus, store)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


def written(folder: Path) -> int:
    """Bytes of the files in a folder, 0 if there is none."""
    with suppress(FileNotFoundError):  # of what a process there has renamed
        return sum(path.stat().st_size for path in folder.iterdir())
    return 0


def kill_at(size: float, corpus: Path, store: Path) -> None:
    """Start, and kill as soon as the unfinished store has `size` bytes, or once there is nothing
    left to kill."""
    with start(corpus, store) as process:
        while process.poll() is None and written(store.with_name(f"{store.name}.partial")) < size:
            time.sleep(0.002)
        process.kill()


def files(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.iterdir()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    draw, words = random.Random(0), ("def", "self", "return", "value", "x")
    texts = [f"{i} {' '.join(draw.choices(words, k=draw.randrange(1, 150)))}" for i in range(4000)]
    for start in range(0, len(texts), 100):
        rows = (json.dumps({"text": text}) + "\n" for text in texts[start : start + 100])
        (folder / f"{start:04}.jsonl").write_text("".join(rows))
    return folder


# ----- make_store -----
@pytest.mark.timeout(600)
def test_the_run_after_a_kill_ends_with_the_same_store(corpus: Path, tmp_path: Path) -> None:
    """Also of a run after several kills: each third store is killed again."""
    finish(corpus, tmp_path / "undisturbed")
    expected = files(tmp_path / "undisturbed")
    whole = written(tmp_path / "undisturbed")
    assert len(expected) > 10
    moments = random.Random(1)
    went_on = 0
    for number in range(KILLS):
        store = tmp_path / str(number)
        for _ in range(1 + (number % 3 == 0)):
            kill_at(moments.uniform(0, 1.05) * whole, corpus, store)
        assert not store.exists() or files(store) == expected  # else it is unfinished
        went_on += "going on after" in finish(corpus, store)
        assert files(store) == expected
    assert went_on >= KILLS // 2  # else no kill was between two chunks
    left = {path.name for path in tmp_path.iterdir() if not path.name.isdecimal()}
    assert {name for name in left if not name.endswith(".lock")} == {"undisturbed"}
