"""A training run on the fake GPU that counts what its steps do; versus_on_fake_gpu.py starts it.

torchrun fake_gpu_probe.py SETTINGS ...    SETTINGS is the JSON of `Settings`; the rest are the
                                           trainer's own options

Both trainers run their own main programs for STEPS steps. Rank 0 writes `Settings.out` when the
last one begins. It switches off what needs values or times of a device: the redrawing of truncated
random numbers, the check that new weights are finite, the timing of a kernel's configurations, and
cuDNN's attention, which the fake GPU does not have.
"""

import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2] / "tests/deviceless"))

import fake_gpu

STEPS, FIRST_STEADY = 8, 3
"""Steps of a run, and the first of those that are counted; the last one is not."""
NOT_COUNTED = re.compile(r"mm\b|scaled_dot_product")
"""Operators in a compiled graph whose bytes are not counted: matmuls and attention."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run besides the trainer's own options."""

    out: str
    """File for the figures, which rank 0 writes."""
    began: float
    """When the run was launched, in seconds since the epoch."""
    compiled: bool
    """Whether the run compiles."""
    dimensions: dict[str, Any] | None = None
    """torchtitan's model arguments; None: our trainer runs."""
    shard_one: bool = False
    """Whether torchtitan shards on one rank, too."""


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@dataclass(frozen=True)
class Moment:
    """Clocks and counters at the start of a step. Times are in seconds."""

    arrived: tuple[float, float]
    """Time since the epoch, and CPU time."""
    counters: bytes
    left: tuple[float, float]
    """The same times once the counters have been read."""

    @classmethod
    def now(cls, counters: Path) -> "Moment":
        """Read the clocks, the file `counters`, and the clocks again."""
        arrived = time.time(), cpu_seconds()
        content = counters.read_bytes()
        return cls(arrived, content, (time.time(), cpu_seconds()))


def note_steps(trainer: Any, settings: Settings, block_bytes: list[int]) -> None:
    """Make `trainer` write the figures of its run when its last step begins."""
    train_step, moments = trainer.train_step, list[Moment]()
    counters = Path(os.environ["FAKE_GPU_COUNTS"], f"rank{os.environ['RANK']}-{os.getpid()}")

    def noted_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        moments.append(Moment.now(counters))
        if len(moments) == STEPS and os.environ["RANK"] == "0":
            write_figures(moments, settings, block_bytes)
        return train_step(self, *args, **kwargs)

    trainer.train_step = noted_step

    # torchtitan resets the peak of memory whenever it logs. The compared peak is the whole run's.
    torch.cuda.reset_peak_memory_stats = lambda device=None: None


def write_figures(moments: list[Moment], settings: Settings, block_bytes: list[int]) -> None:
    """Write the figures of the launch, of the steady steps and of the whole run."""
    # A span is from the start of a steady step to the start of the next.
    steady = moments[FIRST_STEADY - 1 :]
    spans = list(zip(steady, steady[1:], strict=False))

    # The first step ends where the second begins.
    second = moments[1].arrived
    figures = {
        "first_step_s": second[0] - settings.began,
        "first_step_cpu_s": second[1],
        "host_s": [end.arrived[0] - start.left[0] for start, end in spans],
        "host_cpu_s": [end.arrived[1] - start.left[1] for start, end in spans],
        "calls": [
            dict(fake_gpu.count_calls(end.counters) - fake_gpu.count_calls(start.counters))
            for start, end in spans
        ],
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "block_bytes": block_bytes,
    }
    Path(settings.out).write_text(json.dumps(figures))


def note_block_bytes(block_bytes: list[int]) -> None:
    """Append, for each compiled graph with attention, the bytes that its kernels read and write."""
    from torch._inductor.scheduler import Scheduler

    scheduler: Any = Scheduler
    codegen = scheduler.codegen

    def noted_codegen(self: Any) -> None:
        names = {node: operator_name(node) for node in self.nodes}
        if any("scaled_dot_product" in name for name in names.values()):
            # What writes nothing is a view.
            counted = [
                node
                for node, name in names.items()
                if not NOT_COUNTED.search(name) and node.get_write_buffer_sizes() > 0
            ]
            block_bytes.append(sum(node.get_read_write_buffers_sizes() for node in counted))
        codegen(self)

    scheduler.codegen = noted_codegen


def operator_name(node: Any) -> str:
    """Return the operator that a node of the compiler calls, or "" if it generates a kernel."""
    if not node.is_extern():
        return ""
    return str(getattr(node.node, "op_overload", None) or node.node.python_kernel_name)


def our_trainer() -> tuple[Any, Callable[[], None]]:
    """Return our trainer and its main program."""
    from torchtitan_lite import train

    return train.Trainer, train.main


def torchtitan_trainer(settings: Settings) -> tuple[Any, Callable[[], None]]:
    """Return torchtitan's trainer and its main program. torchtitan reads sys.argv at its import."""
    from torch.nn.attention import SDPBackend
    from torchtitan import train
    from torchtitan.models import attention
    from torchtitan.models.llama3.model import model
    from torchtitan_cpu import register_model, shard_on_one_rank

    attention.ScaledDotProductAttentionWrapper.sdpa_backends = [SDPBackend.FLASH_ATTENTION]
    model.trunc_normal_ = lambda weight, mean, std, **_: weight.normal_(mean, std)
    if settings.shard_one:
        shard_on_one_rank()
    assert settings.dimensions is not None, "torchtitan runs"
    register_model(settings.dimensions)
    return train.Trainer, partial(train.main, train.Trainer)


def main() -> None:
    """Run the trainer that the settings name."""
    settings = Settings(**json.loads(sys.argv.pop(1)))
    torch.backends.cuda.enable_cudnn_sdp(False)
    block_bytes: list[int] = []
    if settings.compiled:
        from autotuning import take_first_configurations  # imports the compiler

        take_first_configurations()
        note_block_bytes(block_bytes)
    ours = settings.dimensions is None
    trainer, train = our_trainer() if ours else torchtitan_trainer(settings)
    note_steps(trainer, settings, block_bytes)
    train()


if __name__ == "__main__":
    main()
