"""Benchmark training on one device; the command is `torchtitan-lite bench`.

Every row is an ordinary run, `python -m torchtitan_lite.train`, in a process of its own. Its
figures are read from the `metrics.jsonl` that the run writes. docs/performance.md explains them.
"""

import functools
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import BaseModel, TypeAdapter, ValidationError

from torchtitan_lite.base.errors import ConfigError, StorageError
from torchtitan_lite.base.files import replace_file, storage_fix
from torchtitan_lite.base.jsonfile import first_problem, read_json_object, strict_json
from torchtitan_lite.base.logger import logger
from torchtitan_lite.catalog.devices import DeviceSpec, lookup_device
from torchtitan_lite.catalog.flavors import FLAVORS
from torchtitan_lite.config import Config, dump_config
from torchtitan_lite.config.types import Positive
from torchtitan_lite.metrics.hardware import device_name, total_memory_gib
from torchtitan_lite.planner.plan import find_device, make_plan
from torchtitan_lite.run.status import read_status

TRAIN = ("-m", "torchtitan_lite.train")  # what Python runs for a row
WARMUP_STEPS, STEPS = 2, 12  # the first two, which compile and settle, are in no figure
LOG_LINES = 30  # the last ones, that the result keeps of a row that failed
PAIR = ("bf16", "tensorwise")
RECIPES = (*PAIR, "rowwise", "rowwise_with_gw_hp", "mxfp8")
RATIOS = {"bf16_ratio": "tps over the bf16 row's", "compile_ratio": "tps over the eager row's"}
"""Figures that --check compares: unlike seconds, they hardly depend on clocks and neighbours."""
DONE, STOPPED = "done", "stopped by a signal"

Result = dict[str, Any]  # a row and its figures, in values that JSON can hold


@dataclass(frozen=True)
class Row:
    """One run of the benchmark."""

    flavor: str
    layers: int
    seq_len: int
    batch: int  # sequences in a step
    ac: str  # activation checkpointing: "none", "full", or "op", the selective policy of that name
    compile: bool
    recipe: str  # "bf16", or a float8 recipe

    @property
    def name(self) -> str:
        """All fields, such as `8B 26L seq8192 b1 op compiled tensorwise`."""
        model = f"{self.flavor} {self.layers}L seq{self.seq_len} b{self.batch}"
        return f"{model} {self.ac} {'compiled' if self.compile else 'eager'} {self.recipe}"

    @property
    def config(self) -> Config:
        """Config of the run. The 8B model's moments are in bf16, to leave room for more layers."""
        sections: dict[str, dict[str, Any]] = {
            "model": {"flavor": f"{self.flavor}_{self.layers}layers"},
            "optimizer": {"state_dtype": "bfloat16" if self.flavor == "8B" else "float32"},
            "training": {"seq_len": self.seq_len, "local_batch_size": self.batch, "steps": STEPS},
            "activation_checkpoint": {"mode": "selective" if self.ac == "op" else self.ac},
            "compile": {"enable": self.compile},
            "float8": {"enable_float8_linear": True, "recipe_name": self.recipe},
            "metrics": {"enable_tensorboard": False, "measure_peak": True},
        }
        if self.recipe == "bf16":
            del sections["float8"]
        return Config.model_validate(sections)


def compare(
    recipes: Sequence[str], flavor: str, batch: int, ac: str, *, compile: bool = True
) -> list[Row]:
    """Rows that differ in the recipe only."""
    layers, seq_len = FLAVORS[flavor].n_layers, 8192 if flavor == "8B" else 256
    return [Row(flavor, layers, seq_len, batch, ac, compile, recipe) for recipe in recipes]


# The most important rows come first: the time budget cuts off the end.
ROWS = {
    "GPU": [
        *compare(RECIPES, "8B", 1, "op"),
        *compare(PAIR, "8B", 1, "op", compile=False),
        *compare(PAIR, "8B", 1, "none"),
        *compare(PAIR, "debugmodel_gqa", 8, "none"),
        *compare(PAIR, "8B", 2, "op"),
        *compare(PAIR, "8B", 1, "full"),
        *compare(PAIR, "8B", 2, "none"),
        *compare(PAIR, "8B", 2, "full"),
    ],
    "quick GPU": [*compare(PAIR, "8B", 1, "op"), *compare(PAIR, "debugmodel_gqa", 8, "none")],
    "CPU": [
        *compare(RECIPES, "debugmodel_gqa", 2, "none", compile=False),
        *compare(PAIR, "debugmodel_gqa", 2, "none"),
        *compare(PAIR, "debugmodel_gqa", 2, "op", compile=False),
        *compare(PAIR, "debugmodel_gqa", 2, "full", compile=False),
    ],
    "quick CPU": [
        *compare(PAIR, "debugmodel_gqa", 2, "none", compile=False),
        *compare(PAIR, "debugmodel_gqa", 2, "none"),
    ],
}


