"""Runs of the project on the fake GPU, in processes of their own, and what they did there."""

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fake_gpu import build, environment, read_counts

from torchtitan_lite.models.flavors import FLAVORS

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("program.py")
TWO_LAYERS = Path(__file__).with_name("two_layers.toml")

# Memory on a fake GPU is addresses: two layers of the real size take no more time than two small
# ones. Where they are written to a disk, or trained on the CPU, they are small.
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
    def waits(self) -> int:
        """How often the hosts of all ranks waited for their devices."""
        waits = ("wait for ", "copy from device to pageable")
        calls = sum(self.rank_calls, Counter[str]())
        return sum(n for name, n in calls.items() if name.startswith(waits))

    @property
    def float8_matmuls(self) -> dict[str, int]:
        """Matmuls in float8 by their types and scales."""
        return {name: n for name, n in self.calls.items() if name.startswith("matmul e")}


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
    everything = (
        os.environ | environment(build()) | settings | {"PYTHONPATH": str(ROOT)} | dict(env or {})
    )
    result = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=everything,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-6000:]
    return Run(folder, [read_counts(counts, rank) for rank in range(gpus)])


def train(folder: Path, *overrides: str, gpus: int = 1, **options: Any) -> Run:
    """The main job with the config of these tests, by torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    words = [
        "train",
        "--job.config_file",
        str(TWO_LAYERS),
        "--job.dump_folder",
        str(folder),
        *overrides,
    ]
    return run(folder, *torchrun, str(PROGRAM), *words, gpus=gpus, **options)
