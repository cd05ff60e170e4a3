"""Measure first what matters most on a GPU: the program of scripts/gpu_day.sh.

python scripts/benchmarks/gpu_day.py run [--out FOLDER] [--budget SECONDS] [--only PART ...]
python scripts/benchmarks/gpu_day.py table FILE         tables for docs/performance.md

Parts, the most important first: kernels, tests, rows, profile. Each is a process of its own
with a share of the time; what a part does not use is for those after it. FOLDER gets logs, the
trace, and results.json, which is written after every part. Ctrl-C or SIGTERM ends the running part,
keeps what it has measured, and exits with code 75.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from bench import ROWS, row_words
from common import device_name, torchrun
from gpu_day_tables import format_results
from kernel_rates import derive_rates

from torchtitan_lite.base.errors import STOPPED_EXIT_CODE, ConfigError, RunError
from torchtitan_lite.base.files import replace_file
from torchtitan_lite.base.jsonfile import read_json_object
from torchtitan_lite.base.logger import init_logger, logger
from torchtitan_lite.base.terminal import run_script
from torchtitan_lite.catalog.devices import DeviceSpec, lookup_device
from torchtitan_lite.tools.comparison import format_runs, read_runs

ROOT = Path(__file__).parents[2]
DATA_SHEET = ("bf16_tflops", "fp8_tflops", "bandwidth_tb_s")
"""Figures of DeviceSpec that rates are relative to."""
KERNEL_TIMES = (str(Path(__file__).with_name("kernel_times.py")),)  # what Python runs
DONE, STOPPED, OUT_OF_TIME = "done", "stopped by a signal", "its time was over"
END_S = 30.0
"""Seconds in which a part that is stopped can write what it has."""
BUDGET_S = 1440.0  # with starts and ends below 25 minutes
TOP_KERNELS = 25
BENCH_ROWS = sorted(ROWS, key=lambda name: not name.endswith("compiled"))  # these first
Results = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A part of the day."""

    share: float
    """Of the budget."""
    command: Callable[[Path, float], list[str]]
    """What measures into a folder within some seconds."""
    read: Callable[[Path], Results]
    """What it has measured there, also if it was stopped."""


def time_kernels(folder: Path, seconds: float) -> list[str]:
    """Command of kernel_times.py."""
    settle = min(20.0, seconds / 10)
    file = str(folder / "kernels.jsonl")
    return [sys.executable, *KERNEL_TIMES, file, "--settle", str(settle)]


def read_kernels(folder: Path) -> Results:
    """Its measurements."""
    lines = (folder / "kernels.jsonl").read_text().splitlines()
    return {"measurements": [json.loads(line) for line in lines]}


def run_tests(folder: Path, seconds: float) -> list[str]:
    """Command of the tests that need a GPU."""
    return [sys.executable, "-m", "pytest", str(ROOT / "tests/gpu"), "-v", "--tb=short"]


def read_tests(folder: Path) -> Results:
    """How many tests had which outcome, and which of them are not well."""
    log = (folder / "tests.log").read_text(errors="replace")
    outcomes = re.findall(r"^(tests/\S.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", log, re.MULTILINE)
    failed = [test for test, outcome in outcomes if outcome in ("FAILED", "ERROR")]
    return {"outcomes": Counter(outcome.lower() for _, outcome in outcomes), "failed": failed}


def run_rows(folder: Path, seconds: float) -> list[str]:
    """Command of the benchmark."""
    script = str(Path(__file__).with_name("bench.py"))
    return [sys.executable, script, *BENCH_ROWS, "--out", str(folder / "bench")]


def read_rows(folder: Path) -> Results:
    """The table of the rows that logged a step."""
    runs = [folder / "bench" / name for name in BENCH_ROWS]
    logged = [run for run in runs if (run / "metrics.jsonl").exists()]
    return {"table": format_runs(read_runs(logged), last=1)}


def run_profile(folder: Path, seconds: float) -> list[str]:
    """Command that trains a row of the benchmark with a profiler."""
    words = row_words("tensorwise_compiled", (), on="GPU")
    words += [f"--job.dump_folder={folder / 'profile'}", "--profiling.enable_profiling"]
    return torchrun(["-m", "torchtitan_lite.train", *words], processes=1)


def read_profile(folder: Path) -> Results:
    """The trace's path, its device time, and the kernels that take most of it."""
    trace = next((folder / "profile").glob("profile_traces/*/rank0_trace.json"))
    milliseconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("cat") == "kernel":
            milliseconds[event["name"]] += event["dur"] / 1e3
            calls[event["name"]] += 1
    top = [
        {"name": name, "calls": calls[name], "ms": ms}
        for name, ms in milliseconds.most_common(TOP_KERNELS)
    ]
    total = {"kernels": calls.total(), "ms": milliseconds.total()}
    return {"trace": str(trace.relative_to(folder)), **total, "top": top}


PARTS = {
    "kernels": Part(0.18, time_kernels, read_kernels),
    "tests": Part(0.3, run_tests, read_tests),
    "rows": Part(0.4, run_rows, read_rows),
    "profile": Part(0.12, run_profile, read_profile),
}


