"""List, verify and compare the checkpoints of runs.

  ls FOLDER        list the checkpoints of a run
  verify PATH...   read every byte of checkpoints and report damage
  diff A B         print the differences between two

FOLDER is a run folder or its folder of checkpoints, PATH one of these or a step's folder, A and B
are step folders.

Exit codes: 1 if two checkpoints differ, 4 if one is broken or missing, 7 if the disk fails.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from torchtitan_lite.base.errors import CheckpointError
from torchtitan_lite.base.jsonfile import strict_json
from torchtitan_lite.checkpoint.folders import find_checkpoints, format_summaries, summarize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ls, verify and diff."""
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON")

    text = "list the checkpoints of a run"
    ls = commands.add_parser("ls", parents=[common], help=text)
    ls.add_argument("folder", type=Path, help="run folder, or its folder of checkpoints")

    text = "report damage; exit code 4 if there is any"
    verify = commands.add_parser("verify", parents=[common], help=text)
    text = "step folder, or a folder that ls takes"
    verify.add_argument("paths", type=Path, nargs="+", metavar="path", help=text)
    verify.add_argument("--quick", action="store_true", help="sizes only: do not read every byte")

    text = "print the differences; exit code 1 if there are any"
    diff = commands.add_parser("diff", parents=[common], help=text)
    diff.add_argument("old", type=Path, metavar="A", help="step folder")
    diff.add_argument("new", type=Path, metavar="B", help="step folder")


def ls(args: argparse.Namespace) -> int:
    """Print one line for each checkpoint."""
    summaries = [summarize(path) for path in find_checkpoints(args.folder)]
    as_json = strict_json([asdict(each) for each in summaries])
    print(as_json if args.json else format_summaries(summaries))
    return 0


def verify(args: argparse.Namespace) -> int:
    """Print the problems of each checkpoint; return CheckpointError's exit code if there are
    any."""
    # Imported here because torch takes seconds to import, and ls does without.
    from torchtitan_lite.checkpoint.reading import verify_checkpoint

    paths = [path for each in args.paths for path in find_checkpoints(each)]
    found = {str(path): verify_checkpoint(path, hashes=not args.quick) for path in paths}
    sound = "sizes are as written" if args.quick else "every byte is as written"
    if args.json:
        print(strict_json(found))
    else:
        for path, problems in found.items():
            print(*(f"{path}: {problem}" for problem in problems or [sound]), sep="\n")
    return CheckpointError.exit_code if any(found.values()) else 0


def diff(args: argparse.Namespace) -> int:
    """Print the differences between two checkpoints; return 1 if there are any."""
    from torchtitan_lite.checkpoint.compare import compare  # here for the same reason

    found = compare(args.old, args.new)
    print(strict_json(asdict(found)) if args.json else found)
    return 0 if found.same else 1


def run(args: argparse.Namespace) -> int:
    """Run the chosen command and return the exit code."""
    return {"ls": ls, "verify": verify, "diff": diff}[args.command](args)
