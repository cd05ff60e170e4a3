"""The benchmark: the rows of its plan, run one after the other and measured by what they log. A
hub."""

import json
import math
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from torchtitan_lite.benchmarks import report
from torchtitan_lite.benchmarks.child import Outcome, Stop, probe, run_child, train
from torchtitan_lite.benchmarks.kernels import break_down, mean_of
from torchtitan_lite.benchmarks.processes import read_records
from torchtitan_lite.benchmarks.rows import (
    BF16,
    Device,
    Forecast,
    Row,
    forecast,
    plan_rows,
    profiled,
    profiled_rows,
)
from torchtitan_lite.config import Config
from torchtitan_lite.errors import STOPPED_EXIT_CODE, ConfigError, RunError, StorageError
from torchtitan_lite.files import replace_file
from torchtitan_lite.logger import logger
from torchtitan_lite.metrics.rates import ideal_seconds

BUDGET_S = {"GPU": 525.0, "CPU": 300.0, "quick GPU": 240.0, "quick CPU": 180.0}
"""Seconds from the start that a benchmark may take."""
START_S = 15.0
"""Of the budget, that a plan leaves to what comes before the first row."""
PROBE_S = 120.0
"""Seconds that the probe of the device may take."""
OVERRUN = 3.0
"""Times its expected seconds that a row may take."""
LEAST_S = 30.0
"""That any row may take: where little is expected, a busy machine adds more than a multiple of
it."""
FIRST_SHARE = 0.5
"""Share of the remaining time for the first row of its kind of compilation, whose duration cannot
be estimated."""
END_S = 3.0
"""Of the budget, kept for the end."""
CPU_TOLERANCE_PCT, GPU_TOLERANCE_PCT = 50.0, 5.0
"""By which a ratio may be below the baseline's, unless told otherwise."""
LAYERS_POLICY = (
    "layers: the most with which bf16, compiled and eager, should fit the memory,\n"
    "one number for a shape, an activation checkpointing and a batch: within them tps is comparable"
)
NO_TIME = "no time was left"


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    quick: bool = False
    only: str = ""
    """Words that the names of the rows hold."""
    out: Path | None = None
    profile: bool = False
    command: str = ""


