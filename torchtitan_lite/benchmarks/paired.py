"""What the scripts have in common that measure a trainer in pairs of blocks of steps. A hub."""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePath

import torch
import torch.distributed as dist

from torchtitan_lite.config import Config
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.logger import logger
from torchtitan_lite.metrics.hardware import synchronize
from torchtitan_lite.parallel.distributed import init_distributed, read_rank
from torchtitan_lite.parallel.signals import StopSignal
from torchtitan_lite.parallel.watchdog import Watchdog
from torchtitan_lite.train import open_folder
from torchtitan_lite.trainer import Trainer

STEPS_ALONE = ("--training.epochs=", "--checkpoint.enable=false", "--validation.enable=false")
"""Overrides with which a run is as many steps as it is told, and nothing else."""


def pairs_parser(script: str, usage: str | None, *, pairs: int) -> ArgumentParser:
    """The command line of a script, with `pairs` unless it says otherwise."""
    name = f"scripts/{PurePath(script).name}"
    parser = ArgumentParser(prog=name, usage=usage, add_help=False, allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=pairs)
    parser.add_argument("--block-steps", type=int, default=5)
    return parser


def read_options(parser: ArgumentParser, argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """The options, and the overrides of the config. Raises ConfigError for numbers that measure
    nothing."""
    options, overrides = parser.parse_known_args(argv)
    if options.pairs < 2 or options.block_steps < 1:
        raise ConfigError(
            f"--pairs {options.pairs} must be at least 2, and --block-steps {options.block_steps} at least 1"
        )
    return options, overrides


@contextmanager
def started_trainer(config: Config) -> Iterator[Trainer]:
    """A trainer whose steps are the caller's to take, and which logs them as a run does. A
    collective call."""
    rank, world_size = read_rank()
    watchdog = Watchdog(
        rank=rank, world_size=world_size, stop_signal=StopSignal(), report=logger.warning
    )
    device = init_distributed(config.comm)
    run_folder, _ = open_folder(config)
    trainer = Trainer(config, device=device, run_folder=run_folder, resume=None, watchdog=watchdog)
    trainer.report_progress()
    yield trainer
    trainer.finish(stopped_by=None)


def time_steps(step: Callable[[], None], count: int, *, device: torch.device) -> float:
    """Seconds of `count` calls of `step`, from idle devices of all ranks to idle devices. A
    collective call."""
    synchronize(device)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    dist.barrier()
    return time.perf_counter() - began
