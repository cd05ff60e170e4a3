"""Training of a tiny model, with faults: `fault_worker.py '<JSON list of faults>' <arguments of
torchtitan_lite.train>`, or `main` in a worker that our launcher has forked.

A fault is an object with the keys `do`, a function below; `at`, the place; and `rank` (without it:
all ranks). Other keys are the function's arguments. The places are:

  start            before anything else
  data N           when a batch of step N is taken
  forward N        before the first forward pass of step N
  accumulation N   before its second one
  gradients N      before the gradients of step N are clipped
  validation N     before the first forward pass of the validation after step N
  saving N         before the tensors of step N are written, on the thread that saves
  written N        after that, before the manifest is
  committing N     when the draft is complete, before it gets its name, on rank 0
  committed N      after that

A fault happens once, and only in the first attempt; with `always`, in each attempt.
"""

import hashlib
import itertools
import json
import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8.float8_linear import Float8Linear

from torchtitan_lite import train
from torchtitan_lite.base.errors import DataError
from torchtitan_lite.catalog import flavors
from torchtitan_lite.checkpoint import checkpointer, folders
from torchtitan_lite.checkpoint.resume import Resume
from torchtitan_lite.config import CommConfig
from torchtitan_lite.data.dataloader import Batch
from torchtitan_lite.metrics.processor import StepValues
from torchtitan_lite.parallel import tensor_parallel
from torchtitan_lite.parallel.microbatches import ModelLoss
from torchtitan_lite.training import build, trainer
from torchtitan_lite.training import model as build_model

RANK = int(os.environ["RANK"])
FIRST_ATTEMPT = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

faults: list[dict[str, Any]] = []


def happen(place: str) -> float:
    """Let the faults of a place happen. Returns the product of their factors for the loss."""
    factor = 1.0
    for fault in [each for each in faults if each["at"] == place]:
        faults.remove(fault)
        arguments = {key: fault[key] for key in fault.keys() - {"do", "at", "rank", "always"}}
        if fault.get("rank", RANK) == RANK and (FIRST_ATTEMPT or fault.get("always")):
            factor *= globals()[fault["do"]](**arguments) or 1.0
    return factor


