"""Predict what a run will cost and gain: memory, rates, time, and float8's effect.

No GPU is needed. With --search, find the layout that trains fastest; with --longest, the longest
sequence that fits. The config is named by --job.config_file, as in training.
"""

import argparse
from pathlib import Path

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.config import given_keys, load_config

from .parser import Parser, print_answer

DEVICE_FIELDS = {
    "bandwidth": "bandwidth_tb_s",
    "memory": "memory_gib",
    "link": "link_gb_s",
    "network": "network_gb_s",
    "node_devices": "node_devices",
}
"""Field of the data sheet that each option replaces."""
POSITIVE = {
    "bandwidth": "its memory bandwidth, 10^12 bytes per second (default: data sheet)",
    "memory": "its memory, GiB (default: data sheet)",
    "link": "GB/s that it sends to others of its node, and receives (default: data sheet)",
    "network": "GB/s that it sends to other nodes, and receives (default: mostly 50)",
    "tps": "tokens per second per device that a run reached (default: predicted)",
    "gpu-hour": "price of an hour of one GPU, in any currency: a search adds the cost of a run",
}
COUNTS = {
    "world-size": "number of processes, one per GPU (default: 8)",
    "node-devices": "GPUs of a node (default: data sheet)",
}
FLAGS = {
    "search": "print the five fastest layouts, microbatches, activation checkpointings and recipes "
    "that fit, and the overrides that choose the first; given keys stay",
    "longest": "print the longest sequence that fits when 1, 2, 4, 8 or 16 GPUs share each",
    "json": "print every number; docs/plan.md documents the keys",
}
MOST_DEVICES = 10**6


def add_arguments(parser: Parser) -> None:
    """Add the options, and every key of the config."""
    parser.add_keys()
    option = parser.add_argument
    option("--device", metavar="NAME", help="GPU to plan for (default: the GPU of this machine)")
    for name, text in COUNTS.items():
        option(f"--{name}", type=int, metavar="N", help=text)
    for name, text in POSITIVE.items():
        option(f"--{name}", type=float, metavar="X", help=text)
    text = "results of scripts/gpu_day.sh on this GPU, whose rates replace published ones"
    option("--measured", type=Path, metavar="FILE", help=text)
    for name, text in FLAGS.items():
        option(f"--{name}", action="store_true", help=text)
    parser.set_defaults(world_size=8)


def check_options(options: argparse.Namespace) -> None:
    """Raise ConfigError for a value that nothing can be computed with, and for two options that
    exclude each other."""
    for name in COUNTS:
        value = getattr(options, name.replace("-", "_"))
        if value is not None and not 1 <= value <= MOST_DEVICES:
            raise ConfigError(f"--{name} {value} must be 1 to {MOST_DEVICES}")
    for name in POSITIVE:
        value = getattr(options, name.replace("-", "_"))
        if value is not None and not 1e-6 <= value <= 1e9:
            raise ConfigError(f"--{name} {value} must be a positive number, 1e-06 to 1e+09")
    if options.search and options.tps is not None:
        raise ConfigError(f"--tps {options.tps} is of one layout, and --search compares; drop one")
    if options.longest and (options.search or options.tps is not None):
        other = "--search" if options.search else f"--tps {options.tps}"
        raise ConfigError(f"--longest has layouts and rates of its own; drop it, or {other}")
    if options.gpu_hour is not None and not options.search:
        raise ConfigError(f"--gpu-hour {options.gpu_hour} is for --search; add that, or drop it")


def run(options: argparse.Namespace) -> None:
    """Print the plan, or the answer of a search. Raises RunError."""
    # Imported here because torch takes seconds to import.
    from torchtitan_lite.planner import report
    from torchtitan_lite.planner.measured import add_measured
    from torchtitan_lite.planner.plan import find_device, make_plan
    from torchtitan_lite.planner.search import START, Space, make_longest, make_search

    check_options(options)
    words, world_size = options.overrides, options.world_size
    config = load_config([*words, *(START if options.longest else ())], world_size=world_size)
    given = {field: getattr(options, name) for name, field in DEVICE_FIELDS.items()}
    device = find_device(options.device, config.metrics, **given)
    if options.measured:
        device = add_measured(device, options.measured)

    space = Space(config, world_size, device, given_keys(words))
    if options.longest:
        answer = make_longest(space)
        text = report.format_longest(answer)
    elif options.search:
        answer = make_search(space, gpu_hour=options.gpu_hour)
        text = report.format_search(answer)
    else:
        answer = make_plan(config, world_size=world_size, device=device, tps=options.tps)
        text = report.format_plan(answer)
    print_answer(options, answer, text)
