"""Measure what a user waits for, each against the best peer, and print a table of it.

python scripts/benchmarks/waits.py run --python ENV/bin/python --out FOLDER [--only PART ...]
python scripts/benchmarks/waits.py table FOLDER/waits.json

`run` takes at most 30 minutes on two cores. ENV has torchtitan 0.2.2; README.md beside this file
says how to make it. Every figure is of pairs, one measurement of each taken right after the other,
in alternating order. `waits.json` is written after each part, so a part can be measured again.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import Ratios, describe_machine, environment, figures_told, watch

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.terminal import run_script

PYTHON = "the Python that has torchtitan"
TIMEOUT_S = 1800.0
"""Of a part."""

PARTS = {
    "launch": ("wait_launch.py", "launch", PYTHON),
    "sizes": ("wait_launch.py", "sizes", PYTHON),
    "text": ("wait_text.py",),
    "data": ("wait_data.py",),
    "checkpoints": ("wait_checkpoints.py",),
    "growth": ("wait_growth.py",),
}
"""The program of each part, and its arguments. Each is a process of its own, because Linux counts
the memory of programs from that of the process that starts them on."""


def run(python: str, out: Path, only: list[str]) -> None:
    """Measure the parts of `only`, or all, and write each into waits.json of `out`."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "waits.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    for name in only or PARTS:
        began, load = time.time(), os.getloadavg()[0]
        program, *words = (python if word is PYTHON else word for word in PARTS[name])
        command = [sys.executable, str(Path(__file__).parent / program), *words]
        figures = figures_told(watch(command, env=environment(), timeout_s=TIMEOUT_S))
        results[name] = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": describe_machine(),
            "load_before": load,
            "seconds": round(time.time() - began),
            "figures": figures,
        }
        file.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {len(figures)} figures in {time.time() - began:.0f} s", flush=True)


def show(value: float) -> str:
    """Return a number with three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def table(results: Mapping[str, Any]) -> str:
    """Return the tables for the docs in Markdown: figures against peers, then growth."""
    rows = ["| | ours | theirs | ours / theirs | peer |", "| --- | ---: | ---: | ---: | --- |"]
    growth = ["| | grows over | seconds |", "| --- | --- | --- |"]
    for part in results.values():
        for figure in part["figures"]:
            if "seconds" in figure:
                cells = (f"{at}: {show(seconds)}" for at, seconds in figure["seconds"].items())
                growth.append(f"| {figure['name']} | {figure['over']} | {', '.join(cells)} |")
                continue
            ours, theirs = figure["ours"], figure["theirs"]
            ratios = Ratios.of(ours, theirs)
            medians = (show(statistics.median(each)) for each in (ours, theirs))
            ratio = f"{ratios.quartiles[1]:.2f} ± {ratios.standard_error:.2f}"
            rows.append(
                f"| {figure['name']} | {' | '.join(medians)} | {ratio} | {figure['peer']} |"
            )
    return "\n".join([*rows, "", *growth])


def main(argv: list[str]) -> None:
    """Measure, or print the table. Raises RunError."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run", help="measure")
    command.add_argument("--python", default="", help="Python that has torchtitan 0.2.2")
    command.add_argument("--out", type=Path, required=True, help="folder for waits.json")
    command.add_argument("--only", nargs="+", choices=PARTS, default=[], help="parts (all)")
    command = commands.add_parser("table", help="print the tables of results")
    command.add_argument("file", type=Path)
    options = parser.parse_args(argv)
    if options.command == "table":
        print(table(json.loads(options.file.read_text())))
        return
    if not options.python and {"launch", "sizes"} & {*(options.only or PARTS)}:
        raise ConfigError("--python names no Python with torchtitan 0.2.2, which launch needs")
    run(options.python, options.out, options.only)


if __name__ == "__main__":
    run_script(main)
