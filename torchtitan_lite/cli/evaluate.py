"""Evaluate a checkpoint or a Hugging Face model: loss, perplexity, bits per byte.

SOURCE is a step's folder, a run folder (its newest checkpoint), or a Hugging Face folder. The text
is what the run validates on, or --data, whole. One process computes on one device, in the run's
precisions and with its float8 linears, so that the loss is the run's validation loss.

Exit codes: 2 for a wrong config, 3 for broken or missing text, 4 for a broken checkpoint.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from torchtitan_lite.base.jsonfile import strict_json
from torchtitan_lite.base.logger import logger

from .parser import Parser, path_text


def add_arguments(parser: Parser) -> None:
    """Add the options, and every key of the config."""
    parser.add_keys()
    parser.add_argument("source", type=Path, metavar="SOURCE", help="where the weights are")
    text = "token store or text to evaluate on (default: the run's validation data)"
    parser.add_argument("--data", type=path_text, metavar="PATH", help=text)
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> None:
    """Evaluate and print. Raises RunError."""
    from torchtitan_lite.tools.evaluate import evaluate, format_evaluation  # torch takes seconds

    logger.setLevel("WARNING")  # what a run logs at its start is about training
    found = evaluate(args.source, data=args.data, overrides=args.overrides)
    print(strict_json(asdict(found)) if args.json else format_evaluation(found))
