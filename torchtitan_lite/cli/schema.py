"""Print the JSON schema of the TOML files, with which editors complete and check them.

The line `#:schema PATH` at the top of a TOML file names its schema; the shipped configs have it.
With --markdown, print the page of all keys instead.
"""

import argparse
import json

from torchtitan_lite.config import config_schema, format_config_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    text = "print the keys as docs/config.md"
    parser.add_argument("--markdown", action="store_true", help=text)


def run(args: argparse.Namespace) -> None:
    """Print the schema, or the page."""
    page = format_config_page() if args.markdown else f"{json.dumps(config_schema(), indent=1)}\n"
    print(page, end="")
