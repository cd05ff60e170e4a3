"""Compare runs at equal tokens.

python scripts/compare_runs.py RUN RUN ... [--last N]

Prints for each run its final loss and the distance to the first run's, the largest differences of
loss and gradient norm, tps and mfu. Equal tokens are token counts at which all runs logged a step;
nothing is interpolated.

  RUN       run folder, or its metrics.jsonl
  --last N  number of steps that a final loss is the mean of (default: 20)
"""

import argparse
from pathlib import Path

from torchtitan_lite.errors import ConfigError, run_script
from torchtitan_lite.metrics.comparison import format_runs, read_runs


def main(argv: list[str]) -> None:
    """Print the table. Raises ConfigError."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return
    parser = argparse.ArgumentParser(prog="scripts/compare_runs.py", usage=__doc__, add_help=False)
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--last", type=int, default=20)
    options = parser.parse_args(argv)
    if options.last < 1:
        raise ConfigError(f"--last {options.last} must be at least 1")
    print(format_runs(read_runs(options.runs), last=options.last))


if __name__ == "__main__":
    run_script(main)
