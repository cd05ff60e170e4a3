"""What a save costs: torchrun --nproc-per-node 2 scripts/bench_checkpoint.py [--mib N] [--rounds N]
[--folder DIR]

Saves a sharded model of that state synchronously, asynchronously, and asynchronously without
hashing, and copies the state, each in turn; prints for how long training would stand still, as
ratios of medians without the first round.

  --mib N       MiB of state a rank (default: 256)
  --rounds N    of each kind (default: 8)
  --folder DIR  where to make a folder for what is saved, which is removed at the end (default: the system's for
                temporary files)
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from torchtitan_lite.benchmarks.costs import measure_save_cost
from torchtitan_lite.collectives import on_rank0
from torchtitan_lite.config import CommConfig
from torchtitan_lite.errors import ConfigError, run_script
from torchtitan_lite.logger import init_logger, logger
from torchtitan_lite.parallel.distributed import end_process, init_distributed


def main(argv: list[str]) -> None:
    """Measure and print. Raises RunError."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return
    parser = argparse.ArgumentParser(
        prog="scripts/bench_checkpoint.py", usage=__doc__, add_help=False
    )
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args(argv)
    if options.mib < 1 or options.rounds < 2:
        raise ConfigError(
            f"--mib {options.mib} must be at least 1, and --rounds {options.rounds} at least 2"
        )
    device = init_distributed(CommConfig())
    folder = on_rank0(lambda: Path(tempfile.mkdtemp(dir=options.folder)))
    try:
        cost = measure_save_cost(folder, device=device, mib=options.mib, rounds=options.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    logger.info(f"{cost}")
    end_process(0)


if __name__ == "__main__":
    init_logger()
    run_script(main)
