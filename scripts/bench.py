"""How fast it trains: a matrix of real runs on the device at hand, as a table and as JSON; see
docs/performance.md.

python scripts/bench.py [--quick] [--only WORDS] [--out FILE.json] [--profile]
                        [--check FILE.json [--tolerance PCT]]
python scripts/bench.py --dry-run [--device "H100 SXM"] [--quick] [--only WORDS]

  --quick           the most important rows only, with fewer steps
  --only WORDS      rows whose names hold all these words, such as "8B compiled"
  --out FILE        JSON, written after every row
  --profile         then take a float8 row and its bf16 row apart by a profiler
  --check FILE      exit with 1 if a ratio is below that of FILE, which --out wrote on the same kind of device
  --tolerance PCT   percent by which it may be (default: 5, on CPU 50)
  --dry-run         print what would run on a GPU, and what it should come to
  --device NAME     GPU to plan for (default: the one at hand, else H200)
"""

import argparse
import shlex
import sys
from pathlib import Path

import torch

from torchtitan_lite.bench import Options, make_plan, read_baseline, run_benchmark, tolerance_of
from torchtitan_lite.benchmarks.report import DONE, find_regressions, format_plan, format_report
from torchtitan_lite.benchmarks.rows import planned_device
from torchtitan_lite.errors import STOPPED_EXIT_CODE, ConfigError, RunError, run_script
from torchtitan_lite.logger import init_logger
from torchtitan_lite.planner.plan import resolve_device


def main(argv: list[str]) -> None:
    """Run what `argv` asks for. Raises RunError."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return
    parser = argparse.ArgumentParser(
        prog="scripts/bench.py", usage=__doc__, add_help=False, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--check", type=Path)
    parser.add_argument("--tolerance", type=float)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--device")
    words = parser.parse_args(argv)
    if words.dry_run:
        given = {
            "--out": words.out,
            "--profile": words.profile,
            "--check": words.check,
            "--tolerance": words.tolerance,
        }
        if unused := [name for name, value in given.items() if value not in (None, False)]:
            raise ConfigError(
                f"{', '.join(unused)}: --dry-run runs and writes nothing; leave it out."
            )
        name = words.device or (None if torch.cuda.is_available() else "H200")
        print(
            format_plan(
                make_plan(planned_device(resolve_device(name)), quick=words.quick, only=words.only)
            )
        )
        return
    if words.device is not None:
        raise ConfigError(
            f'--device "{words.device}" is for --dry-run: rows run on the device at hand; leave it out.'
        )
    if words.tolerance is not None and words.check is None:
        raise ConfigError(
            f"--tolerance {words.tolerance} is for --check; name a baseline, or leave it out."
        )
    tolerance_of("", words.tolerance)  # refused now, not after the rows
    baseline = None if words.check is None else read_baseline(words.check)
    command = shlex.join(["python", "scripts/bench.py", *argv])
    options = Options(words.quick, words.only, words.out, words.profile, command)
    report = run_benchmark(options, baseline=baseline, baseline_path=str(words.check))
    print(format_report(report))
    if report["ended_by"].startswith("SIG"):
        sys.exit(STOPPED_EXIT_CODE)
    if not any(row["status"] == DONE for row in report["rows"]):
        raise RunError("no row is done")
    if baseline is not None:
        tolerance = tolerance_of(report["device"], words.tolerance)
        regressions = find_regressions(report, baseline, tolerance_pct=tolerance)
        print(f"against {words.check}, within {tolerance:g} %: {len(regressions)} regressions")
        if regressions:
            raise RunError("\n".join(regressions))


if __name__ == "__main__":
    init_logger()
    run_script(main)
