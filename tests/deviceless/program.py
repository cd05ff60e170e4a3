"""A program of the project on the fake GPU: `program.py train ARGUMENTS`, under torchrun, or
`program.py bench ARGUMENTS`, `program.py gpu_day ARGUMENTS`, or its part `program.py kernel_times`.
A training run writes how often the host has waited for the device whenever a step begins.

It adds the models of these tests. It switches off what needs values or times of a device (the
checks that saved weights are finite, the choice of a text's next token, the stages' vote
that all know their shapes, the timing of a kernel's configurations), and cuDNN's attention, which
the fake GPU does not have.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.pipelining.stage as pipeline_stage
from autotuning import take_first_configurations
from fake_gpu import WAITS, count_calls
from running import FLAVORS_OF_TESTS

from torchtitan_lite import train
from torchtitan_lite.base.terminal import run_script
from torchtitan_lite.catalog.flavors import FLAVORS
from torchtitan_lite.checkpoint import checkpointer
from torchtitan_lite.metrics.processor import StepValues
from torchtitan_lite.models.generate import Sampling
from torchtitan_lite.training.trainer import Trainer

sys.path.append(str(Path(__file__).parents[2] / "scripts/benchmarks"))


def take_all_shapes_as_known() -> None:
    """Let the stages of a pipeline vote, and take the result as 1: they all know. Releases of
    PyTorch without the vote take what they are told."""
    name = "_warmup_backward_result"
    if (vote := getattr(pipeline_stage.PipelineStage, name, None)) is None:
        return

    def known(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ones_like(vote(*args, **kwargs), device="cpu")

    setattr(pipeline_stage.PipelineStage, name, known)


def note_waits() -> None:
    """Let a trainer write the waits of its process so far, a line at the beginning of each step."""
    train_step = Trainer.train_step
    folder, rank = Path(os.environ["FAKE_GPU_COUNTS"]), os.environ["RANK"]

    def noted_step(self: Trainer, step: int) -> StepValues:
        calls = count_calls((folder / f"rank{rank}-{os.getpid()}").read_bytes())
        with (folder / f"waits{rank}").open("a") as file:
            print(sum(n for name, n in calls.items() if name.startswith(WAITS)), file=file)
        return train_step(self, step)

    Trainer.train_step = noted_step


# The benchmark's rows run this program too.
bench: Any = importlib.import_module("bench")
bench.TRAIN = (str(Path(__file__).resolve()), "train")
FLAVORS.update(FLAVORS_OF_TESTS)
torch.backends.cuda.enable_cudnn_sdp(False)
checkpointer.states.check_finite = lambda state, *, step: None
Sampling.choose = lambda self, logits, generator: logits.argmax(-1).fill_(7)
take_first_configurations()
take_all_shapes_as_known()

if __name__ == "__main__":
    name = sys.argv.pop(1)
    if name == "train":
        note_waits()
        train.main()
    else:
        program = importlib.import_module(name)
        if name == "gpu_day":
            program.KERNEL_TIMES = (str(Path(__file__).resolve()), "kernel_times")
        run_script(program.main)
