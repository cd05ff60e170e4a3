"""The trainer against a bare PyTorch loop:

torchrun --nproc-per-node 2 scripts/bench_bare.py --job.config_file X.toml ...

Trains the same model on the same batches twice in the same processes, in pairs of blocks of steps:
by the trainer, with a record of every step and TensorBoard, and by a loop of FSDP2, gradient
clipping and fused AdamW alone. Prints the ratios of their tokens/s. Checkpoints and validation are
off.

  --pairs N               of blocks (default: 20)
  --block-steps N         steps in a block (default: 5)
  --bare-loss plain|ours  loss of the bare loop: F.cross_entropy, or the trainer's (default: plain)
  overrides               any other key of the config, as in training
"""

from torchtitan_lite.benchmarks.bare import check_comparable, measure_bare_cost, warm_up_steps
from torchtitan_lite.benchmarks.paired import (
    STEPS_ALONE,
    pairs_parser,
    read_options,
    started_trainer,
)
from torchtitan_lite.config import load_config
from torchtitan_lite.errors import run_script
from torchtitan_lite.logger import init_logger, logger
from torchtitan_lite.parallel.distributed import end_process, read_rank

SETTINGS = (
    *STEPS_ALONE,
    "--float8.log_numerics_freq=0",
    "--metrics.log_freq=1",
    "--metrics.enable_tensorboard",
)


def main(argv: list[str]) -> None:
    """Measure and print. Raises RunError."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return
    parser = pairs_parser(__file__, __doc__, pairs=20)
    parser.add_argument("--bare-loss", choices=("plain", "ours"), default="plain")
    options, overrides = read_options(parser, argv)
    steps = options.pairs * options.block_steps + warm_up_steps(options.block_steps)
    _, world_size = read_rank()
    config = load_config(
        [*overrides, f"--training.steps={steps}", *SETTINGS], world_size=world_size
    )
    check_comparable(config, world_size=world_size)
    with started_trainer(config) as trainer:
        cost = measure_bare_cost(
            trainer, loss=options.bare_loss, pairs=options.pairs, block_steps=options.block_steps
        )
    logger.info(f"{cost}")
    end_process(0)


if __name__ == "__main__":
    init_logger()
    run_script(main)
