"""Kill a run by SIGKILL, torchrun and all its workers, again and again, and resume it each time.
Compare its last checkpoint with the same step of a run that was not killed, and print the losses.
Exit code 0: nothing but steps was lost.

  --kills N   (default: 30); every second one in a save, the others at any moment
  --seed N    of the moments (default: 0)
  overrides   any other key of the config, as in training: --checkpoint.async_mode async
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launching import ROOT, launcher
from processes import kill_tree, signal_tree

from torchtitan_lite.checkpoint.compare import compare
from torchtitan_lite.checkpoint.folders import DRAFT_PREFIX, step_folder, steps_with_manifest
from torchtitan_lite.checkpoint.manifest import read_manifest
from torchtitan_lite.checkpoint.reading import verify_checkpoint

LONGEST_S = 4.0
"""From when a run has taken its folder to a kill at any moment."""
SAVE_S = 0.1
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
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    ends = [step_folder(path / "checkpoint", last) for path in (killed, whole)]
    progress = [read_manifest(end).progress for end in ends]
    drafts = list((killed / "checkpoint").glob(f"{DRAFT_PREFIX}*"))
    return found, progress[0] == progress[1] and not (compare(*ends) or drafts)


def kill_once(command: list[str], folder: Path, moments: random.Random, *, in_save: bool) -> Kill:
    """What is left of a run in `folder` that is started, and killed at one of the random moments.
    Raises subprocess.CalledProcessError if it ends before."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints, log = folder / "checkpoint", folder / "killed.log"
    since, saved = time.time(), steps_with_manifest(checkpoints)
    endless = [*command, f"--training.steps={NEVER}"]
    with log.open("w") as output:
        process = subprocess.Popen(endless, stdout=output, stderr=output)
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
            for problem in verify_checkpoint(step_folder(checkpoints, step), hashes=True)
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


def main(argv: list[str]) -> int:
    """Kill runs of the debug model on two processes, and print what that led to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options, overrides = parser.parse_known_args(argv)

    def command(folder: Path) -> list[str]:
        train = [sys.executable, *launcher(2), "-m", "torchtitan_lite.train"]
        config = ["--job.config_file", f"{ROOT}/train_configs/debug_model.toml"]
        saves = ["--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=3"]
        small = ["--training.seq_len=64", "--training.local_batch_size=2"]
        schedule = "--lr_scheduler.total_steps=1000"
        place = f"--job.dump_folder={folder}"
        return [*train, *config, place, *saves, *small, schedule, *overrides]

    with tempfile.TemporaryDirectory(prefix="kill-runs-") as name:
        kills, same = kill_runs(command, folder=Path(name), kills=options.kills, seed=options.seed)
    broken = [problem for kill in kills for problem in kill.broken]
    for problem in broken:
        print(problem)
    in_save, whole = (sum(kill.in_save for kill in kills), sum(not kill.broken for kill in kills))
    lost = max(kill.trained - kill.newest for kill in kills)
    print(f"{len(kills)} kills, {in_save} of them in a save or a deletion")
    print(f"{whole} left every checkpoint as it was written, byte for byte")
    print(f"{lost} steps lost at most, of an interval of 2")
    equals = "equals" if same else "DIFFERS from"
    print(f"the final state {equals} that of a run that was not killed, bit for bit")
    return 0 if same and not broken else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