def local_device() -> DeviceSpec | None:
    """Data sheet of the GPU at hand, with the memory that it really has; None on a CPU. A GPU
    without a data sheet gets an H100's, for its layers: plan_row predicts no rate of it."""
    if not torch.cuda.is_available():
        return None
    spec = lookup_device(device_name()) or find_device("H100 SXM")
    memory_gib = total_memory_gib(torch.device("cuda", 0)) or spec.memory_gib
    return replace(spec, name=device_name(), memory_gib=memory_gib)


def choose_rows(kind: str, only: str) -> list[Row]:
    """Return the ROWS of `kind` whose names contain every word of `only`. Raises ConfigError if
    there are none."""
    words = set(only.split())
    if rows := [row for row in ROWS[kind] if words <= set(row.name.split())]:
        return rows
    names = "\n".join(row.name for row in ROWS[kind])
    raise ConfigError(f'--only "{only}": no row has all these words in its name:\n{names}')


def plan_row(row: Row, device: DeviceSpec | None) -> tuple[Row, Result]:
    """Return `row` with as many layers as should fit `device`, and what the planner predicts.

    On a CPU, where `device` is None, nothing is cut or predicted. Raises ConfigError if the row
    cannot run on the device."""
    if device is None:
        return row, {"predicted_tps": None, "predicted_memory_gib": None}

    # The layers are chosen for bf16, compiled and eager, so that the rows that are compared have
    # equally many. The estimate for fewer layers lies on or below the straight line.
    def reserved_gib(layers: int) -> float:
        rows = [replace(row, layers=layers, compile=on, recipe="bf16") for on in (True, False)]
        return max(_plan(each, device)["predicted_memory_gib"] for each in rows)

    least, most = reserved_gib(1), reserved_gib(row.layers)
    if least > device.memory_gib:
        raise ConfigError(f"not one layer fits {device.name}'s {device.memory_gib:.0f} GiB")
    if most > device.memory_gib:
        share = (device.memory_gib - least) / (most - least)
        row = replace(row, layers=1 + int(share * (row.layers - 1)))

    return row, _plan(row, device)


@functools.cache
def _plan(row: Row, device: DeviceSpec) -> Result:
    plan = make_plan(row.config, world_size=1, device=device)
    reserved_gib = plan["memory"]["reserved"] / 2**30
    tps = plan["schedule"]["tps"] if lookup_device(device.name) else None
    return {"predicted_tps": tps, "predicted_memory_gib": reserved_gib}


def run_row(row: Row, folder: Path, *, timeout_s: float) -> Result:
    """Train `row` in a process of its own and return its outcome and figures. Raises TimeoutError
    after `timeout_s`."""
    folder.mkdir()
    config, run, log = folder / "config.toml", folder / "run", folder / "log.txt"
    config.write_text(dump_config(row.config))
    words = ["--job.config_file", str(config), "--job.dump_folder", str(run)]
    # It trains alone, in an environment as torchrun would set it.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}

    began = time.monotonic()
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, *TRAIN, *words],
            env={**os.environ, **alone},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the benchmark alone
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError("no time was left") from None
        finally:  # also ends what the run has started, such as the compiler's workers
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    result = asdict(row) | {"name": row.name, "seconds": round(time.monotonic() - began, 1)}
    if code == 0:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return result | {"status": DONE, "reason": ""} | measure([*map(json.loads, lines)])

    # The run folder has the cause, unless the process was killed or ended before it had a folder.
    status = read_status(run)
    reason = (status and status.cause) or f"exit code {code}"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    return result | {"status": "failed", "reason": reason.splitlines()[0], "log_tail": tail}


def measure(records: Sequence[Mapping[str, Any]]) -> Result:
    """Return the figures of a run: medians over its records, without the warm-up steps."""
    steady = [record for record in records if record["step"] > WARMUP_STEPS]

    def median(figure: str) -> float | None:
        known = [record[figure] for record in steady if record[figure] is not None]
        return statistics.median(known) if known else None

    times = [record["step_time_s"] for record in steady]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return {
        **{name: median(name) for name in ("tps", "tflops", "mfu", "mfu_achievable")},
        "memory_gib": steady[-1]["memory_gib"],
        "step_time_s": middle,
        "spread_pct": 100 * (high - low) / middle,
        "loss": steady[-1]["loss"],
    }


