"""Benchmark training on this machine: bf16 and float8, compiled and eager.

Each row is a run of 12 steps in a process and a folder of its own, and the table compares them:
each row's tps over the first row's, its mfu and its memory. Without --job.config_file, rows train
8B with 16 layers on a GPU, and the debug model on a CPU. Overrides hold for all rows.

Exit codes: 1 if no row is done.
"""

import argparse
from pathlib import Path

from torchtitan_lite.base.errors import ConfigError, RunError
from torchtitan_lite.tools.bench import ROWS, run_rows
from torchtitan_lite.tools.comparison import format_runs, read_runs

from .parser import Parser


def add_arguments(parser: Parser) -> None:
    """Add the options, and every key of the config."""
    parser.add_keys()
    names = f"rows to run, in this order (default: all): {', '.join(ROWS)}"
    parser.add_argument("rows", nargs="*", metavar="ROW", help=names)
    out = Path("outputs/bench")
    text = f"folder that gets a run folder and a log for each row (default: {out})"
    parser.add_argument("--out", type=Path, default=out, metavar="FOLDER", help=text)


def run(args: argparse.Namespace) -> None:
    """Run the rows, and print their table. Raises RunError."""
    names = list(dict.fromkeys(args.rows)) or list(ROWS)
    if unknown := [name for name in names if name not in ROWS]:
        raise ConfigError(f"{unknown[0]} is not a row; the rows are {', '.join(ROWS)}.")
    import torch  # takes seconds

    on = "GPU" if torch.cuda.is_available() else "CPU"
    done = run_rows(names, args.overrides, on=on, out=args.out.absolute())
    if not done:
        raise RunError("no row is done")
    print(format_runs(read_runs(done), last=1))
    if on == "CPU":
        print("\nFloat8 is emulated on a CPU: its rows show that it runs, not what it gains.")
