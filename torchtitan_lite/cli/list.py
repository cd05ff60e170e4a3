"""List what a config can name: flavors, recipes, devices, datasets, and shipped configs."""

import argparse
from collections.abc import Iterator, Mapping

from torchtitan_lite.base.jsonfile import read_toml, strict_json
from torchtitan_lite.base.tables import format_columns
from torchtitan_lite.catalog.datasets import DATASETS
from torchtitan_lite.catalog.devices import DEVICES
from torchtitan_lite.catalog.flavors import FLAVORS, count_parameters
from torchtitan_lite.catalog.recipes import RECIPES
from torchtitan_lite.config import find_config, shipped_configs

USUAL_VOCABULARY = 32_000
KINDS = ("flavors", "recipes", "devices", "datasets", "configs")
Row = Mapping[str, str | int | float | None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("kind", nargs="?", choices=KINDS, help="what to list (default: all)")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> None:
    """Print the tables."""
    tables = {kind: list(ROWS[kind]()) for kind in ([args.kind] if args.kind else KINDS)}
    if args.json:
        print(strict_json(tables))
        return
    texts = [f"{kind}\n{format_rows(rows)}" for kind, rows in tables.items()]
    print("\n\n".join(texts))


def format_rows(rows: list[Row]) -> str:
    """Return rows of equal keys as a table, in which - is what is not known."""

    def cell(value: str | int | float | None) -> str:
        return "-" if value is None else value if isinstance(value, str) else f"{value:,}"

    cells = [[cell(value) for value in row.values()] for row in rows]
    numeric = [i for i, value in enumerate(rows[0].values()) if not isinstance(value, str)]
    return format_columns([list(rows[0]), *cells], right=numeric)


def list_flavors() -> Iterator[Row]:
    """Yield the dimensions of each flavor."""
    for name, args in FLAVORS.items():
        own = args.vocab_size or USUAL_VOCABULARY
        yield {
            "flavor": name,
            "parameters": count_parameters(args, vocab_size=own),
            "dim": args.dim,
            "layers": args.n_layers,
            "heads": args.n_heads,
            "kv heads": args.n_kv_heads,
            "ffn_dim": args.ffn_dim,
            "vocabulary": args.vocab_size or f"tokenizer's (say {USUAL_VOCABULARY:,})",
        }


def list_recipes() -> Iterator[Row]:
    """Yield the matmuls of each recipe, and the GPUs that run it."""
    for name, recipe in RECIPES.items():
        needs = "8.9 or newer"
        if recipe.capability_major is not None:
            needs = f"{recipe.capability_major}.x"
        matmuls = ", ".join(recipe.matmuls)
        yield {"recipe": name, "matmuls in float8": matmuls, "compute capability": needs}


def list_devices() -> Iterator[Row]:
    """Yield the data sheet of each device."""
    for device in DEVICES:
        yield {
            "device": device.name,
            "bf16 TFLOPS": device.bf16_tflops,
            "fp8 TFLOPS": device.fp8_tflops,
            "memory GiB": device.memory_gib,
            "TB/s": device.bandwidth_tb_s,
        }


def list_datasets() -> Iterator[Row]:
    """Yield where each dataset is."""
    for name, dataset in DATASETS.items():
        yield {"dataset": name, "text": dataset.path}


def list_configs() -> Iterator[Row]:
    """Yield what each shipped config trains."""
    for name in shipped_configs():
        job = read_toml(find_config(name))["job"]
        yield {"config": name, "trains": job["description"]}


ROWS = {
    "flavors": list_flavors,
    "recipes": list_recipes,
    "devices": list_devices,
    "datasets": list_datasets,
    "configs": list_configs,
}