class Benchmark:
    """A benchmark under way: `report` is what it has found so far, in plain values that JSON can
    hold."""

    def __init__(self, options: Options, *, stop: Stop, folder: Path, began: float) -> None:
        """Find out what the device is. `folder` is for the runs' files; the budget counts from
        `began`, a moment of time.monotonic. Raises RunError if that fails."""
        self.options, self._stop, self._folder, self._began = options, stop, folder, began
        report.check_out(options.out)
        self._children = 0
        self._method = "forkserver"
        self.device = self._probe()
        self.budget_s = budget_of(self.device, quick=options.quick)
        self.rows, skipped = plan_rows(self.device, quick=options.quick, only=options.only)
        self.forecasts = {row.name: forecast(row, self.device) for row in self.rows}
        self.report: dict[str, Any] = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": options.command,
            "device": self.device.name,
            "memory_gib": self.device.memory_gib,
            "emulated": self.device.on_cpu,
            "versions": versions(),
            "ceilings_tflops": dict(self.device.ceilings),
            "layers_policy": "" if self.device.on_cpu else LAYERS_POLICY,
            "budget_s": self.budget_s,
            "seconds": 0.0,
            "ended_by": "running",
            "rows": [],
            "skipped": [{"name": name, "reason": why} for name, why in skipped.items()],
            "profiles": [],
        }

    @property
    def _done(self) -> dict[str, dict[str, Any]]:
        """What the rows that are done came to, by their names."""
        return {
            result["name"]: result
            for result in self.report["rows"]
            if result["status"] == report.DONE
        }

    @property
    def _left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self._began + self.budget_s - END_S - time.monotonic()

    def _probe(self) -> Device:
        """The device. A server that has touched CUDA after all, as where there is no NVML, is told
        by that its child fails; then children start anew."""
        outcome = self._call(probe, timeout_s=PROBE_S)
        if outcome.status == "failed":
            self._method = "spawn"
            outcome = self._call(probe, timeout_s=PROBE_S)
        if outcome.status != report.DONE:
            error = RunError(f"the device cannot be measured: {outcome.reason}\n{outcome.log}")
            error.exit_code = STOPPED_EXIT_CODE if self._stop.received else RunError.exit_code
            raise error
        return Device(**outcome.value)

    def _call(
        self,
        task: Callable[..., Any],
        *arguments: Any,
        timeout_s: float,
        folder: Path | None = None,
    ) -> Outcome:
        folder = folder or self._new_folder()
        return run_child(
            task,
            *arguments,
            folder=folder,
            timeout_s=timeout_s,
            stop=self._stop,
            method=self._method,
        )

    def _new_folder(self) -> Path:
        self._children += 1
        folder = self._folder / str(self._children)
        folder.mkdir()
        return folder

    def expected_s(self, row: Row) -> float:
        """Measured seconds of `row`, or an estimate: the overhead of rows that compile the same,
        plus its steps at the slowest pace seen for its shape."""
        done, known = self._done, self.forecasts[row.name]
        if row.name in done:
            return done[row.name]["seconds"]
        alike = [each for each in done.values() if each["shape"] == row.shape.name]
        paces = [each["step_time_s"] / self.forecasts[each["name"]].step_s for each in alike]
        overhead_s = max(self._overheads(row), default=known.overhead_s)
        return overhead_s + row.steps * known.step_s * max(paces, default=1.0)

    def _overheads(self, row: Row) -> list[float]:
        """Seconds besides their steps of the rows that compile what `row` does: float8 compiles
        several times as long as bf16, and an eager row nothing."""
        return [
            each["seconds"] - row.steps * each["step_time_s"]
            for each in self._done.values()
            if (each["shape"], each["compile"]) == (row.shape.name, row.compiled)
            and (not row.compiled or each["recipe"] == row.recipe)
        ]

    def run(self) -> None:
        """Measure all rows that the budget allows for, and take some apart where that is asked
        for."""
        self.save()
        to_profile = profiled_rows(self.rows) if self.options.profile else []
        for number, row in enumerate(self.rows):
            ahead = {each.name for each in self.rows[number:]} | self._done.keys()
            left_s = self._left_s - sum(
                self.expected_s(each) for each in to_profile if each.name in ahead
            )
            if self._stop.received:
                self._skip(row.name, f"stopped by {self._stop.received}")
            elif (
                self._done and self.expected_s(row) > left_s
            ):  # until a row is done, what is expected is a guess
                self._skip(row.name, NO_TIME)
            else:
                self._measure(row, left_s=left_s)
                self.save()
        for row in to_profile:
            if row.name in self._done and not self._stop.received:
                self._profile(row)
        cut = any(skipped["reason"] == NO_TIME for skipped in self.report["skipped"])
        self.report["ended_by"] = self._stop.received or ("the budget" if cut else report.DONE)
        self.save()

    def save(self) -> None:
        """Put the report into the file that is asked for, if one is. Raises StorageError if that
        fails."""
        self.report["seconds"] = round(time.monotonic() - self._began, 1)
        if self.options.out is None:
            return
        try:
            replace_file(self.options.out, json.dumps(self.report, indent=1) + "\n")
        except OSError as error:
            raise StorageError(
                f"--out {self.options.out}: {error.strerror}; name another file."
            ) from error

    def _skip(self, name: str, reason: str) -> None:
        self.report["skipped"].append({"name": name, "reason": reason})

    def _measure(self, row: Row, *, left_s: float) -> None:
        began, folder = time.monotonic(), self._new_folder()
        least_s = LEAST_S if self._overheads(row) else max(LEAST_S, FIRST_SHARE * left_s)
        limit_s = min(left_s, max(OVERRUN * self.expected_s(row), least_s))
        outcome = self._call(
            train, self._config(row, folder), row.args, False, timeout_s=limit_s, folder=folder
        )
        if outcome.status == "timed out" and limit_s == left_s:
            self._skip(row.name, NO_TIME)
            return
        result = describe(row, self.forecasts[row.name]) | {
            "status": outcome.status,
            "reason": outcome.reason,
        }
        result["seconds"] = round(time.monotonic() - began, 1)
        if outcome.status == report.DONE:
            result |= report.measure(read_records(folder), warmup_steps=row.warmup_steps)
            ideal_s = ideal_seconds(
                self.forecasts[row.name].flops_by_precision, self.device.ceilings
            )
            result["mfu_achievable"] = None if ideal_s is None else 100 * result["tps"] * ideal_s
        else:
            result["log_tail"] = outcome.log
        self.report["rows"].append(result)
        report.add_ratios(self.report["rows"])
        logger.info(progress_line(result))

    def _config(self, row: Row, folder: Path) -> Config:
        given = self.device.ceilings.get("bf16") if self.device.on_cpu else None
        return row.config(str(folder), peak_tflops_bf16=given)

    def _profile(self, row: Row) -> None:
        """Add where the time of `row`, which is done, goes: the mean of the last two steps
        traced."""
        folder = self._new_folder()
        config, names_kernels = profiled(self._config(row, folder)), self.device.on_cpu
        outcome = self._call(
            train, config, row.args, names_kernels, timeout_s=self._left_s, folder=folder
        )
        if outcome.status != report.DONE:
            timed_out = outcome.status == "timed out"
            self._skip(
                f"profile of {row.name}",
                NO_TIME if timed_out else f"{outcome.status}: {outcome.reason}",
            )
            return
        traces = sorted(folder.glob(f"{config.profiling.save_traces_folder}/*/rank0_trace.json"))[
            1:
        ]
        try:
            step = mean_of(break_down(trace, on_cpu=self.device.on_cpu) for trace in traces)
        except RunError as error:
            self._skip(f"profile of {row.name}", str(error))
            return
        self.report["profiles"].append(
            {
                "name": row.name,
                "recipe": row.recipe,
                "wall_s": step.wall_s,
                "step_time_s": self._done[row.name]["step_time_s"],
                "share_pct": step.share_pct,
            }
        )


