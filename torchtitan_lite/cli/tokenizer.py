"""Train a sentencepiece tokenizer on any text that a run can train on.

The model shipped with the package: torchtitan-lite tokenizer --output FILE.
"""

import argparse
from pathlib import Path

from torchtitan_lite.data.sources import open_source
from torchtitan_lite.data.train_tokenizer import train_tokenizer

from .parser import path_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    text = "pystdlib (default), a folder, a file, or hf:DATASET"
    parser.add_argument("--source", type=path_text, default="pystdlib", help=text)
    text = "field of rows that holds the text (default: text)"
    parser.add_argument("--text-field", default="text", help=text)
    text = "number of ids (default: 2256)"
    parser.add_argument("--vocab-size", type=int, default=2256, help=text)
    parser.add_argument("--output", type=Path, required=True, help="model file to write")
    parser.add_argument("--force", action="store_true", help="overwrite the output")


def run(args: argparse.Namespace) -> None:
    """Train the tokenizer."""
    source = open_source(args.source, text_field=args.text_field)
    train_tokenizer(
        source.documents(), vocab_size=args.vocab_size, output=args.output, overwrite=args.force
    )
    print(f"{args.output}: {args.vocab_size} ids, {args.output.stat().st_size} bytes")
