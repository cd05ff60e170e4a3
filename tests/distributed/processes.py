"""Processes and what they have started."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path


def kill_tree(pid: int) -> None:
    """Kill a process and all below it, the parents first, and wait until they are gone."""
    pids = signal_tree(pid, signal.SIGKILL)
    while any(is_alive(each) for each in pids):
        time.sleep(0.01)


def signal_tree(pid: int, number: int) -> list[int]:
    """Send a signal to a process and all below it, the parents first. Returns their ids."""
    pids = descendants(pid)
    for each in pids:
        with suppress(ProcessLookupError):
            os.kill(each, number)
    return pids


def descendants(pid: int) -> list[int]:
    """A process and all below it, parents before children."""
    tasks = Path(f"/proc/{pid}/task")
    with suppress(OSError):
        words = [
            word for task in tasks.iterdir() for word in (task / "children").read_text().split()
        ]
        return [pid, *(each for word in words for each in descendants(int(word)))]
    return [pid]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended, but that nobody has waited for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
