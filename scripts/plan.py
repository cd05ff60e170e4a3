"""Predict what a run will cost and gain: FLOPs, float8's effect, memory, rates and time. Or
search for the layout that trains fastest.

python scripts/plan.py --job.config_file X.toml [--world-size N] [--device "H100 SXM"]
[--bandwidth X] [--memory X] [--tps X] [--json] [overrides]
python scripts/plan.py --search --job.config_file X.toml [--gpu-hour PRICE] [the same, no --tps]

  --world-size N   number of processes, one per GPU (default: 8)
  --device NAME    GPU to plan for (default: the GPU of this machine)
  --bandwidth X    its memory bandwidth, 10^12 bytes per second (default: the data sheet's)
  --memory X       its memory, GiB (default: the data sheet's)
  --tps X          tokens per second per device that a run reached (default: predicted)
  --json           print every number; docs/plan.md documents the keys
  --search         print the five fastest layouts, microbatches, activation checkpointings and
                   recipes that fit, and the overrides that choose the first
  --gpu-hour PRICE price of an hour of one GPU, for the cost of each in --search
  overrides        any key of the config, as in training; --search keeps the keys given here
"""

import argparse
import json
import signal
import sys

from torchtitan_lite.config import asks_for_help, given_keys, load_config
from torchtitan_lite.errors import ConfigError, run_script
from torchtitan_lite.logger import init_logger
from torchtitan_lite.planner.plan import find_device, make_plan
from torchtitan_lite.planner.report import format_plan
from torchtitan_lite.planner.search import Space, make_search
from torchtitan_lite.planner.search_report import format_search

POSITIVE = ("tps", "bandwidth", "memory", "gpu-hour")
MOST_DEVICES = 10**6


def main(argv: list[str]) -> None:
    """Print the plan for the options in `argv`. Raises RunError."""
    if asks_for_help(argv):
        print(__doc__)
        return
    parser = argparse.ArgumentParser(
        prog="scripts/plan.py", usage=__doc__, add_help=False, allow_abbrev=False
    )
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--device")
    for name in POSITIVE:
        parser.add_argument(f"--{name}", type=float)
    for name in ("json", "search"):
        parser.add_argument(f"--{name}", action="store_true")
    options, words = parser.parse_known_args(argv)

    if not 1 <= options.world_size <= MOST_DEVICES:
        raise ConfigError(f"--world-size {options.world_size} must be 1 to {MOST_DEVICES}")
    for name in POSITIVE:
        value = getattr(options, name.replace("-", "_"))
        if value is not None and not 1e-6 <= value <= 1e9:
            raise ConfigError(f"--{name} {value} must be a positive number, 1e-06 to 1e+09")
    if options.search and options.tps is not None:
        raise ConfigError(f"--tps {options.tps} is of one layout, and --search compares; drop one")
    if options.gpu_hour is not None and not options.search:
        raise ConfigError(f"--gpu-hour {options.gpu_hour} is for --search; add that, or drop it")

    config = load_config(words, world_size=options.world_size)
    device = find_device(
        options.device,
        config.metrics,
        bandwidth_tb_s=options.bandwidth,
        memory_gib=options.memory,
    )
    if options.search:
        peaks = device.with_given(config.metrics)
        space = Space(config, options.world_size, peaks, given=given_keys(words))
        found = make_search(space, gpu_hour=options.gpu_hour)
        print(json.dumps(found, indent=2) if options.json else format_search(found))
        return
    plan = make_plan(config, world_size=options.world_size, device=device, tps=options.tps)
    print(json.dumps(plan, indent=2) if options.json else format_plan(plan))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when head has seen enough
    init_logger(sys.stderr)  # standard output has the plan alone
    run_script(main)
