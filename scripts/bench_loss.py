"""Memory and time of the loss and its backward, ours and PyTorch's own, each in a process of its
own.

python scripts/bench_loss.py [--tokens 8192] [--vocab-size 128256] [--dim 256]

PyTorch's takes 12 GB of memory with the defaults.
"""

import argparse

from torchtitan_lite.benchmarks.loss import format_costs, measure_losses
from torchtitan_lite.errors import ConfigError, run_script
from torchtitan_lite.logger import init_logger


def main(argv: list[str]) -> None:
    """Measure and print. Raises ConfigError."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return
    parser = argparse.ArgumentParser(
        prog="scripts/bench_loss.py", usage=__doc__, add_help=False, allow_abbrev=False
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--dim", type=int, default=256)
    options = parser.parse_args(argv)
    for name, value in vars(options).items():
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    print(format_costs(measure_losses(**vars(options))))


if __name__ == "__main__":
    init_logger()
    run_script(main)
