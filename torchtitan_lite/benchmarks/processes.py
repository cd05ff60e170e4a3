"""A command run to its end, watched from outside: when it printed what, its memory, and what it
logged. Linux."""

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lite.errors import RunError

TAIL_LINES = 60
"""Of its output, that tell why a command failed."""


@dataclass(frozen=True)
class Watched:
    """A command that has ended well."""

    lines: tuple[tuple[float, str], ...]
    """What it printed, each line with the seconds from its launch to its arrival."""
    peak_mib: float
    """Resident memory at its peak of the largest process, of the command and of all that it started
    and waited for."""

    def find(self, pattern: str) -> str:
        """The first group of the first match of `pattern` in a line. Raises RunError where there is
        none."""
        for _, line in self.lines:
            if match := re.search(pattern, line):
                return match[1]
        raise RunError(f"no line matches {pattern!r}:\n{tail(self.lines)}")


def torchrun(python: str, *words: str, processes: int) -> list[str]:
    """The command by which `python` runs `words` in that many processes."""
    return [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
        *words,
    ]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment with `changes`, one thread a process unless it says otherwise, and
    no GPU."""
    return {"OMP_NUM_THREADS": "1", **os.environ, "CUDA_VISIBLE_DEVICES": "", **changes}


def watch(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    timeout_s: float,
    on_line: Callable[[int, str], None] = lambda pid, line: None,
) -> Watched:
    """`command`, run to its end. `on_line` is called with its process id and each line when that
    arrives. Raises RunError where it fails, or is ended after `timeout_s`."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=dict(env),
    )
    assert process.stdout is not None, "it is a pipe"
    timer = threading.Timer(timeout_s, process.terminate)
    timer.start()
    lines: list[tuple[float, str]] = []
    try:
        for line in process.stdout:
            lines.append((time.perf_counter() - began, line.rstrip("\n")))
            on_line(process.pid, line)
    except BaseException:
        process.terminate()
        raise
    finally:
        _, status, usage = os.wait4(process.pid, 0)  # unlike Popen's wait, it tells the memory
        process.returncode = os.waitstatus_to_exitcode(status)
        timer.cancel()
    if process.returncode != 0:
        raise RunError(f"{' '.join(command)} ended with {process.returncode}:\n{tail(lines)}")
    return Watched(tuple(lines), usage.ru_maxrss / 1024)  # KiB on Linux


def tail(lines: Sequence[tuple[float, str]]) -> str:
    """The last of `lines`."""
    return "\n".join(line for _, line in lines[-TAIL_LINES:])


def read_records(folder: Path) -> list[dict[str, Any]]:
    """What the run of a folder has logged."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def resident_kib(pid: int) -> int:
    """Resident memory of the largest child of a process, KiB; 0 if it has none."""
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return max((_resident_kib(child) for child in children), default=0)


def _resident_kib(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):  # it has just ended
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024
