"""Benchmark training on this machine: bf16 and float8, compiled and eager.

Without options it runs all rows that fit the time budget. --dry-run needs no GPU.

Exit codes: 1 if a ratio is lower than in --check, or no row is done, 75 stopped by a signal.
"""

import argparse
from pathlib import Path

from torchtitan_lite.base.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    option = parser.add_argument
    option("--quick", action="store_true", help="run the most important rows only")
    option("--only", default="", metavar="WORDS", help="run rows whose names have all these words")
    option(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="time to take (default: 525, --quick 240; on a CPU 300, 180)",
    )
    option("--out", type=Path, metavar="FILE", help="write JSON, after every row")
    option("--check", type=Path, metavar="FILE", help="compare with this earlier --out FILE")
    option(
        "--tolerance",
        type=float,
        metavar="PCT",
        help="percent by which a ratio may be lower than in --check (default: 5, on a CPU 50)",
    )
    option("--dry-run", action="store_true", help="print the rows and their predictions only")
    option("--device", help="GPU of --dry-run (default: the one at hand)")


def check_options(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that contradict each other."""
    if options.dry_run and (options.out or options.check):
        raise ConfigError("--out and --check need rows that run; leave them or --dry-run out.")
    if options.device and not options.dry_run:
        raise ConfigError(f'--device "{options.device}" is for --dry-run; leave it out.')
    if options.tolerance is not None and not (options.check and 0 <= options.tolerance < 100):
        raise ConfigError(
            f"--tolerance {options.tolerance:g} needs --check, and must be at least 0 and below 100"
        )
    if options.budget is not None and not 0 < options.budget <= 1e9:
        raise ConfigError(f"--budget {options.budget:g} must be a number of seconds above 0")
    if options.out and not options.out.absolute().parent.is_dir():
        raise ConfigError(f"--out {options.out}: there is no folder {options.out.parent}.")


def run(options: argparse.Namespace) -> int:
    """Run the benchmark and return the exit code. Raises RunError."""
    check_options(options)
    from torchtitan_lite.tools.bench_rows import run_options  # torch takes seconds to import

    return run_options(options)
