"""List what a config can name: flavors, recipes, devices, datasets, and shipped configs."""

import argparse

from torchtitan_lite.base.jsonfile import read_toml
from torchtitan_lite.base.tables import format_columns
from torchtitan_lite.catalog.datasets import DATASETS
from torchtitan_lite.catalog.devices import DEVICES
from torchtitan_lite.catalog.flavors import FLAVORS, count_parameters
from torchtitan_lite.catalog.recipes import RECIPES
from torchtitan_lite.config import find_config, shipped_configs
from torchtitan_lite.data.tokenizer import build_tokenizer

HEADINGS = {
    "flavors": ("parameters", "dim", "layers", "heads", "kv heads", "ffn_dim", "with vocabulary"),
    "recipes": ("matmuls in float8", "compute capability"),
    "devices": ("bf16 TFLOPS", "fp8 TFLOPS", "memory GiB", "TB/s"),
    "datasets": ("text",),
    "configs": ("trains",),
}
Row = tuple[str | int | float | None, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    text = "what to list (default: all)"
    parser.add_argument("kind", nargs="?", choices=tuple(HEADINGS), help=text)


def run(args: argparse.Namespace) -> None:
    """Print the tables."""
    for kind, rows in build_tables().items():
        if args.kind in (None, kind):
            numeric = [column for column, cell in enumerate(rows[0]) if not isinstance(cell, str)]
            texts = [tuple(map(format_cell, row)) for row in rows]
            heading = (kind, *HEADINGS[kind])
            print(f"{format_columns([heading, *texts], right=numeric)}\n")


def build_tables() -> dict[str, list[Row]]:
    """Return the rows of each table, by its name."""
    flavors: list[Row] = []
    included = build_tokenizer("").vocab_size
    for name, args in FLAVORS.items():
        count = count_parameters(args, vocab_size=args.vocab_size or included)
        sizes = (args.dim, args.n_layers, args.n_heads, args.n_kv_heads, args.ffn_dim)
        vocabulary = f"{args.vocab_size or included:,}{'' if args.vocab_size else ' (tokenizer)'}"
        flavors.append((name, count, *sizes, vocabulary))
    return {
        "flavors": flavors,
        "recipes": [
            (name, ", ".join(each.matmuls), str(each.capability_major or "8.9 or newer"))
            for name, each in RECIPES.items()
        ],
        "devices": [
            (each.name, each.bf16_tflops, each.fp8_tflops, each.memory_gib, each.bandwidth_tb_s)
            for each in DEVICES
        ],
        "datasets": [(name, dataset.path) for name, dataset in DATASETS.items()],
        "configs": [
            (name, read_toml(find_config(name))["job"]["description"]) for name in shipped_configs()
        ],
    }


def format_cell(value: str | int | float | None) -> str:
    """Return a value as text, - for one that is not known."""
    if isinstance(value, str):
        return value
    return "-" if value is None else f"{value:,}"
