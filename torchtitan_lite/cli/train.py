"""Train from a TOML config: check it, start a process per GPU, supervise them."""

import argparse

from torchtitan_lite.config import format_help
from torchtitan_lite.run import launch

from .parser import Parser


def add_arguments(parser: Parser) -> None:
    """Accept every key of the config."""
    parser.add_keys()
    parser.usage = f"[VARIABLE=value ...] {parser.prog} [--table.key value ...]"
    parser.epilog = f"{launch.VARIABLES}\n{format_help()}"


def run(args: argparse.Namespace) -> None:
    """Launch the run, and exit with its exit code."""
    launch.main(args.overrides)
