"""Compare runs at equal tokens.

Prints for each run its final and validation loss; how far its losses are from the first run's: the
final one, the median of the last half, the largest difference and its step; the largest difference
of gradient norms; tps, mfu and peak memory; the settings that differ; and the command for curves.
Equal tokens are token counts at which all runs logged a step; nothing is interpolated.
"""

import argparse
from pathlib import Path

from torchtitan_lite.metrics.summary import FINAL_STEPS
from torchtitan_lite.tools.comparison import format_comparison, read_runs

from .parser import number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("runs", type=Path, nargs="*", help="run folder, or its metrics.jsonl")
    text = f"number of steps that a final loss is the mean of (default: {FINAL_STEPS})"
    parser.add_argument("--last", type=number, default=FINAL_STEPS, metavar="N", help=text)
    parser.add_argument("--html", type=Path, metavar="FILE.html", help="page to write, with curves")


def run(args: argparse.Namespace) -> None:
    """Write the page, if asked for, and print the table. Raises RunError."""
    runs = read_runs(args.runs)
    if args.html is not None:
        from torchtitan_lite.tools.report import write_report  # torch takes seconds to import

        write_report(args.html, runs, last=args.last)
    print(format_comparison(runs, last=args.last))
