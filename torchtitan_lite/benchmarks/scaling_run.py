"""A training run of the debug model with dimensions of its own, for bench_scaling: torchrun -m
torchtitan_lite.benchmarks.scaling_run DIMENSIONS, a JSON object, then the words of training. A
hub."""

import dataclasses
import json
import sys

from torchtitan_lite import train
from torchtitan_lite.models.flavors import FLAVORS


def main() -> None:
    """Train as the command line says."""
    dimensions = json.loads(sys.argv.pop(1))
    FLAVORS["debugmodel"] = dataclasses.replace(
        FLAVORS["debugmodel"], **dimensions
    )  # in this process alone
    train.main()


if __name__ == "__main__":
    main()
