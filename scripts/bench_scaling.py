"""How the cost of training grows with the work, on CPU, beside the law that is expected of it:

python scripts/bench_scaling.py [layers] [seq_len] [batch] [ranks] [steps] [--rounds N] [--steps N]
[--out FILE]

  layers seq_len ...  parts to run (default: all)
  --rounds N          runs of each point, forward and backward in turn (default: 2)
  --steps N           steps of the long run, whose last half is held against the first (default: 2000)
  --out FILE          every figure, as JSON
"""

import argparse
import json
from pathlib import Path
from typing import Any

from torchtitan_lite.benchmarks.report import check_out
from torchtitan_lite.benchmarks.scaling import BLOCKS, SWEEPS, measure_long_run, measure_sweep
from torchtitan_lite.errors import ConfigError, run_script

LONG_RUN = "steps"


def main(argv: list[str]) -> None:
    """Measure and print. Raises RunError."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return
    parser = argparse.ArgumentParser(
        prog="scripts/bench_scaling.py", usage=__doc__, add_help=False, allow_abbrev=False
    )
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    check_out(options.out)
    known = [*SWEEPS, LONG_RUN]
    if unknown := [part for part in options.parts if part not in known]:
        raise ConfigError(f"{', '.join(unknown)}: no such part; there are {', '.join(known)}")
    if options.rounds < 1 or options.steps < 4 * BLOCKS:
        raise ConfigError(
            f"--rounds {options.rounds} must be at least 1, and --steps {options.steps} at least {4 * BLOCKS}"
        )
    results: dict[str, Any] = {}
    for part in options.parts or known:
        if part == LONG_RUN:
            run = measure_long_run(steps=options.steps)
            results[part] = run.as_json()
            print(f"{run}\n", flush=True)
        else:
            result = measure_sweep(SWEEPS[part], rounds=options.rounds)
            results[part] = result.rows()
            print(f"{result}\n", flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    run_script(main)
