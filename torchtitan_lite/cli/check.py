"""Check a config without starting a run: print its layout and batch, or its errors.

The config is named by --job.config_file, as in training. The check needs no GPU, reads neither text
nor tokenizer, and takes less than a second.

Exit codes: 2 for a wrong config.
"""

import argparse

from torchtitan_lite.config import load_config
from torchtitan_lite.config.job import TokenizerValues, build_job

from .parser import Parser, device_count


def add_arguments(parser: Parser) -> None:
    """Add the options, and every key of the config."""
    parser.add_keys()
    text = "number of processes of the run, one per GPU (default: 8)"
    parser.add_argument("--world-size", type=device_count, default=8, metavar="N", help=text)


def run(args: argparse.Namespace) -> None:
    """Print the layout and the batch. Raises ConfigError."""
    config = load_config(args.overrides, world_size=args.world_size)
    # No rule on the config needs the tokenizer, which another machine may have.
    unread = TokenizerValues(config.model.tokenizer_path, vocab_size=0, bos_id=0, fingerprint="")
    job = build_job(config, world_size=args.world_size, tokenizer=unread)
    print(f"{job.model_name}; {job.layout()}")
