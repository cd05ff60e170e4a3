"""List and verify the checkpoints of runs.

  ls FOLDER        list the checkpoints of a run
  verify PATH...   read every byte of checkpoints and report damage

FOLDER is a run folder or its folder of checkpoints. PATH is one of these or a step's folder.

Exit codes: 4 if one is broken or missing, 7 if the disk fails.
"""

import argparse
import time
from pathlib import Path

from torchtitan_lite.base.tables import format_columns
from torchtitan_lite.checkpoint.folders import find_checkpoints
from torchtitan_lite.checkpoint.manifest import (
    MANIFEST,
    BrokenCheckpoint,
    broken_files,
    read_manifest,
)

from .parser import path_or_url

COLUMNS = ["step", "tokens", "written", "GiB", "ranks", "mesh", "float8", "state"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ls and verify."""
    commands = parser.add_subparsers(dest="command", required=True)
    ls = commands.add_parser("ls", help="list the checkpoints of a run")
    ls.add_argument("folder", type=path_or_url, help="run folder, or its folder of checkpoints")

    verify = commands.add_parser("verify", help="report damage; exit code 4 if there is any")
    text = "step folder, or a folder that ls takes"
    verify.add_argument("paths", type=path_or_url, nargs="+", metavar="path", help=text)
    verify.add_argument("--quick", action="store_true", help="sizes only: do not read every byte")


def run(args: argparse.Namespace) -> int:
    """Run the chosen command and return the exit code."""
    if args.command == "ls":
        print(format_checkpoints(find_checkpoints(args.folder)))
        return 0

    from torchtitan_lite.checkpoint.reading import open_checkpoint  # torch takes seconds to import

    code = 0
    for path in (path for each in args.paths for path in find_checkpoints(each)):
        state = "sizes are as written" if args.quick else "every byte is as written"
        try:
            open_checkpoint(path, hashes=not args.quick)
        except BrokenCheckpoint as broken:
            state, code = str(broken), broken.exit_code
        print(f"{path}: {state}")
    return code


def format_checkpoints(paths: list[Path]) -> str:
    """Return a table with one line for each checkpoint."""
    return format_columns([COLUMNS, *map(format_row, paths)])


def format_row(path: Path) -> list[str]:
    """Return the cells of a checkpoint."""
    try:
        manifest = read_manifest(path)
    except BrokenCheckpoint as broken:
        step = path.name.removeprefix("step-").lstrip("0")
        return [step, *6 * ["-"], f"broken: {broken}"]

    size = sum(entry.size for entry in manifest.files.values())
    degrees = (f"{name}={degree}" for name, degree in manifest.mesh.items() if degree > 1)
    float8 = manifest.tables.get("float8", {})
    sound = "ok, weights only" if manifest.has_weights_only else "ok"
    problems = broken_files(path, manifest.files, hashes=False)
    return [
        str(manifest.progress.step),
        str(manifest.progress.tokens),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((path / MANIFEST).stat().st_mtime)),
        f"{size / 2**30:.3f}",
        str(manifest.world_size),
        " ".join(degrees) or "-",
        str(float8.get("recipe_name")) if float8.get("enable_float8_linear") else "no",
        f"broken: {problems[0]}" if problems else sound,
    ]
