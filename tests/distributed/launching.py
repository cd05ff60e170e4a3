"""Runs of real processes under torchrun, on CPU and gloo."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import warm

from torchtitan_lite.checkpoint.reading import SafeReader

ROOT = Path(__file__).parents[2]
TINY = Path(__file__).with_name("tiny.toml")
FOLDER = Path(__file__).parent
ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def launcher(processes: int, *options: str) -> list[str]:
    """Return the arguments of `python` that start torchrun with `processes` processes and
    `options`. The worker's script and arguments follow."""
    number = ["--nproc-per-node", str(processes)]
    return ["-m", "torch.distributed.run", "--standalone", *number, *options]


def torchrun(
    *arguments: str, processes: int, timeout: int = 400
) -> subprocess.CompletedProcess[str]:
    """Run `arguments` under torchrun and wait. Its processes are forked from one that has imported
    torch."""
    return warm.python([*launcher(processes), *arguments], cwd=ROOT, env=ENV, timeout=timeout)


def finish(*arguments: str, processes: int) -> str:
    """Return the output of a torchrun that must succeed."""
    result = torchrun(*arguments, processes=processes)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-80_000:]
    return result.stdout


def train_arguments(folder: Path, *overrides: str) -> list[str]:
    """Return the arguments of torchrun that train the tiny config in `folder`."""
    config = ["--job.config_file", str(TINY), "--job.dump_folder", str(folder)]
    return ["-m", "torchtitan_lite.train", *config, *overrides]


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train(folder: Path, *overrides: str, processes: int) -> list[dict[str, Any]]:
    """Train the tiny config and return its records."""
    finish(*train_arguments(folder, *overrides), processes=processes)
    return read_records(folder)


def read_losses(folder: Path) -> list[float]:
    """Return the losses of a run in `folder`."""
    return [record["loss"] for record in read_records(folder)]


def losses(folder: Path, *overrides: str, processes: int) -> list[float]:
    """Train the tiny config and return its losses."""
    return [record["loss"] for record in train(folder, *overrides, processes=processes)]


def train_together(
    folder: Path,
    runs: Mapping[str, Sequence[str]],
    *,
    processes: int,
    worker: str = "matrix_worker.py",
) -> str:
    """Train `runs` in `folder`, by name, each with its overrides of matrix.toml, one after the
    other in the same processes. Returns their output."""
    output = finish(str(FOLDER / worker), str(folder), json.dumps(runs), processes=processes)
    assert [(folder / name / "ended.txt").read_text() for name in runs] == [""] * len(runs)
    return output


def ask(worker: str, *overrides: str, processes: int) -> Any:
    """Return the line of JSON that the script `worker` of this folder prints for the tiny config on
    `processes` processes."""
    words = [str(FOLDER / worker), "--job.config_file", str(TINY), *overrides]
    return told(finish(*words, processes=processes))


def told(output: str) -> Any:
    """Return the content of the one line of JSON in `output`."""
    (line,) = [line for line in output.splitlines() if line.startswith(("{", "[{"))]
    return json.loads(line)


def differing_tensors(one: Path, other: Path) -> list[str]:
    """Return the names of the tensors of two checkpoints that are not the same in every byte."""
    states = [SafeReader(path).read_whole() for path in (one, other)]
    assert states[0].keys() == states[1].keys()
    contents = [
        {name: (x.dtype, x.shape, x.flatten().view(torch.uint8)) for name, x in state.items()}
        for state in states
    ]
    return [
        name
        for name, (dtype, shape, data) in contents[0].items()
        if (dtype, shape) != contents[1][name][:2] or not torch.equal(data, contents[1][name][2])
    ]
