"""What logging and saves cost, as ratios within one run."""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchtitan_lite.benchmarks.estimates import Ratios, measure_pairs
from torchtitan_lite.benchmarks.paired import time_steps
from torchtitan_lite.checkpoint import checkpointer
from torchtitan_lite.checkpoint.checkpointer import Checkpointer
from torchtitan_lite.checkpoint.manifest import (
    TENSORS_SUFFIX,
    FileEntry,
    TrainingProgress,
    hash_file,
)
from torchtitan_lite.checkpoint.state import random_state, training_state
from torchtitan_lite.config import CheckpointConfig
from torchtitan_lite.metrics.hardware import synchronize
from torchtitan_lite.trainer import Trainer

UNLOGGED = 1000
"""A log_freq at which next to no step is logged."""
WIDTH = 1024
"""Of the linears whose state is saved to measure a save."""


@dataclass(frozen=True)
class LoggingCost:
    """What it costs to log every step."""

    step_s: float
    """Median seconds of a step at log_freq UNLOGGED."""
    ratios: Ratios
    """Seconds at log_freq 1 over seconds at log_freq UNLOGGED."""

    def __str__(self) -> str:
        """The figures, in a line."""
        return f"seconds at log_freq 1 over those at {UNLOGGED}: {self.ratios}; an unlogged step takes {self.step_s:.4f} s"


def measure_logging_cost(trainer: Trainer, *, pairs: int, block_steps: int) -> LoggingCost:
    """The cost of `trainer`'s logging from `pairs` pairs of blocks, in alternating order, after a
    block of warm-up. A collective call."""
    steps = iter(range(trainer.first_step, trainer.last_step + 1))

    def time_block(log_freq: int) -> float:
        trainer.metrics.log_freq = log_freq
        return time_steps(lambda: trainer.advance(next(steps)), block_steps, device=trainer.device)

    time_block(1)
    logged_s, unlogged_s = measure_pairs(
        partial(time_block, 1), partial(time_block, UNLOGGED), pairs=pairs
    )
    return LoggingCost(statistics.median(unlogged_s) / block_steps, Ratios.of(logged_s, unlogged_s))


@dataclass(frozen=True)
class SaveCost:
    """Seconds for which each kind of save keeps rank 0 from training, in each of the rounds."""

    mib: float
    """Of a rank's state."""
    seconds: dict[str, list[float]]
    """By kind: "copy", a plain copy of the state into CPU memory; "sync"; "async"; "async
    unhashed". The first round of each copies into fresh memory."""

    def __str__(self) -> str:
        """The figures, in a few lines."""
        median = {kind: statistics.median(values[1:]) for kind, values in self.seconds.items()}
        first = {kind: values[0] for kind, values in self.seconds.items()}
        return (
            f"{self.mib:,.0f} MiB a rank; a synchronous save takes {median['sync']:.3f} s, and training stands still "
            f"for {median['async']:.3f} s in an asynchronous one\n"
            f"asynchronous over synchronous: {median['async'] / median['sync']:.3f}\n"
            f"asynchronous over a plain copy of the state: {median['async'] / median['copy']:.3f} "
            f"(the first time, into fresh memory: {first['async'] / first['copy']:.3f})\n"
            f"asynchronous over asynchronous without hashes: {median['async'] / median['async unhashed']:.3f}"
        )


def measure_save_cost(folder: Path, *, device: torch.device, mib: int, rounds: int) -> SaveCost:
    """The cost of saving `mib` MiB of state a rank into `folder`: each kind of save in turn,
    `rounds` times. A collective call."""
    world_size = dist.get_world_size()
    layers = max(
        1, round(mib * 2**20 / (3 * 4 * WIDTH**2))
    )  # a weight and its two moments, in fp32
    model = nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH * world_size, bias=False) for _ in range(layers))
    ).to(device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    sync, background = (
        Checkpointer(
            model,
            optimizer,
            CheckpointConfig(enable=True, keep_latest_k=1, async_mode=mode),
            folder=folder / mode,
            device=device,
            mesh={},
            model_args={},
            config_toml="",
        )
        for mode in ("disabled", "async_with_pinned_mem")
    )
    tensors = training_state(model, optimizer).values()
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    copies = [
        torch.empty_like(part, device="cpu", pin_memory=device.type == "cuda") for part in parts
    ]
    steps = itertools.count(1)

    def copy() -> None:
        for target, part in zip(copies, parts, strict=True):
            target.copy_(part, non_blocking=True)
        synchronize(device)

    def save(checkpointer: Checkpointer) -> None:
        progress = TrainingProgress(next(steps), samples=0, tokens=0, data={})
        checkpointer.save(progress, random_state(device))

    kinds: dict[str, tuple[Callable[[], None], bool]] = {
        "copy": (copy, True),
        "sync": (lambda: save(sync), True),
        "async": (lambda: save(background), True),
        "async unhashed": (lambda: save(background), False),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, (action, hashed) in kinds.items():
            with (
                contextlib.nullcontext()
                if hashed
                else mock.patch.object(checkpointer, "hash_file", _size_only)
            ):
                dist.barrier()
                synchronize(device)
                began = time.perf_counter()
                action()
                seconds[kind].append(time.perf_counter() - began)
                background.wait()
    return SaveCost(sum(part.nbytes for part in parts) / 2**20, seconds)


def _size_only(path: Path) -> FileEntry:
    """In place of `hash_file`: it hashes none of the files that hold tensors."""
    return FileEntry(path.stat().st_size, "") if path.suffix == TENSORS_SUFFIX else hash_file(path)
