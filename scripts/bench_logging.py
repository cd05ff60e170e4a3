"""What logging every step costs: torchrun --nproc-per-node 1 scripts/bench_logging.py --job.config_file X.toml ...

Trains with the writers that the config asks for, in pairs of blocks of steps at log_freq 1 and 1000, and prints how
much longer the former take. --pairs N (default 40) and --block-steps N (default 5) before the keys of the config.
"""

import argparse
import os

from torchtitan_lite.bench import measure_logging_cost
from torchtitan_lite.config import load_config
from torchtitan_lite.logger import init_logger, logger
from torchtitan_lite.parallel.distributed import init_distributed, leave_distributed
from torchtitan_lite.train import Trainer, open_folder


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(usage=__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--block-steps", type=int, default=5)
    options, words = parser.parse_known_args()
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return
    init_logger()
    steps = (2 * options.pairs + 1) * options.block_steps
    config = load_config([*words, f"--training.steps={steps + 1}"], world_size=int(os.environ.get("WORLD_SIZE", "1")))
    device = init_distributed(config.comm)
    run_folder, _ = open_folder(config)
    trainer = Trainer(config, device=device, run_folder=run_folder, resume_step=0)
    trainer.report_progress()
    cost = measure_logging_cost(trainer, pairs=options.pairs, block_steps=options.block_steps)
    logger.info(f"{cost}")
    leave_distributed(0)


if __name__ == "__main__":
    main()
