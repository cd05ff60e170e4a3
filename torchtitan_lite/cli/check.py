"""Check a config as the start of a run would, without one: every error at once.

FILE is a TOML file or the name of a shipped one. The check needs no GPU, reads neither text nor
tokenizer, and takes less than a second.

Exit codes: 2 for a wrong config.
"""

import argparse

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.config import load_config
from torchtitan_lite.config.job import TokenizerValues, build_job

from .parser import Parser, device_count


def add_arguments(parser: Parser) -> None:
    """Add the options, and every key of the config."""
    parser.add_keys()
    text = "config of the run; --job.config_file FILE does the same"
    parser.add_argument("file", nargs="?", metavar="FILE", help=text)
    text = "number of processes of the run, one per GPU (default: 8)"
    parser.add_argument("--world-size", type=device_count, default=8, metavar="N", help=text)


def run(args: argparse.Namespace) -> None:
    """Print the layout and the batch. Raises ConfigError."""
    named = ["--job.config_file", args.file] if args.file else []
    words = [word.replace("-", "_").partition("=")[0] for word in args.overrides]
    if named and "__job.config_file" in words:
        raise ConfigError(f"check {args.file} and --job.config_file are two configs; leave one out")
    config = load_config([*named, *args.overrides], world_size=args.world_size)
    # No rule on the config needs the tokenizer, which another machine may have.
    unread = TokenizerValues(config.model.tokenizer_path, vocab_size=0, bos_id=0, fingerprint="")
    job = build_job(config, world_size=args.world_size, tokenizer=unread)
    print(f"{job.model_name}; {job.layout()}")
