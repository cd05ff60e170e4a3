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
    "from torchtitan_lite.data import prepare, rows, sources; "
    "prepare.BATCH_BYTES = 20_000; sources.CHUNK_BYTES = 60_000; rows.PART_BYTES = 1_000; "
    "from torchtitan_lite.__main__ import main; main('data')"
)
"""torchtitan-lite data, but with chunks and batches so small that it can be killed between many
of them."""


def start(corpus: Path, store: Path) -> subprocess.Popen[str]:
    arguments = ["make", str(corpus), str(store)]
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        cwd=ROOT,
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(corpus: Path, store: Path) -> str:
    process = start(corpus, store)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


def written(folder: Path) -> int:
    """Bytes of the files in a folder, 0 if there is none."""
    total = 0
    with suppress(FileNotFoundError):  # of what a process there has renamed
        for path in folder.iterdir():
            total += path.stat().st_size
    return total


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
    path = tmp_path_factory.mktemp("corpus") / "rows.jsonl"
    words = random.Random(0)
    with path.open("w") as file:
        for i in range(4000):
            text = " ".join(
                words.choice(("def", "self", "return", "value", "x"))
                for _ in range(words.randrange(1, 150))
            )
            file.write(json.dumps({"text": f"{i} {text}"}) + "\n")
    return path


# ----- make_store -----


@pytest.mark.timeout(600)
def test_the_run_after_a_kill_ends_with_the_same_store(corpus: Path, tmp_path: Path) -> None:
    """Also of a run after several kills: each third store is killed again."""
    finish(corpus, tmp_path / "undisturbed")
    expected = files(tmp_path / "undisturbed")
    whole = written(tmp_path / "undisturbed")
    assert len(expected) > 20
    moments = random.Random(1)
    went_on = 0
    for number in range(KILLS):
        store = tmp_path / str(number)
        for _ in range(1 + (number % 3 == 0)):
            kill_at(moments.uniform(0, 1.05) * whole, corpus, store)
        assert not store.exists() or files(store) == expected, (
            "an unfinished store has the name of a complete one"
        )
        went_on += "going on after" in finish(corpus, store)
        assert files(store) == expected
    assert went_on >= KILLS // 2, (
        "kills at these moments do not test that a run goes on where it was"
    )
    left = {path.name for path in tmp_path.iterdir() if not path.name.isdecimal()}
    assert {name for name in left if not name.endswith(".lock")} == {"undisturbed"}
