"""torchtitan_lite against torchtitan 0.2.2 on CPU: speed, time to the first step, memory.
docs/performance.md tells how to make an environment with torchtitan.

python scripts/bench_torchtitan.py --python ENV/bin/python --job.config_file X.toml
[--training.steps 40] ...

  --python PATH       the Python that has torchtitan 0.2.2
  --processes N       of each run (default: 2)
  --pairs N           runs of each framework, in alternating order, after one that is not counted (default: 3)
  --mode MODE         eager, compiled or both (default: both)
  --shard-one         on one process have torchtitan use FSDP2 too: by itself it trains under autocast there
  --out FILE          every figure, as JSON
  overrides           any other key of the config, as in training; float8 is off
"""

import argparse
import json
import shutil
from pathlib import Path

from torchtitan_lite.benchmarks.report import check_out
from torchtitan_lite.benchmarks.torchtitan import Rival
from torchtitan_lite.config import load_config
from torchtitan_lite.errors import ConfigError, run_script

ADAPTER = Path(__file__).resolve().with_name("torchtitan_cpu.py")
SETTINGS = [
    *(
        "--float8.enable_float8_linear=false",
        "--checkpoint.enable=false",
        "--validation.enable=false",
    ),
    *("--metrics.log_freq=1", "--metrics.enable_tensorboard", "--training.epochs="),
]
MODES = {"eager": ("eager",), "compiled": ("compiled",), "both": ("eager", "compiled")}


def main(argv: list[str]) -> None:
    """Measure and print. Raises RunError."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return
    parser = argparse.ArgumentParser(
        prog="scripts/bench_torchtitan.py", usage=__doc__, add_help=False, allow_abbrev=False
    )
    parser.add_argument("--python", required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--mode", choices=MODES, default="both")
    parser.add_argument("--shard-one", action="store_true")
    parser.add_argument("--out", type=Path)
    options, words = parser.parse_known_args(argv)
    check_out(options.out)
    if shutil.which(options.python) is None:
        raise ConfigError(
            f"--python {options.python} cannot be run; name that of an environment with torchtitan 0.2.2."
        )
    if options.pairs < 2 or options.processes < 1:
        raise ConfigError(
            f"--pairs {options.pairs} must be at least 2, and --processes {options.processes} at least 1"
        )
    results = {}
    for mode in MODES[options.mode]:
        compile = f"--compile.enable={str(mode == 'compiled').lower()}"
        config = load_config([*words, *SETTINGS, compile], world_size=options.processes)
        rival = Rival(
            config,
            python=options.python,
            adapter=ADAPTER,
            processes=options.processes,
            shard_one=options.shard_one,
        )
        versus = rival.compare(pairs=options.pairs, tell=lambda line: print(line, flush=True))
        print(
            f"{mode}, {options.processes} processes, {versus.parameters:,} parameters\n{versus}\n",
            flush=True,
        )
        results[mode] = versus.as_json()
    if options.out:
        options.out.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    run_script(main)
