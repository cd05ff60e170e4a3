"""What logging every step costs: torchrun --nproc-per-node 1 scripts/bench_logging.py --job.config_file X.toml ...

Trains with the writers that the config asks for, in pairs of blocks of steps at log_freq 1 and 1000, and prints how
much longer the former take. Checkpoints and validation are off.

  --pairs N         of blocks (default: 40)
  --block-steps N   steps in a block (default: 5)
  overrides         any other key of the config, as in training
"""

import argparse
import os

from torchtitan_lite.benchmarks.costs import measure_logging_cost
from torchtitan_lite.config import load_config
from torchtitan_lite.errors import ConfigError, run_script
from torchtitan_lite.logger import init_logger, logger
from torchtitan_lite.parallel.distributed import end_process, init_distributed, read_rank
from torchtitan_lite.parallel.signals import StopSignal
from torchtitan_lite.parallel.watchdog import Watchdog
from torchtitan_lite.train import open_folder
from torchtitan_lite.trainer import Trainer


def main(argv: list[str]) -> None:
    """Measure and print. Raises RunError."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return
    parser = argparse.ArgumentParser(prog="scripts/bench_logging.py", usage=__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--block-steps", type=int, default=5)
    options, words = parser.parse_known_args(argv)
    if options.pairs < 2 or options.block_steps < 1:
        raise ConfigError(
            f"--pairs {options.pairs} must be at least 2, and --block-steps {options.block_steps} at least 1"
        )
    steps = (2 * options.pairs + 1) * options.block_steps
    off = ["--training.epochs=", "--checkpoint.enable=false", "--validation.enable=false"]
    config = load_config([*words, f"--training.steps={steps}", *off], world_size=int(os.environ.get("WORLD_SIZE", "1")))
    rank, world_size = read_rank()
    watchdog = Watchdog(rank=rank, world_size=world_size, stop_signal=StopSignal(), report=logger.warning)
    device = init_distributed(config.comm)
    run_folder, _ = open_folder(config)
    trainer = Trainer(config, device=device, run_folder=run_folder, resume=None, watchdog=watchdog)
    trainer.report_progress()
    cost = measure_logging_cost(trainer, pairs=options.pairs, block_steps=options.block_steps)
    trainer.finish(stopped_by=None)
    logger.info(f"{cost}")
    end_process(0)


if __name__ == "__main__":
    init_logger()
    run_script(main)