def send(number: int, to: str = "self") -> None:
    """Send a signal to this process, to torchrun, or to run_train.sh."""
    torchrun = os.getppid()
    script = int(Path(f"/proc/{torchrun}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill({"self": os.getpid(), "torchrun": torchrun, "run_train.sh": script}[to], number)


def await_file(file: str) -> None:
    """Do nothing until a file is there."""
    while not Path(file).exists():
        time.sleep(0.05)


def await_signal() -> None:
    """Do nothing until a signal has asked this process to stop."""
    while not FaultyTrainer.running.watchdog.stop_signal.received:
        time.sleep(0.05)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def crash(message: str) -> None:
    raise RuntimeError(message)


def lack_data(message: str) -> None:
    raise DataError(message)


def scale_loss(factor: float) -> float:
    return factor


def spoil_gradients() -> None:
    """Let the gradients of this rank's weights be NaN."""
    for weight in FaultyTrainer.running.model.parameters():
        weight.grad.mul_(math.nan)


def limit_files(size: int) -> None:
    """Let writes past `size` bytes of a file fail, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def fill_disk(folder: str) -> None:
    """Leave no free byte on the disk of a folder or in the blocks of its logs."""
    for path in (Path(folder, "somebody-elses"), *Path(folder).rglob("*.log")):
        with suppress(OSError), path.open("ab", buffering=0) as file:
            while file.write(bytes(4096)):
                pass


def copy(source: str, target: str) -> None:
    shutil.copytree(source, target)


def cut_off(path: str) -> None:
    os.truncate(path, 0)


def gather_in_high_precision() -> None:
    """Let tensor parallelism recognize no linear as tensorwise float8."""
    tensor_parallel.has_one_scale = lambda linear: False


def lose_float8() -> None:
    """Let float8 linears multiply in high precision, silently."""
    Float8Linear.forward = lambda self, x: nn.functional.linear(x, self.weight)


def note_samples() -> None:
    """Write a hash of each sample of each step into samples-RANK.jsonl of the run folder."""
    FaultyTrainer.notes_samples = True


def note_weights() -> None:
    """Write a hash of this rank's weights after each step into weights-RANK.jsonl."""
    FaultyTrainer.notes_weights = True


def save_what_is_loaded() -> None:
    """Save the state into the folder `loaded` of the run folder right after it was loaded."""
    FaultyCheckpointer.saves_what_is_loaded = True


def append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


class FaultyLoss(ModelLoss):
    """Meets the trainer's faults before forward passes."""

    def __call__(
        self, tokens: Tensor, labels: Tensor, hidden: Tensor | None = None, *, scale: float
    ) -> Tensor:
        """Return the loss or the residual stream, times the factors of the faults."""
        running = FaultyTrainer.running
        if not torch.is_grad_enabled():
            happen(f"validation {running.step}")
            return super().__call__(tokens, labels, hidden, scale=scale)

        step = running.step + 1
        factor = happen(f"{'accumulation' if running.passes else 'forward'} {step}")
        running.passes = (running.passes + 1) % running.job.batch.grad_accum_steps
        if running.notes_samples:
            rows = torch.stack([tokens, labels], dim=1)
            hashes = [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in rows]
            line = {"step": step, "samples": hashes}
            append(running.job.folder / f"samples-{RANK}.jsonl", line)
        out = super().__call__(tokens, labels, hidden, scale=scale)
        return out if factor == 1 else out * factor


class FaultyTrainer(trainer.Trainer):
    """Meets its faults before forward passes."""

    running: "FaultyTrainer"
    notes_samples = notes_weights = False
    passes = 0  # of this step, or of the validation after it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        FaultyTrainer.running = self

    def next_batches(self, batches: Iterator[Batch]) -> list[Batch]:
        def take() -> Iterator[Batch]:
            happen(f"data {self.step + 1}")
            # Through what has no `close`: the end of this iterator would close the prefetcher.
            yield from itertools.chain(batches)

        return super().next_batches(take())

    def train_step(self, step: int) -> StepValues:
        values = super().train_step(step)
        if self.notes_weights:
            weights = self.model.state_dict().values()
            parts = b"".join(weight.to_local().numpy().tobytes() for weight in weights)
            line = {"step": step, "weights": hashlib.sha256(parts).hexdigest()}
            append(self.job.folder / f"weights-{RANK}.jsonl", line)
        return values


class FaultyCheckpointer(checkpointer.Checkpointer):
    """Meets its faults while it saves."""

    saves_what_is_loaded = False

    def load(self, resume: Resume) -> None:
        """Load, and save at once if asked to."""
        super().load(resume)
        if self.saves_what_is_loaded:
            folder, self.folder = self.folder, self.folder.parent / "loaded"
            self.save(resume.manifest.progress, last=False)
            self.wait()
            self.folder = folder


def clip_gradients(*args: Any, **kwargs: Any) -> Tensor:
    happen(f"gradients {FaultyTrainer.running.step + 1}")
    return CLIP_GRADIENTS(*args, **kwargs)


def write_tensors(state: dict[str, Tensor], draft: Path, **options: Any) -> None:
    happen(f"saving {int(draft.name[-8:])}")
    WRITE_TENSORS(state, draft, **options)
    happen(f"written {int(draft.name[-8:])}")


def commit(draft: Path, target: Path) -> None:
    happen(f"committing {int(target.name[-8:])}")
    COMMIT(draft, target)
    happen(f"committed {int(target.name[-8:])}")


def keep_environment(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise RuntimeError for a variable that is added: a thread of gloo or NCCL that reads the
    environment meanwhile crashes the process. An audit hook for processes that have joined."""
    if event == "os.putenv" and (name := os.fsdecode(arguments[0])) not in os.environ:
        raise RuntimeError(f"{name} was added to the environment of a process that has joined")


def init_distributed(comm: CommConfig) -> torch.device:
    device = INIT_DISTRIBUTED(comm)
    sys.addaudithook(keep_environment)
    return device


TRAIN, INIT_DISTRIBUTED = train.main, train.init_distributed
COMMIT, WRITE_TENSORS = folders.commit, checkpointer.write_tensors
CLIP_GRADIENTS = trainer.clip_gradients


def main(listed: str) -> None:
    """Train with the faults of a JSON list."""
    faults.extend(json.loads(listed))
    tiny = flavors.ModelArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=0)
    flavors.FLAVORS.update(debugmodel=tiny, wider=replace(tiny, dim=64))
    train.Trainer, train.init_distributed = FaultyTrainer, init_distributed
    build_model.ModelLoss = FaultyLoss
    build.Checkpointer = FaultyCheckpointer
    folders.commit, checkpointer.write_tensors = commit, write_tensors
    trainer.clip_gradients = clip_gradients
    happen("start")
    TRAIN()


if __name__ == "__main__":
    main(sys.argv.pop(1))
