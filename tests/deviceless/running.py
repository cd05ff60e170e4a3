"""Runs of the project on the fake GPU, in processes of their own, and what they did there."""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import warm
from fake_gpu import build, environment, read_counts
from launching import launcher

from torchtitan_lite.catalog.flavors import FLAVORS

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("program.py")
TWO_LAYERS = Path(__file__).with_name("two_layers.toml")
STEPS = 5
"""Of that config."""
SMALL = ("--model.flavor=small_two_layers", "--training.seq_len=256")
"""Overrides for a model that is trained on the CPU, or written to a disk."""

# Memory on a fake GPU is addresses: two layers of the real size take no more time than small ones.
FLAVORS_OF_TESTS = {
    "8B_two_layers": dataclasses.replace(FLAVORS["8B"], n_layers=2, vocab_size=0),
    "small_two_layers": dataclasses.replace(
        FLAVORS["debugmodel_gqa"], n_layers=2, n_heads=4, n_kv_heads=2
    ),
}


@dataclass(frozen=True)
class Run:
    """A program that ended well."""

    folder: Path
    """Its run folder, where it has one."""
    rank_calls: list[Counter[str]]
    """What each rank called."""

    @property
    def calls(self) -> Counter[str]:
        """What rank 0 called."""
        return self.rank_calls[0]

    @property
    def records(self) -> list[dict[str, Any]]:
        """Its metrics."""
        return [
            json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()
        ]

    @property
    def reserved_gib(self) -> float:
        """The most memory that rank 0 reserved."""
        return self.records[-1]["memory_gib"]

    @property
    def waits(self) -> list[list[int]]:
        """How often the host of each rank had waited for its device when each step began."""
        files = sorted(self.folder.glob("calls/waits*"))
        return [[int(count) for count in file.read_text().split()] for file in files]


def float8_matmuls(calls: Mapping[str, int]) -> dict[str, int]:
    """Matmuls in float8 by their types and scales."""
    return {name: n for name, n in calls.items() if name.startswith("matmul e")}


@cache
def start_server() -> dict[str, str]:
    """Start the server that forks the processes, on the fake GPU. Return its environment."""
    settings = environment(build())
    # After any question to CUDA itself, a process that is forked could not use it.
    by_nvml = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with mock.patch.dict(os.environ, settings | by_nvml):
        forkserver.ensure_running()
    return settings


def run(
    folder: Path,
    *words: str,
    gpus: int = 1,
    timeout: int = 300,
    env: Mapping[str, str] | None = None,
) -> Run:
    """`python WORDS` on fake GPUs; `folder` gets the counts of its calls. Raises where it fails or
    times out."""
    counts = folder / "calls"
    counts.mkdir(parents=True)
    settings = {"FAKE_GPU_COUNT": str(gpus), "FAKE_GPU_COUNTS": str(counts), "OMP_NUM_THREADS": "1"}
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(warm.__file__).parent)])}
    everything = os.environ | start_server() | settings | paths | dict(env or {})
    result = warm.python(words, cwd=ROOT, env=everything, timeout=timeout)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-6000:]
    return Run(folder, [read_counts(counts, rank) for rank in range(gpus)])


def train(folder: Path, *overrides: str, gpus: int = 1, **options: Any) -> Run:
    """The main job with the config of these tests, by torchrun."""
    config = ["--job.config_file", str(TWO_LAYERS), "--job.dump_folder", str(folder)]
    words = [*launcher(gpus), str(PROGRAM), "train", *config, *overrides]
    return run(folder, *words, gpus=gpus, **options)
