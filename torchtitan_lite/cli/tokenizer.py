"""Train a sentencepiece tokenizer on any text that a run can train on.

The model shipped with the package: torchtitan-lite tokenizer pystdlib FILE 2256.
"""

import argparse
from functools import partial
from pathlib import Path

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.data.sources import open_source
from torchtitan_lite.data.train_tokenizer import train_tokenizer

from .parser import number, path_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    text = "a folder, a file, hf:DATASET, or pystdlib: see data --help"
    parser.add_argument("source", type=path_text, metavar="SOURCE", help=text)
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="file to write: x.model")
    size = partial(number, least=4, most=2**31 - 1)
    parser.add_argument("size", type=size, metavar="SIZE", help="number of ids")
    text = "field of rows that holds the text (default: text)"
    parser.add_argument("--text-field", default="text", help=text)
    parser.add_argument("--force", action="store_true", help="overwrite the output")


def run(args: argparse.Namespace) -> None:
    """Train the tokenizer. Raises RunError."""
    output, size = args.output, args.size
    if output.suffix != ".model":
        rule = "must end in .model, so that nothing reads it as text"
        raise ConfigError(f"OUTPUT = {output} {rule}; rename it")
    source = open_source(args.source, text_field=args.text_field)
    train_tokenizer(source.documents(), vocab_size=size, output=output, overwrite=args.force)
    print(f"{output}: {size} ids, {output.stat().st_size} bytes")