def add_ratios(results: Sequence[Result]) -> None:
    """Set the RATIOS of each result; None where it or its counterpart is not done."""
    rows = {Row(**{key: result[key] for key in Row.__annotations__}): result for result in results}
    tps: dict[Row, Any] = {row: result.get("tps") for row, result in rows.items()}
    for row, result in rows.items():
        counterparts = replace(row, recipe="bf16"), replace(row, compile=False)
        for name, other in zip(RATIOS, counterparts, strict=True):
            known = other != row and tps[row] and tps.get(other)
            result[name] = tps[row] / tps[other] if known else None


def run_benchmark(
    rows: Sequence[Row], device: DeviceSpec | None, *, budget_s: float, out: Path | None
) -> dict[str, Any]:
    """Run `rows` within the time budget and return the report. It is written to the file `out`
    after every row. SIGTERM and SIGINT end the running row and the benchmark."""
    began, versions = time.monotonic(), {name: version(name) for name in ("torch", "torchao")}
    report: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "device": device_name(),
        "emulated": device is None,
        "versions": versions | {"python": platform.python_version(), "cuda": torch.version.cuda},
        "budget_s": budget_s,
        "seconds": 0.0,
        "ended_by": "running",
        "rows": [],
        "skipped": [],
    }
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: KeyboardInterrupt

    def save(ended_by: str) -> None:
        report["ended_by"], report["seconds"] = ended_by, round(time.monotonic() - began, 1)
        add_ratios(report["rows"])
        if out is not None:
            replace_file(out, strict_json(report, indent=1) + "\n")

    with TemporaryDirectory(prefix="bench_", ignore_cleanup_errors=True) as folder:
        try:
            for number, row in enumerate(rows):
                left_s = budget_s - (time.monotonic() - began)
                longest_s = max((each["seconds"] for each in report["rows"]), default=0.0)
                try:
                    row, predictions = plan_row(row, device)
                    if longest_s >= left_s:
                        raise TimeoutError("no time was left")
                    result = run_row(row, Path(folder) / str(number), timeout_s=left_s)
                except (ConfigError, TimeoutError) as error:
                    report["skipped"].append({"name": row.name, "reason": str(error)})
                else:
                    report["rows"].append(result | predictions)
                    logger.info(f"{row.name}: {result['status']} after {result['seconds']:.0f} s")
                save("running")
            save(DONE)
        except KeyboardInterrupt:
            left = rows[len(report["rows"]) + len(report["skipped"]) :]
            report["skipped"] += [{"name": row.name, "reason": STOPPED} for row in left]
            save(STOPPED)
        except OSError as error:
            raise StorageError(
                f"--out {out} or {folder}: {error}; {storage_fix(error)}."
            ) from error
    return report


class _EarlierRow(BaseModel):  # what is compared of it
    name: str
    status: str
    bf16_ratio: Positive | None = None
    compile_ratio: Positive | None = None


def read_earlier(path: Path, *, device: str) -> list[Result]:
    """Return the rows of an earlier report. Raises ConfigError if the file has none, or is from
    another device."""
    try:
        earlier = read_json_object(path)
        rows = TypeAdapter(list[_EarlierRow]).validate_python(earlier["rows"])
    except (OSError, ValueError, LookupError) as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else repr(error)
        raise ConfigError(f"--check {path}: {reason}; name a file that --out wrote.") from error
    if (its_device := earlier.get("device")) != device:
        raise ConfigError(
            f'--check {path} is of device "{its_device}", and this is "{device}": their ratios '
            "cannot be compared; measure here with --out."
        )
    return [row.model_dump() for row in rows]


def find_regressions(
    now: Iterable[Result], earlier: Iterable[Result], *, tolerance_pct: float
) -> list[str]:
    """Describe in a line each ratio that is more than `tolerance_pct` percent below the earlier
    one, and each row that no longer works. Rows that only one side has are ignored. Raises
    ConfigError if no ratio is left."""
    before = {row["name"]: row for row in earlier if row["status"] == DONE}
    pairs = [(row, before[row["name"]]) for row in now if row["name"] in before]

    failed = [
        f"{row['name']}: {row['status']}, and was done before: {row['reason']}"
        for row, _ in pairs
        if row["status"] != DONE
    ]
    ratios = [
        (f"{row['name']}: {what}", row[ratio], old[ratio])
        for row, old in pairs
        for ratio, what in RATIOS.items()
        if row[ratio] is not None and old.get(ratio) is not None
    ]
    if not (failed or ratios):
        raise ConfigError("--check: no ratio is in both results; measure with the same options.")

    slower = [
        f"{name} is {ratio:.3f}, {100 * (1 - ratio / old):.1f} % below the earlier {old:.3f}"
        for name, ratio, old in ratios
        if 100 * (1 - ratio / old) > tolerance_pct
    ]
    return slower + failed
