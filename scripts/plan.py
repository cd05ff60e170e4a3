"""Predict what a run will cost and gain: FLOPs, float8's effect, memory, rates and time.

python scripts/plan.py --job.config_file X.toml [--world-size N] [--device "H100 SXM"]
[--bandwidth X] [--memory X] [--link X] [--network X] [--node-devices N]
[--attention KERNEL] [--tps X] [--json] [overrides]

  --world-size N      number of processes, one per GPU (default: 8)
  --device NAME       GPU to plan for (default: the GPU of this machine)
  --bandwidth X       its memory bandwidth, 10^12 bytes per second
  --memory X          its memory, GiB
  --link X            GB/s that it sends to others of its node, and receives
  --network X         GB/s that it sends to other nodes, and receives
  --node-devices N    GPUs of a node (default of these five: the data sheet's)
  --attention KERNEL  cudnn, flash or flex (default: what PyTorch takes there)
  --tps X             tokens per second per device that a run reached (default:
                      predicted)
  --json              print every number; docs/plan.md documents the keys
  overrides           any key of the config, as in training
"""

import argparse
import json
import signal
import sys

from torchtitan_lite.config import asks_for_help, load_config
from torchtitan_lite.errors import ConfigError, run_script
from torchtitan_lite.logger import init_logger
from torchtitan_lite.planner.plan import find_device, make_plan
from torchtitan_lite.planner.report import format_plan
from torchtitan_lite.planner.roofline import ATTENTION_KERNELS

DEVICE_FIELDS = {
    "bandwidth": "bandwidth_tb_s",
    "memory": "memory_gib",
    "link": "link_gb_s",
    "network": "network_gb_s",
    "node_devices": "node_devices",
}
"""Field of the data sheet that each option replaces."""
POSITIVE = ("tps", "bandwidth", "memory", "link", "network")
COUNTS = ("world-size", "node-devices")
MOST_DEVICES = 10**6


def main(argv: list[str]) -> None:
    """Print the plan for the options in `argv`. Raises RunError."""
    if asks_for_help(argv):
        print(__doc__)
        return
    parser = argparse.ArgumentParser(
        prog="scripts/plan.py", usage=__doc__, add_help=False, allow_abbrev=False
    )
    for name in COUNTS:
        parser.add_argument(f"--{name}", type=int)
    for name in POSITIVE:
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--device")
    parser.add_argument("--attention", default="")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(world_size=8)
    options, words = parser.parse_known_args(argv)

    # Numbers that the planner can compute with.
    for name in COUNTS:
        value = getattr(options, name.replace("-", "_"))
        if value is not None and not 1 <= value <= MOST_DEVICES:
            raise ConfigError(f"--{name} {value} must be 1 to {MOST_DEVICES}")
    for name in POSITIVE:
        value = getattr(options, name)
        if value is not None and not 1e-6 <= value <= 1e9:
            raise ConfigError(f"--{name} {value} must be a positive number, 1e-06 to 1e+09")
    if options.attention not in ("", *ATTENTION_KERNELS):
        kernels = ", ".join(ATTENTION_KERNELS)
        raise ConfigError(f"--attention {options.attention} is not a kernel; use one of {kernels}")

    config = load_config(words, world_size=options.world_size)
    given = {field: getattr(options, name) for name, field in DEVICE_FIELDS.items()}
    plan = make_plan(
        config,
        world_size=options.world_size,
        device=find_device(options.device, config.metrics, **given),
        tps=options.tps,
        attention_kernel=options.attention,
    )
    print(json.dumps(plan, indent=2) if options.json else format_plan(plan))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when head has seen enough
    init_logger(sys.stderr)  # standard output has the plan alone
    run_script(main)
