"""What logging every step costs: torchrun --nproc-per-node 1 scripts/bench_logging.py
--job.config_file X.toml ...

Trains with the writers that the config asks for, in pairs of blocks of steps at log_freq 1 and
1000, and prints how much longer the former take. Checkpoints and validation are off.

  --pairs N         of blocks (default: 40)
  --block-steps N   steps in a block (default: 5)
  overrides         any other key of the config, as in training
"""

from torchtitan_lite.benchmarks.costs import measure_logging_cost
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


def main(argv: list[str]) -> None:
    """Measure and print. Raises RunError."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return
    options, overrides = read_options(pairs_parser(__file__, __doc__, pairs=40), argv)
    steps = (2 * options.pairs + 1) * options.block_steps
    _, world_size = read_rank()
    config = load_config(
        [*overrides, f"--training.steps={steps}", *STEPS_ALONE], world_size=world_size
    )
    with started_trainer(config) as trainer:
        cost = measure_logging_cost(trainer, pairs=options.pairs, block_steps=options.block_steps)
    logger.info(f"{cost}")
    end_process(0)


if __name__ == "__main__":
    init_logger()
    run_script(main)
