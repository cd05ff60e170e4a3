"""Predict what a run will cost and gain: FLOPs, float8's effect, memory, rates
and time. Or search for the layout that trains fastest.

python scripts/plan.py --job.config_file X.toml [--world-size N]
[--device "H100 SXM"] [--bandwidth X] [--memory X] [--link X] [--network X]
[--node-devices N] [--measured FILE] [--attention KERNEL] [--tps X | --search
[--gpu-hour PRICE] | --longest] [--json] [overrides]

  --world-size N      number of processes, one per GPU (default: 8)
  --device NAME       GPU to plan for (default: the GPU of this machine)
  --bandwidth X       its memory bandwidth, 10^12 bytes per second
                      (default: data sheet)
  --memory X          its memory, GiB (default: data sheet)
  --link X            GB/s that it sends to others of its node, and receives
                      (default: data sheet)
  --network X         GB/s that it sends to other nodes, and receives
                      (default: what its servers often have, mostly 50)
  --node-devices N    GPUs of a node (default: data sheet)
  --measured FILE     results of scripts/gpu_day.sh on this GPU: measured rates
                      replace published ones (default: published)
  --attention KERNEL  cudnn, flash or flex (default: what PyTorch takes there)
  --tps X             tokens per second per device that a run reached (default:
                      predicted)
  --search            print the five fastest layouts, microbatches, activation
                      checkpointings and recipes that fit, and the overrides
                      that choose the first (default: plan the config as it is)
  --gpu-hour PRICE    price of an hour of one GPU, in any currency: a search
                      adds the cost of 10^12 tokens (default: no cost)
  --longest           print the longest sequence that fits when 1, 2, 4, 8 or 16
                      GPUs share each, and its rate (default: one plan)
  --json              print every number; docs/plan.md documents the keys
                      (default: a report)
  overrides           any key of the config, as in training; a search keeps
                      those that are given (default: the config's values)
"""

import argparse
import json
import signal
import sys
from pathlib import Path

from torchtitan_lite.config import asks_for_help, given_keys, load_config
from torchtitan_lite.errors import ConfigError, run_script
from torchtitan_lite.logger import init_logger
from torchtitan_lite.planner.longest import START, format_longest, make_longest
from torchtitan_lite.planner.measured import add_measured
from torchtitan_lite.planner.plan import find_device, make_plan
from torchtitan_lite.planner.report import format_plan
from torchtitan_lite.planner.roofline import ATTENTION_KERNELS
from torchtitan_lite.planner.search import Space, make_search
from torchtitan_lite.planner.search_report import format_search

DEVICE_FIELDS = {
    "bandwidth": "bandwidth_tb_s",
    "memory": "memory_gib",
    "link": "link_gb_s",
    "network": "network_gb_s",
    "node_devices": "node_devices",
}
"""Field of the data sheet that each option replaces."""
POSITIVE = ("tps", "bandwidth", "memory", "link", "network", "gpu-hour")
COUNTS = ("world-size", "node-devices")
MOST_DEVICES = 10**6


def main(argv: list[str]) -> None:
    """Print the plan, or the answer of a search, for the options in `argv`. Raises RunError."""
    if asks_for_help(argv):
        print(__doc__)
        return
    options, words = read_options(argv)
    replaced = START if options.longest else ()
    config = load_config([*words, *replaced], world_size=options.world_size)
    given = {field: getattr(options, name) for name, field in DEVICE_FIELDS.items()}
    device = find_device(options.device, config.metrics, **given).with_given(config.metrics)
    if options.measured:
        device = add_measured(device, options.measured)

    given_names, kernel = given_keys(words), options.attention
    space = Space(config, options.world_size, device, given_names, kernel)
    if options.longest:
        answer = make_longest(space)
        text = format_longest(answer)
    elif options.search:
        answer = make_search(space, gpu_hour=options.gpu_hour)
        text = format_search(answer)
    else:
        answer = make_plan(
            config,
            world_size=options.world_size,
            device=device,
            tps=options.tps,
            attention_kernel=options.attention,
        )
        text = format_plan(answer)
    print(json.dumps(answer, indent=2) if options.json else text)


def read_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this script, and the words that are left for the config.

    Raises ConfigError for a value that nothing can be computed with, and for two options that
    exclude each other."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in COUNTS:
        parser.add_argument(f"--{name}", type=int)
    for name in POSITIVE:
        parser.add_argument(f"--{name}", type=float)
    for name in ("search", "longest", "json"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--device")
    parser.add_argument("--measured", type=Path)
    parser.add_argument("--attention", default="")
    parser.set_defaults(world_size=8)
    try:
        options, words = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}; --help shows each") from error

    for name in COUNTS:
        value = getattr(options, name.replace("-", "_"))
        if value is not None and not 1 <= value <= MOST_DEVICES:
            raise ConfigError(f"--{name} {value} must be 1 to {MOST_DEVICES}")
    for name in POSITIVE:
        value = getattr(options, name.replace("-", "_"))
        if value is not None and not 1e-6 <= value <= 1e9:
            raise ConfigError(f"--{name} {value} must be a positive number, 1e-06 to 1e+09")
    if options.attention not in ("", *ATTENTION_KERNELS):
        kernels = ", ".join(ATTENTION_KERNELS)
        raise ConfigError(f"--attention {options.attention} is not a kernel; use one of {kernels}")
    if options.search and options.tps is not None:
        raise ConfigError(f"--tps {options.tps} is of one layout, and --search compares; drop one")
    if options.longest and (options.search or options.tps is not None):
        other = "--search" if options.search else f"--tps {options.tps}"
        raise ConfigError(f"--longest has layouts and rates of its own; drop it, or {other}")
    if options.gpu_hour is not None and not options.search:
        raise ConfigError(f"--gpu-hour {options.gpu_hour} is for --search; add that, or drop it")
    return options, words


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when head has seen enough
    init_logger(sys.stderr)  # standard output has the plan alone
    run_script(main)
