"""Print the JSON schema of the TOML files, with which editors complete and check them.

The line `#:schema PATH` at the top of a TOML file names its schema; the shipped configs have it.
"""

import argparse
import json

from torchtitan_lite.config import config_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take no arguments."""


def run(args: argparse.Namespace) -> None:
    """Print the schema."""
    print(json.dumps(config_schema(), indent=1))
