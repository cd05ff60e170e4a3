"""The trainer against a bare PyTorch loop:

torchrun --nproc-per-node 2 scripts/bench_bare.py --job.config_file X.toml ...

Trains the same model on the same batches twice in the same processes, in pairs of blocks of steps: by the trainer, with
a record of every step and TensorBoard, and by a loop of FSDP2, gradient clipping and fused AdamW alone. Prints the
ratios of their tokens/s. Checkpoints and validation are off.

  --pairs N               of blocks (default: 20)
  --block-steps N         steps in a block (default: 5)
  --bare-loss plain|ours  loss of the bare loop: F.cross_entropy, or the trainer's (default: plain)
  overrides               any other key of the config, as in training
"""

import argparse

from torchtitan_lite.benchmarks.bare import check_comparable, measure_bare_cost, warm_up_steps
from torchtitan_lite.config import load_config
from torchtitan_lite.errors import ConfigError, run_script
from torchtitan_lite.logger import init_logger, logger
from torchtitan_lite.parallel.distributed import end_process, init_distributed, read_rank
from torchtitan_lite.parallel.signals import StopSignal
from torchtitan_lite.parallel.watchdog import Watchdog
from torchtitan_lite.train import open_folder
from torchtitan_lite.trainer import Trainer

SETTINGS = [
    *("--training.epochs=", "--checkpoint.enable=false", "--validation.enable=false", "--float8.log_numerics_freq=0"),
    *("--metrics.log_freq=1", "--metrics.enable_tensorboard"),
]


def main(argv: list[str]) -> None:
    """Measure and print. Raises RunError."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return
    parser = argparse.ArgumentParser(prog="scripts/bench_bare.py", usage=__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--block-steps", type=int, default=5)
    parser.add_argument("--bare-loss", choices=("plain", "ours"), default="plain")
    options, words = parser.parse_known_args(argv)
    if options.pairs < 2 or options.block_steps < 1:
        raise ConfigError(
            f"--pairs {options.pairs} must be at least 2, and --block-steps {options.block_steps} at least 1"
        )
    rank, world_size = read_rank()
    steps = options.pairs * options.block_steps + warm_up_steps(options.block_steps)
    config = load_config([*words, f"--training.steps={steps}", *SETTINGS], world_size=world_size)
    check_comparable(config, world_size=world_size)
    watchdog = Watchdog(rank=rank, world_size=world_size, stop_signal=StopSignal(), report=logger.warning)
    device = init_distributed(config.comm)
    run_folder, _ = open_folder(config)
    trainer = Trainer(config, device=device, run_folder=run_folder, resume=None, watchdog=watchdog)
    trainer.report_progress()
    cost = measure_bare_cost(trainer, loss=options.bare_loss, pairs=options.pairs, block_steps=options.block_steps)
    trainer.finish(stopped_by=None)
    logger.info(f"{cost}")
    end_process(0)


if __name__ == "__main__":
    init_logger()
    run_script(main)
