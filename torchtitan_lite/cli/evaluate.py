"""Evaluate a model on a text (loss, perplexity, bits per byte) or on tasks.

SOURCE is a step's folder, a run folder (its newest checkpoint), or a Hugging Face folder. One
process computes on one device: a text in the run's precisions and with its float8 linears, tasks
by lm-evaluation-harness and transformers, in bfloat16 on a GPU, else in float32.

Exit codes: 2 for a wrong config, 3 for broken or missing text, 4 for a broken checkpoint.
"""

import argparse
from functools import partial
from pathlib import Path

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.logger import logger
from torchtitan_lite.base.tables import format_columns

from .parser import Parser, number, path_or_url, path_text, print_answer


def add_arguments(parser: Parser) -> None:
    """Add the options, and every key of the config."""
    parser.add_keys()
    option, either = parser.add_argument, parser.add_mutually_exclusive_group(required=True)
    option("source", type=path_or_url, metavar="SOURCE", help="where the weights are")
    text = "text or token store to evaluate on, whole"
    either.add_argument("--data", type=path_text, metavar="PATH", help=text)
    text = "tasks of lm-evaluation-harness to evaluate on"
    either.add_argument("--tasks", nargs="+", action="extend", metavar="NAME", help=text)
    option("--limit", type=number, metavar="N", help="take N examples of each task (default: all)")
    count, text = partial(number, least=0), "solved examples in a prompt (default: the task's)"
    option("--num-fewshot", type=count, metavar="N", help=text)
    option("--include-path", type=Path, metavar="FOLDER", help="your own YAML tasks: may run code")
    option("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Evaluate and print. Raises RunError."""
    options = {name: getattr(args, name) for name in ("limit", "num_fewshot", "include_path")}
    given = [f"--{name.replace('_', '-')}" for name in options if options[name] is not None]
    if unused := args.overrides if args.tasks else given:
        target = "--tasks" if args.tasks else "--data"
        raise ConfigError(f"{unused[0]} has no effect on {target}; leave it out")

    from torchtitan_lite.tools.evaluate import evaluate, evaluate_tasks  # torch takes seconds

    logger.setLevel("WARNING")  # what a run logs at its start is about training
    if args.tasks:
        found, text = evaluate_tasks(args.source, args.tasks, **options)
    else:
        found = evaluate(args.source, data=args.data, overrides=args.overrides)
        forms = {name: ",.4f" if isinstance(found[name], float) else ",d" for name in found}
        rows = [(name, format(found[name], form)) for name, form in forms.items()]
        text = format_columns(rows, right=[1])
    print_answer(args, found, text)
