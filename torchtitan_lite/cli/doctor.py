"""Check what works on this machine: two ranks, the compiler, matmuls, the disk.

Exit codes: 1 if training does not work here.
"""

import argparse
from pathlib import Path

from torchtitan_lite.base.errors import RunError
from torchtitan_lite.base.logger import logger


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    text = "where runs would be written (default: the working directory)"
    parser.add_argument("--folder", type=Path, default=Path(), help=text)


def run(args: argparse.Namespace) -> int:
    """Print what each check saw, and return the exit code."""
    try:
        from torchtitan_lite.tools.doctor import NEEDED, build_checks, run_check  # torch: seconds
    except Exception as error:  # a broken torch can raise anything
        raise RunError(f"torch cannot be imported: {type(error).__name__}: {error}") from error

    logger.setLevel("WARNING")  # runs log how they emulate float8
    trains = True
    for name, check in build_checks(args.folder.resolve()).items():
        works, text = run_check(check)
        print(f"{name:<24}  {'works' if works else 'FAILS'}  {text}", flush=True)
        trains = trains and (works or name not in NEEDED)
    print(f"\ntraining {'works' if trains else 'does not work'} here")
    return 0 if trains else 1