def budget_of(device: Device, *, quick: bool) -> float:
    """Seconds that a benchmark on `device` may take."""
    kind = "CPU" if device.on_cpu else "GPU"
    return BUDGET_S[f"quick {kind}" if quick else kind]


def describe(row: Row, expected: Forecast) -> dict[str, Any]:
    """What a row is, and what it should come to, in plain values."""
    return {
        "name": row.name,
        "shape": row.shape.name,
        "layers": row.layers,
        "all_layers": row.shape.args.n_layers,
        "seq_len": row.shape.seq_len,
        "local_batch_size": row.batch,
        "activation_checkpoint": row.checkpoint,
        "compile": row.compiled,
        "recipe": row.recipe,
        "warmup_steps": row.warmup_steps,
        "flops_per_token": dict(expected.flops_by_precision),
        "predicted_tps": expected.tps,
        "predicted_memory_gib": expected.memory_gib,
    }


def make_plan(device: Device, *, quick: bool, only: str = "") -> dict[str, Any]:
    """What a benchmark on `device`, which need not be there, would run within its budget, in plain
    values."""
    budget_s = budget_of(device, quick=quick)
    left_s = budget_s - START_S - END_S
    rows, skipped = plan_rows(device, quick=quick, only=only)
    reasons = dict(skipped)
    planned = []
    for row in rows:
        expected = forecast(row, device)
        seconds = expected.overhead_s + row.steps * expected.step_s
        if seconds > left_s:
            reasons[row.name] = NO_TIME
            continue
        left_s -= seconds
        planned.append(describe(row, expected) | {"expected_s": seconds})
    return {
        "device": device.name,
        "layers_policy": LAYERS_POLICY,
        "budget_s": budget_s,
        "rows": planned,
        "skipped": [{"name": name, "reason": why} for name, why in reasons.items()],
    }


def run_benchmark(
    options: Options, *, baseline: Mapping[str, Any] | None, baseline_path: str
) -> dict[str, Any]:
    """The report of a benchmark. Raises ConfigError, before any row runs, if the baseline is of
    another device, and RunError if the device cannot be measured."""
    began = time.monotonic()
    stop = Stop()
    with TemporaryDirectory(prefix="torchtitan_lite_bench_", ignore_cleanup_errors=True) as folder:
        benchmark = Benchmark(options, stop=stop, folder=Path(folder), began=began)
        if baseline is not None:
            report.check_comparable(benchmark.device.name, baseline, path=baseline_path)
        logger.info(
            f"{benchmark.device.name}: {len(benchmark.rows)} rows at most, within {benchmark.budget_s:.0f} s"
        )
        benchmark.run()
    return benchmark.report


def read_baseline(path: Path) -> dict[str, Any]:
    """The report of an earlier benchmark. Raises ConfigError for a file that is none."""
    try:
        baseline = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--check {path} cannot be read: {error}; name a file that --out wrote."
        ) from error
    if not isinstance(baseline, dict) or not {"device", "rows"} <= baseline.keys():
        raise ConfigError(
            f"--check {path} is no report of a benchmark; name a file that --out wrote."
        )
    return baseline


def progress_line(result: Mapping[str, Any]) -> str:
    """A row that has ended, in a line."""
    if result["status"] != report.DONE:
        return f"{result['name']}: {result['status']}: {result['reason']}"
    ratio = f", {result['bf16_ratio']:.3f} x {BF16}" if result["bf16_ratio"] else ""
    return f"{result['name']}: {result['tps']:,.0f} tps{ratio} ({result['seconds']:.0f} s)"


def versions() -> dict[str, str | None]:
    """Of what decides how fast a run is."""
    try:
        own = version("torchtitan-lite")
    except PackageNotFoundError:  # run from its folder
        own = None
    return {
        "torchtitan_lite": own,
        "torch": torch.__version__,
        "torchao": version("torchao"),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }


def tolerance_of(device: str, given: float | None) -> float:
    """Percent by which a ratio on `device` may be below the baseline's. Raises ConfigError if the
    one given is none."""
    if given is None:
        return CPU_TOLERANCE_PCT if device.startswith("CPU") else GPU_TOLERANCE_PCT
    if not (math.isfinite(given) and 0 <= given < 100):
        raise ConfigError(f"--tolerance {given} must be from 0 to below 100")
    return given
