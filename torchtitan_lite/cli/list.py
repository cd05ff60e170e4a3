"""List what a config can name: flavors, recipes, devices, datasets, and shipped configs."""

import argparse
from typing import Any

from torchtitan_lite.base.jsonfile import read_toml
from torchtitan_lite.base.tables import format_columns
from torchtitan_lite.catalog.datasets import DATASETS
from torchtitan_lite.catalog.devices import DEVICES
from torchtitan_lite.catalog.flavors import FLAVORS, count_parameters
from torchtitan_lite.catalog.recipes import RECIPES
from torchtitan_lite.config import find_config, shipped_configs
from torchtitan_lite.data.tokenizer import build_tokenizer

KINDS = ("flavors", "recipes", "devices", "datasets", "configs")
SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim")
DATA_SHEET = ("bf16_tflops", "fp8_tflops", "memory_gib", "bandwidth_tb_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument("kind", nargs="?", choices=KINDS, help="what to list (default: all)")


def run(args: argparse.Namespace) -> None:
    """Print the tables."""
    for heading, *rows in build_tables():
        if args.kind in (None, heading[0]):
            numeric = [column for column, cell in enumerate(rows[0]) if not isinstance(cell, str)]
            texts = [[format_cell(cell) for cell in row] for row in rows]
            print(f"{format_columns([heading, *texts], right=numeric)}\n")


def build_tables() -> list[list[tuple[Any, ...]]]:
    """Return the tables of KINDS, each with its heading first."""
    flavors = [("flavors", "parameters", *SIZES, "with vocabulary")]
    included = build_tokenizer("").vocab_size
    for name, args in FLAVORS.items():
        count = count_parameters(args, vocab_size=args.vocab_size or included)
        vocabulary = f"{args.vocab_size or included:,}{'' if args.vocab_size else ' (tokenizer)'}"
        flavors.append((name, count, *(getattr(args, size) for size in SIZES), vocabulary))

    recipes = [
        (name, ", ".join(each.matmuls), str(each.capability_major or "8.9 or newer"))
        for name, each in RECIPES.items()
    ]
    devices = [(each.name, *(getattr(each, name) for name in DATA_SHEET)) for each in DEVICES]
    texts = [(name, dataset.path) for name, dataset in DATASETS.items()]
    names = shipped_configs()
    configs = [(name, read_toml(find_config(name))["job"]["description"]) for name in names]
    return [
        flavors,
        [("recipes", "matmuls in float8", "compute capability"), *recipes],
        [("devices", *DATA_SHEET), *devices],
        [("datasets", "text"), *texts],
        [("configs", "trains"), *configs],
    ]


def format_cell(value: str | float | None) -> str:
    """Return a value as text, - for one that is not known."""
    if isinstance(value, str):
        return value
    return "-" if value is None else f"{value:,}"
