"""Check what works on this machine, and say what does not and why.

Each check runs the real thing: float8 matmuls of each recipe are compared with float32, a function
is compiled, a file is written.

Exit codes: 1 if training does not work here.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from torchtitan_lite.base.errors import RunError
from torchtitan_lite.base.jsonfile import strict_json
from torchtitan_lite.base.logger import logger


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    text = "where runs would be written (default: the working directory)"
    parser.add_argument("--folder", type=Path, default=Path(), help=text)
    text = "measure no speeds: not of matmuls, and not of the disk"
    parser.add_argument("--quick", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects")


def run(args: argparse.Namespace) -> int:
    """Print the findings and return the exit code."""
    try:
        from torchtitan_lite.tools.doctor import (  # torch: seconds
            can_train,
            examine,
            format_findings,
        )
    except Exception as error:  # a broken torch can raise anything
        cause = f"{type(error).__name__}: {error}"
        raise RunError(f"training does not work here: torch cannot be imported: {cause}") from error

    logger.setLevel("WARNING")  # runs log how they emulate float8
    findings = examine(folder=args.folder.resolve(), quick=args.quick)
    as_json = strict_json([asdict(each) for each in findings])
    print(as_json if args.json else format_findings(findings))
    return 0 if can_train(findings) else 1
