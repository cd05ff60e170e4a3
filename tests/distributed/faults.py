"""Runs of fault_worker.py, which trains faults.toml, under torchrun."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launching import FOLDER, differing_tensors, launcher, torchrun

from torchtitan_lite.checkpoint.folders import step_folder
from torchtitan_lite.checkpoint.manifest import read_manifest

Fault = dict[str, Any]


def fault(do: str, at: str, rank: int | None = None, **more: Any) -> Fault:
    """Return a fault of fault_worker.py, of one rank or of all."""
    return {"do": do, "at": at, **({} if rank is None else {"rank": rank}), **more}


NOTE = fault("note_samples", "start")


def arguments(folder: Path, *overrides: str, faults: Sequence[Fault] = ()) -> list[str]:
    """Return the arguments of torchrun for a run in `folder`."""
    config = ["--job.config_file", str(FOLDER / "faults.toml"), "--job.dump_folder", str(folder)]
    return [str(FOLDER / "fault_worker.py"), json.dumps(faults), *config, *overrides]


def command(folder: Path, *overrides: str) -> list[str]:
    """Return the command of torchrun for a run of two processes in `folder`."""
    return [sys.executable, *launcher(2), *arguments(folder, *overrides)]


def run(
    folder: Path, *overrides: str, faults: Sequence[Fault] = (), processes: int = 2
) -> subprocess.CompletedProcess[str]:
    """Run in `folder` and wait for the end."""
    return torchrun(*arguments(folder, *overrides, faults=faults), processes=processes, timeout=200)


def finish(folder: Path, *overrides: str, **how: Any) -> str:
    """Return the output of a run in `folder` that must succeed."""
    result = run(folder, *overrides, **how)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


def fail(folder: Path, *overrides: str, **how: Any) -> tuple[int, str]:
    """Return the exit code and cause in the status of a run in `folder` that must fail."""
    result = run(folder, *overrides, **how)
    assert result.returncode != 0, result.stdout[-4000:]
    ended = status(folder)
    assert ended["state"] == "failed", result.stdout[-4000:] + result.stderr[-4000:]
    return ended["exit_code"], ended["cause"]


def refuse(folder: Path, *overrides: str, **how: Any) -> tuple[int, str]:
    """Return the exit code and cause in torchrun's report of a start that must be refused, and that
    must change nothing of the status of the run before in `folder`."""
    before = status(folder)
    result = run(folder, *overrides, **how)
    assert status(folder) == before, result.stdout[-4000:]
    return root_cause(result)


def root_cause(result: subprocess.CompletedProcess[str]) -> tuple[int, str]:
    """Return the exit code of the first rank that failed, and what it said, by torchrun."""
    report = result.stderr.rpartition("Root Cause")[2]
    told = re.search(r"exitcode +: (\d+) .*\n.*\n +traceback : (.*)\n=", report)
    assert told, result.stdout[-4000:] + result.stderr[-4000:]
    return int(told[1]), told[2]


def status(folder: Path) -> dict[str, Any]:
    """Return status.json of the run in `folder`."""
    return json.loads((folder / "status.json").read_text())


def reported(folder: Path, *keys: str) -> list[Any]:
    """Return the values of `keys` in status.json of the run in `folder`."""
    return [status(folder)[key] for key in keys]


def records(folder: Path, file: str = "metrics.jsonl") -> dict[int, dict[str, Any]]:
    """Return the records of a file of JSON lines by step. Each step has exactly one."""
    lines = [json.loads(line) for line in (folder / file).read_text().splitlines()]
    found = {line["step"]: line for line in lines}
    assert [line["step"] for line in lines] == sorted(found)
    return found


def values(folder: Path, key: str, file: str = "metrics.jsonl") -> list[Any]:
    """Return a figure of each record of a file of JSON lines."""
    return [record[key] for record in records(folder, file).values()]


def checkpoints(folder: Path) -> list[str]:
    """Return the names in the folder of checkpoints."""
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


def step_names(*steps: int) -> list[str]:
    """Return the names of the checkpoints of some steps."""
    return [f"step-{step:08d}" for step in steps]


def checkpoint(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return step_folder(folder / "checkpoint", step)


def assert_same_state(one: Path, other: Path) -> None:
    """Check that two checkpoints have the same tensors, bit for bit, and the same progress."""
    assert differing_tensors(one, other) == []
    old, new = read_manifest(one), read_manifest(other)
    assert old.progress == new.progress
    assert len(old.tensors) == 84


def samples(folder: Path) -> dict[int, set[str]]:
    """Return hashes of the samples of each step of a run in `folder`, over all ranks."""
    found: dict[int, set[str]] = {}
    for path in folder.glob("samples-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            found.setdefault(line["step"], set()).update(line["samples"])
    return found
