"""Predict what a run will cost and gain: FLOPs, float8's effect, memory, rates and time.

python scripts/plan.py --job.config_file X.toml [--world-size N] [--device "H100 SXM"] [--tps X]
[--json] [overrides]

  --world-size N   number of processes, one per GPU (default: 8)
  --device NAME    GPU to plan for (default: the GPU of this machine)
  --tps X          tokens per second per device that a run reached (default: predicted)
  --json           print every number; docs/plan.md documents the keys
  overrides        any key of the config, as in training
"""

import argparse
import json

from torchtitan_lite.config import asks_for_help, load_config
from torchtitan_lite.errors import ConfigError, run_script
from torchtitan_lite.logger import init_logger
from torchtitan_lite.planner.plan import find_device, make_plan
from torchtitan_lite.planner.report import format_plan


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
    parser.add_argument("--tps", type=float)
    parser.add_argument("--json", action="store_true")
    options, words = parser.parse_known_args(argv)

    if options.world_size < 1:
        raise ConfigError(f"--world-size {options.world_size} must be at least 1")
    if options.tps is not None and not 0 < options.tps < float("inf"):
        raise ConfigError(f"--tps {options.tps} must be a positive number")

    config = load_config(words, world_size=options.world_size)
    plan = make_plan(
        config,
        world_size=options.world_size,
        device=find_device(options.device),
        tps=options.tps,
    )
    print(json.dumps(plan, indent=2) if options.json else format_plan(plan))


if __name__ == "__main__":
    init_logger()
    run_script(main)
