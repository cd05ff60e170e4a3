"""Evaluate a model on a text: loss, perplexity, bits per byte.

SOURCE is a step's folder, a run folder (its newest checkpoint), or a Hugging Face folder. One
process computes on one device, in the run's precisions and with its float8 linears.

Exit codes: 2 for a wrong config, 3 for broken or missing text, 4 for a broken checkpoint.
"""

import argparse

from torchtitan_lite.base.logger import logger
from torchtitan_lite.base.tables import format_columns

from .parser import Parser, path_or_url, path_text, print_answer


def add_arguments(parser: Parser) -> None:
    """Add the options, and every key of the config."""
    parser.add_keys()
    parser.add_argument("source", type=path_or_url, metavar="SOURCE", help="where the weights are")
    text = "text or token store to evaluate on, whole"
    parser.add_argument("--data", type=path_text, metavar="PATH", required=True, help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Evaluate and print. Raises RunError."""
    from torchtitan_lite.tools.evaluate import evaluate  # torch takes seconds to import

    logger.setLevel("WARNING")  # what a run logs at its start is about training
    found = evaluate(args.source, data=args.data, overrides=args.overrides)
    forms = {name: ",.4f" if isinstance(found[name], float) else ",d" for name in found}
    rows = [(name, format(found[name], form)) for name, form in forms.items()]
    print_answer(args, found, format_columns(rows, right=[1]))
