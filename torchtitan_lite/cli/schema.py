"""Print the JSON schema of the TOML files, with which editors complete and check them.

The line `#:schema PATH` at the top of a TOML file names its schema; the shipped configs have it.
With --markdown, print the page of all keys instead.
"""

import argparse
import json

from torchtitan_lite.config import config_schema, format_help

PAGE = """\
# Config keys

What `./run_train.sh --help` prints: every key of the TOML file, with its type, default and meaning.
This page is generated: `torchtitan-lite schema --markdown > docs/config.md`.

```text
{}```
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument("--markdown", action="store_true", help="print the keys as docs/config.md")


def run(args: argparse.Namespace) -> None:
    """Print the schema, or the page."""
    if args.markdown:
        print(PAGE.format(format_help()), end="")
    else:
        print(json.dumps(config_schema(), indent=1))
