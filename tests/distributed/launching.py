"""Runs of real processes under torchrun, on CPU and gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TINY = Path(__file__).with_name("tiny.toml")
FOLDER = Path(__file__).parent
ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def torchrun(*arguments: str, processes: int, timeout: int = 200) -> subprocess.CompletedProcess[str]:
    """The finished torchrun of `processes` processes that ran `arguments`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=timeout, check=False
    )


def train_arguments(folder: Path, *overrides: str) -> list[str]:
    """What torchrun is given to train the tiny config in `folder`."""
    return [
        "-m", "torchtitan_lite.train", "--job.config_file", str(TINY), "--job.dump_folder", str(folder), *overrides
    ]  # fmt: skip


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train(folder: Path, *overrides: str, processes: int) -> list[dict[str, Any]]:
    """The records of a run of the tiny config that was done."""
    result = torchrun(*train_arguments(folder, *overrides), processes=processes)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return read_records(folder)


def losses(folder: Path, *overrides: str, processes: int) -> list[float]:
    """The losses of a run of the tiny config that was done."""
    return [record["loss"] for record in train(folder, *overrides, processes=processes)]


def ask(worker: str, *overrides: str, processes: int) -> Any:
    """What the script `worker` of this folder tells, as a line of JSON, of the tiny config on `processes` processes."""
    result = torchrun(str(FOLDER / worker), "--job.config_file", str(TINY), *overrides, processes=processes)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    (line,) = [line for line in result.stdout.splitlines() if line.startswith(("{", "[{"))]
    return json.loads(line)
