"""The part of waits.py that looks how costs grow: of a step, stores, runs and checkpoints."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import environment, run_config, seconds_of, tell

from torchtitan_lite.base.files import hash_file
from torchtitan_lite.checkpoint.checkpointer import write_tensors
from torchtitan_lite.config import load_config
from torchtitan_lite.data.token_store import TokenStore

TINY = (
    *("--job.config_file=train_configs/debug_model.toml", "--training.steps=12"),
    *("--float8.enable_float8_linear=false", "--training.local_batch_size=2"),
    *("--training.seq_len=128", "--metrics.log_freq=1", "--training.epochs="),
)
SMALLEST = ("--model.dim=32", "--model.n_heads=2", "--model.n_kv_heads=2", "--model.n_layers=1")


def step_seconds(*words: str, processes: int = 1) -> list[float]:
    """Return the seconds of each step of a run."""
    config = load_config([*TINY, *words], world_size=processes)
    env = {"CUDA_VISIBLE_DEVICES": ""}
    return [record["step_time_s"] for record in run_config(config, processes=processes, env=env)[1]]


def costs(what: str, over: str, seconds: Mapping[int, float]) -> dict[str, Any]:
    """Return a figure: the seconds of something, by how many there are of what it grows over."""
    return {"name": what, "over": over, "seconds": {str(at): each for at, each in seconds.items()}}


def measure() -> Iterator[dict[str, Any]]:
    """Yield the seconds of steps, stores, commands and checkpoints of different sizes."""
    for over, key, sizes in (
        ("layers", "model.n_layers", (4, 8, 16)),
        ("tokens of a sequence", "training.seq_len", (128, 256, 512, 1024)),
        ("sequences of a batch", "training.local_batch_size", (2, 4, 8)),
    ):
        found = {at: statistics.median(step_seconds(f"--{key}={at}")[5:]) for at in sizes}
        yield costs("a step", over, found)

    # Ranks of one global batch, which share the cores.
    cores = len(os.sched_getaffinity(0))
    batch = ("--training.global_batch_size=4", "--training.local_batch_size=1")
    found = {}
    for ranks in (1, 2, 4):
        steps = step_seconds(*batch, processes=ranks)[5:]
        found[ranks] = statistics.median(steps) * min(ranks, cores)
    yield costs("a step, x cores in use", "ranks", found)

    steps = step_seconds(*SMALLEST, "--training.steps=2000", "--training.seq_len=64")
    found = {at: statistics.median(steps[at - 200 : at]) for at in (400, 1000, 2000)}
    yield costs("a step, median of the last 200", "steps", found)

    with tempfile.TemporaryDirectory(prefix="benchmark_") as name:
        yield from measure_stores(Path(name))
        yield from measure_runs(Path(name))
        yield from measure_tensors(Path(name))


def measure_stores(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the seconds of opening a store and of reading windows, by its number of shards."""
    opened, read = {}, {}
    for shards in (1, 100, 1000):
        path = folder / f"store-{shards}"
        write_store(folder, path, shards=shards)
        opened[shards] = seconds_of(partial(TokenStore, path))
        store = TokenStore(path)
        starts = np.random.default_rng(0).integers(0, store.tokens - 257, 1600)
        store.windows(starts, 257)
        read[shards] = seconds_of(partial(store.windows, starts, 257))
    yield costs("opening a store", "shards", opened)
    yield costs("reading 1,600 windows", "shards", read)


def write_store(folder: Path, path: Path, *, shards: int) -> None:
    """Write a store of a million tokens."""
    source = folder / f"text-{shards}"
    source.mkdir()
    for shard in range(shards):
        line = json.dumps({"text": "a word and another " * (200_000 // shards)})
        (source / f"{shard:04}.jsonl").write_text(line + "\n")
    command("data", "make", str(source), str(path))


def command(*words: str) -> float:
    """Run a command of ours, and return its seconds."""
    line = [sys.executable, "-m", "torchtitan_lite", *words]
    env = environment(NGPU="1", CUDA_VISIBLE_DEVICES="")
    return seconds_of(partial(subprocess.run, line, check=True, capture_output=True, env=env))


def measure_runs(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the seconds of `status` and `compare` of a folder, by the number of runs in it."""
    runs = folder / "runs"
    config = load_config([*TINY, *SMALLEST, f"--job.dump_folder={runs}/0"], world_size=1)
    (folder / "config.toml").write_text(config.to_toml())
    command("train", "--job.config_file", str(folder / "config.toml"))

    status, compare = {}, {}
    for count in (1, 10, 100):
        for number in range(1, count):
            shutil.copytree(runs / "0", runs / str(number), dirs_exist_ok=True)
        status[count] = command("status", str(runs))
        compare[count] = command("compare", *map(str, runs.iterdir()))
    yield costs("`status`", "runs", status)
    yield costs("`compare`", "runs", compare)


def measure_tensors(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the seconds of writing and hashing 64 MB, by the number of tensors."""
    written, hashed = {}, {}
    for count in (100, 1000, 10_000):
        state = {f"model.{number}": torch.zeros(2**24 // count) for number in range(count)}
        target = folder / f"tensors-{count}"
        target.mkdir()
        write = partial(write_tensors, state, target, group=None, copy_ahead=False)
        written[count] = seconds_of(write)
        hashed[count] = sum(seconds_of(partial(hash_file, file)) for file in target.iterdir())
    yield costs("writing 64 MB", "tensors", written)
    yield costs("hashing 64 MB", "tensors", hashed)


if __name__ == "__main__":
    tell(measure())
