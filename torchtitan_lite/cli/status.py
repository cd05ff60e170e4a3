"""Report how runs are doing: state, step, loss, rates, time left, and why one failed.

FOLDER is a run folder, or a folder with run folders up to three levels below. Only files in it are
read, so it may be on a shared disk.
"""

import argparse
import time
from pathlib import Path

from torchtitan_lite.tools.runs import as_json, find_runs, format_runs

from .parser import Parser, print_answer


def add_arguments(parser: Parser) -> None:
    """Add the options."""
    text = "a run folder, or a folder with some below it"
    parser.add_argument("folder", type=Path, metavar="FOLDER", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Print the state. Raises ConfigError."""
    runs, now = find_runs(args.folder), time.time()
    found = [as_json(folder, status, now=now) for folder, status in runs.items()]
    print_answer(args, found, format_runs(runs, now=now))