def run_part(name: str, folder: Path, seconds: float) -> Results:
    """Run a part for at most that long, and return its outcome and what it has measured."""
    part, began, log = PARTS[name], time.monotonic(), folder / f"{name}.log"
    command = part.command(folder, seconds - 2 * END_S)
    logger.info(f"{name}: {shlex.join(command)}, at most {seconds:.0f} s")
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this program alone
        )
        try:
            code = process.wait(seconds - END_S)
            status = DONE if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            status = OUT_OF_TIME
        except KeyboardInterrupt:
            status = STOPPED
        finally:
            end_group(process)

    took_s = round(time.monotonic() - began, 1)
    outcome: Results = {"status": status, "seconds": took_s, "command": shlex.join(command)}
    try:
        outcome |= part.read(folder)
    except (OSError, ValueError, LookupError, StopIteration) as error:
        outcome["unread"] = f"nothing was measured: {error!r}"
    logger.info(f"{name}: {status} after {took_s:.0f} s")
    return outcome


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a process and what it has started, and kill what is left after END_S, or at once
    if this program is interrupted again."""
    try:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def describe(device: DeviceSpec, gpus: int) -> Results:
    """What belongs to every figure: date, device, versions and commit."""

    def output(*command: str) -> str | None:
        with suppress(OSError, subprocess.CalledProcessError):
            return subprocess.check_output(
                command, cwd=ROOT, text=True, stderr=subprocess.DEVNULL
            ).strip()
        return None

    query = "--query-gpu=driver_version,power.limit,clocks.max.sm"  # limits what is reached
    visible = os.environ["CUDA_VISIBLE_DEVICES"]
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "commit": output("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "device": device_name(),
        "data_sheet": {name: getattr(device, name) for name in DATA_SHEET},
        "gpus": gpus,
        "driver, power limit, clock": output(
            "nvidia-smi", query, "--format=csv,noheader", f"-i={visible}"
        ),
        "versions": {name: version(name) for name in ("torch", "torchao")}
        | {"python": sys.version.split()[0], "cuda": torch.version.cuda},
    }


def run_day(folder: Path, *, budget_s: float, only: Sequence[str]) -> Results:
    """Run the parts, write results.json after each, and return the results.

    Raises ConfigError without a GPU whose float8 peak is known, and if the folder has results."""
    if not torch.cuda.is_available():
        raise ConfigError("a GPU is measured, and there is none here.")
    gpus = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]  # the parts use one GPU
    device = lookup_device(device_name())
    if device is None or device.fp8_tflops is None:
        raise ConfigError(
            f"{device_name()}: no data sheet with a float8 peak is known, to which rates are "
            "relative; see torchtitan_lite/catalog/devices.py."
        )
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "results.json").exists():
        raise ConfigError(f"--out {folder} has results already; name another folder.")

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: KeyboardInterrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also in a job of the background
    results = describe(device, gpus) | {"rates": {}, "implausible": {}, "parts": {}}
    began, share = time.monotonic(), 0.0

    def save(ended_by: str) -> None:
        results["ended_by"], results["seconds"] = ended_by, round(time.monotonic() - began, 1)
        replace_file(folder / "results.json", json.dumps(results, indent=1) + "\n")

    save("running")
    chosen = [name for name in PARTS if name in only or not only]
    whole = sum(PARTS[name].share for name in chosen)
    with suppress(KeyboardInterrupt):  # between the parts; within one it is an outcome
        for name in chosen:
            share += PARTS[name].share / whole
            left_s = share * budget_s - (time.monotonic() - began)
            found = results["parts"][name] = run_part(name, folder, left_s)
            if measured := found.get("measurements"):
                results["rates"], results["implausible"] = derive_rates(measured, device)
            save("running")
            if found["status"] == STOPPED:
                raise KeyboardInterrupt
        save(DONE)
        return results
    save(STOPPED)
    return results


def main(argv: list[str]) -> None:
    """Run the command line `argv`. Raises RunError."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="does", required=True)
    run = commands.add_parser("run")
    run.add_argument("--out", type=Path, help="new folder (default: gpu_day-DATE)")
    run.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS")
    run.add_argument("--only", nargs="+", choices=PARTS, default=[], metavar="PART")
    table = commands.add_parser("table")
    table.add_argument("file", type=Path)
    options = parser.parse_args(argv)

    if options.does == "table":
        try:
            print(format_results(read_json_object(options.file)))
        except (OSError, ValueError, LookupError) as error:
            raise ConfigError(f"{options.file}: {error!r}; name a results.json of run.") from error
        return

    init_logger()
    folder = options.out or Path(f"gpu_day-{datetime.now():%Y%m%d-%H%M%S}")
    results = run_day(folder.absolute(), budget_s=options.budget, only=options.only)
    print(format_results(results), f"\n{folder / 'results.json'}", sep="\n")
    if results["ended_by"] == STOPPED:
        sys.exit(STOPPED_EXIT_CODE)
    if failed := [name for name, each in results["parts"].items() if "failed" in each["status"]]:
        raise RunError(f"{', '.join(failed)}: see the log in {folder}")


if __name__ == "__main__":
    run_script(main)
