"""Report how runs are doing: state, step, loss, rates, time left, and why one failed.

FOLDER is a run folder, or a folder of run folders. Only files in it are read, so it may be on a
shared disk.

Exit codes: 2 if there is no run; with --watch, the exit code of the run.
"""

import argparse
import sys
import time
from pathlib import Path

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.jsonfile import strict_json
from torchtitan_lite.tools.runs import as_json, find_runs, format_runs, watch

WATCH_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    option = parser.add_argument
    option("folder", type=Path, metavar="FOLDER", help="a run folder, or a folder of them")
    option("--watch", action="store_true", help="print again every 5 seconds, until the runs end")
    option("--json", action="store_true", help="print a list of JSON objects")


def run(args: argparse.Namespace) -> int:
    """Print the state and return the exit code. Raises ConfigError."""
    if args.watch and args.json:
        raise ConfigError("--watch prints text; drop it, or --json")
    if args.watch:
        try:
            return watch(args.folder, interval_s=WATCH_SECONDS, clear=sys.stdout.isatty())
        except KeyboardInterrupt:
            return 0
    runs, now = find_runs(args.folder), time.time()
    if args.json:
        print(strict_json([as_json(folder, status, now=now) for folder, status in runs.items()]))
    else:
        print(format_runs(runs, now=now))
    return 0
