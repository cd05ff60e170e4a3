"""The check before any process is spawned: `python -m torchtitan_lite.config --job.config_file
X.toml ...`."""

import argparse

from torchtitan_lite.config import format_help, load_config, resolve_batch, resolve_degrees
from torchtitan_lite.errors import run_script
from torchtitan_lite.logger import init_logger

from .keys import KEYS, show


def main(argv: list[str]) -> None:
    """Print a line about the run that `argv` describes or, with --get, one value alone. Raises
    ConfigError."""
    if {"-h", "--help"} & set(argv):
        print(
            f"{format_help()}\nof this check: --world-size N (default: 1), --get table.key prints its value alone"
        )
        return
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_lite.config", add_help=False, allow_abbrev=False
    )
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--get", choices=KEYS, metavar="table.key")
    options, words = parser.parse_known_args(argv)
    if options.world_size < 1:
        parser.error(f"--world-size {options.world_size} must be at least 1")
    if not options.get:
        init_logger()
    config = load_config(words, world_size=options.world_size)
    if options.get:
        key = KEYS[options.get]
        value = getattr(getattr(config, key.table), key.name)
        print(value if isinstance(value, str) else show(value))
        return
    degrees = resolve_degrees(config.parallelism, world_size=options.world_size)
    batch = resolve_batch(config.training, dp_degree=degrees.dp)
    print(
        f"config ok: {config.model.flavor}, world size {degrees.world_size} = dp_replicate {degrees.dp_replicate} x "
        f"dp_shard {degrees.dp_shard} x tp {degrees.tp}, global batch {batch.global_batch_size}"
    )


if __name__ == "__main__":
    run_script(main)
