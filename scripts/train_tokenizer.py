#!/usr/bin/env python3
"""Train a sentencepiece tokenizer on any text that a run can train on.

The model shipped with the package: python scripts/train_tokenizer.py --output
torchtitan_lite/data/pystdlib-2256.model
"""

import argparse
import sys
from pathlib import Path

from torchtitan_lite.data.sources import open_source
from torchtitan_lite.data.tokenizer import train_tokenizer
from torchtitan_lite.errors import RunError
from torchtitan_lite.logger import init_logger


def main() -> int:
    """Train, and return the exit code: 3 if text, vocabulary or output do not allow it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source", default="pystdlib", help="pystdlib (default), a folder, a file, or hf:DATASET"
    )
    parser.add_argument(
        "--text-field", default="text", help="field of rows that holds the text (default: text)"
    )
    parser.add_argument(
        "--vocab-size", type=int, default=2256, help="number of ids (default: 2256)"
    )
    parser.add_argument("--output", type=Path, required=True, help="model file to write")
    parser.add_argument("--force", action="store_true", help="overwrite the output")
    args = parser.parse_args()
    init_logger()

    try:
        source = open_source(args.source, text_field=args.text_field)
        train_tokenizer(
            source.documents(), vocab_size=args.vocab_size, output=args.output, overwrite=args.force
        )
    except RunError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{args.output}: {args.vocab_size} ids, {args.output.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
