"""Runs that are killed by SIGKILL, torchrun and all its workers, again and again, and are resumed
each time: every second kill in a save, the others at any moment."""

import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launching import ENV, ROOT, differing_tensors
from processes import kill_tree, signal_tree

from torchtitan_lite.checkpoint.folders import (
    DRAFT_PREFIX,
    find_problems,
    step_folder,
    steps_with_manifest,
)
from torchtitan_lite.checkpoint.manifest import read_manifest

LONGEST_S = 3.0
"""From when a run has taken its folder to a kill at any moment."""
SAVE_S = 0.05
"""From when a save is seen to a kill that is meant to be in it."""
NEVER = 10**6
"""Steps of a run that is to be killed."""


@dataclass(frozen=True)
class Kill:
    """What a kill left."""

    in_save: bool
    trained: int
    """Last step in metrics.jsonl."""
    newest: int
    """Step of the newest checkpoint, 0 if there is none."""
    broken: list[str]
    """Damaged checkpoints, one line each."""


def kill_runs(
    command: Callable[[Path], list[str]], *, folder: Path, kills: int, seed: int
) -> tuple[list[Kill], bool]:
    """What each of the kills left of a run, and whether it got to the same state as one that was
    not killed.

    `command` is that of a run in the given folder, to which --training.steps is added. Runs are in
    subfolders of `folder`."""
    killed, whole = folder / "killed", folder / "whole"
    moments = random.Random(seed)
    in_saves = [number % 2 == 1 for number in range(kills)]
    found = [kill_once(command(killed), killed, moments, in_save=each) for each in in_saves]
    last = found[-1].newest + 2
    for path in (killed, whole):
        words = [*command(path), f"--training.steps={last}"]
        subprocess.run(words, cwd=ROOT, env=ENV, check=True, stdout=subprocess.DEVNULL)
    ends = [step_folder(path / "checkpoint", last) for path in (killed, whole)]
    progress = [read_manifest(end).progress for end in ends]
    drafts = list((killed / "checkpoint").glob(f"{DRAFT_PREFIX}*"))
    return found, progress[0] == progress[1] and not (differing_tensors(*ends) or drafts)


def kill_once(command: list[str], folder: Path, moments: random.Random, *, in_save: bool) -> Kill:
    """What is left of a run in `folder` that is started, and killed at one of the random moments.
    Raises subprocess.CalledProcessError if it ends before."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints, log = folder / "checkpoint", folder / "killed.log"
    since, saved = time.time(), steps_with_manifest(checkpoints)
    endless = [*command, f"--training.steps={NEVER}"]
    with log.open("w") as output:
        process = subprocess.Popen(endless, cwd=ROOT, env=ENV, stdout=output, stderr=output)
    try:
        wait_for(lambda: has_changed(folder / "status.json", since), process)
        time.sleep(moments.uniform(0, LONGEST_S))
        if in_save:
            wait_for(lambda: steps_with_manifest(checkpoints) != saved, process)
            stop_in_save(process, checkpoints, moments)
    finally:
        kill_tree(process.pid)
        process.wait()
    steps, metrics = steps_with_manifest(checkpoints), folder / "metrics.jsonl"
    return Kill(
        in_save=has_draft(checkpoints, since),
        trained=metrics.read_text().count("\n") if metrics.exists() else 0,
        newest=steps[-1] if steps else 0,
        broken=[
            f"step {step}: {problem}"
            for step in steps
            for problem in find_problems(step_folder(checkpoints, step), hashes=True)
        ],
    )


def stop_in_save(
    process: subprocess.Popen[bytes], checkpoints: Path, moments: random.Random
) -> None:
    """Have all of a run stand still at a random moment of a save or a deletion, however short these
    are."""
    while True:
        wait_for(lambda: has_draft(checkpoints, time.time() - SAVE_S), process)
        time.sleep(moments.uniform(0, SAVE_S))
        signal_tree(process.pid, signal.SIGSTOP)
        if has_draft(checkpoints, since=0):
            return
        signal_tree(process.pid, signal.SIGCONT)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Return once the condition holds. Raises subprocess.CalledProcessError if the process ends
    before."""
    while not condition():
        if process.poll() is not None:
            raise subprocess.CalledProcessError(process.returncode, process.args)
        time.sleep(0.001)


def has_draft(checkpoints: Path, since: float) -> bool:
    """Whether a checkpoint is half written or half deleted, by a process that has worked on it
    since then."""
    with suppress(FileNotFoundError):  # it was a moment ago
        return any(has_changed(path, since) for path in checkpoints.glob(f"{DRAFT_PREFIX}*"))
    return False


def has_changed(path: Path, since: float) -> bool:
    """Whether there is a `path` that was written to since then."""
    return path.exists() and path.stat().st_mtime > since
