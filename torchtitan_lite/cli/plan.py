"""Predict what a run will cost and gain: memory, rates, time, and float8's effect.

No GPU is needed. With --search, find the layout that trains fastest. The config is named by
--job.config_file, as in training.
"""

import argparse
from functools import partial

from torchtitan_lite.config import given_keys, load_config

from .parser import Parser, device_count, number, print_answer

DATA_SHEET = {
    "bandwidth_tb_s": ("--bandwidth", "its memory bandwidth, 10^12 bytes per second"),
    "memory_gib": ("--memory", "its memory, GiB"),
    "link_gb_s": ("--link", "GB/s that it sends to others of its node, and receives"),
    "network_gb_s": ("--network", "GB/s that it sends to other nodes, and receives"),
}
"""Option that replaces each field of the data sheet, and what it is."""


def add_arguments(parser: Parser) -> None:
    """Add the options, and every key of the config."""
    parser.add_keys()
    option, positive = parser.add_argument, partial(number, kind=float, least=1e-6)
    option("--json", action="store_true", help="print JSON")

    text = "number of processes, one per GPU (default: 8)"
    option("--world-size", type=device_count, default=8, metavar="N", help=text)
    option("--device", metavar="NAME", help="GPU to plan for (default: the GPU of this machine)")
    for field, (name, meaning) in DATA_SHEET.items():
        text = f"{meaning} (default: data sheet)"
        option(name, dest=field, type=positive, metavar="X", help=text)
    text = "GPUs of a node (default: data sheet)"
    option("--node-devices", type=device_count, metavar="N", help=text)

    answer = parser.add_mutually_exclusive_group()
    text = "tokens per second per device that a run reached (default: predicted)"
    answer.add_argument("--tps", type=positive, metavar="X", help=text)
    text = (
        "print the five fastest layouts, microbatches, activation checkpointings and recipes that "
        "fit, and the overrides that choose the first; given keys stay"
    )
    answer.add_argument("--search", action="store_true", help=text)


def run(options: argparse.Namespace) -> None:
    """Print the plan, or the answer of a search. Raises RunError."""
    # Imported here because torch takes seconds to import.
    from torchtitan_lite.planner.plan import find_device, plan
    from torchtitan_lite.planner.report import format_plan, format_search
    from torchtitan_lite.planner.search import Space, make_search

    words, world_size = options.overrides, options.world_size
    config = load_config(words, world_size=world_size)
    given = {field: getattr(options, field) for field in (*DATA_SHEET, "node_devices")}
    device = find_device(options.device, config.metrics, **given)

    if options.search:
        found = make_search(Space(config, world_size, device, given_keys(words)))
        print_answer(options, found, format_search(found))
    else:
        found = plan(config, world_size=world_size, device=device, tps=options.tps)
        print_answer(options, found, format_plan(found))
