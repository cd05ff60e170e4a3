"""What the benchmarks share: runs of commands measured from outside, compared in pairs.

Two measurements of a pair are taken one after the other, and their order alternates. A machine that
is slow for a minute then slows both of a pair, and their ratio stays.
"""

import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from torchtitan_lite.base.errors import ConfigError, RunError
from torchtitan_lite.config import Config

STEP_LINE = re.compile(r"\bstep:?\s+(\d+)(?:/\d+)?\s+loss:?\s+([\d.]+)")
"""A step's line in the log of torchtitan_lite, torchtitan and the bare loop: step and loss."""
WARMUP_STEPS = 5
"""Steps at the start of a run that are in no rate."""
LEAST_STEPS = 2 * WARMUP_STEPS
TIMEOUT_S = 900.0
"""Time limit of one run."""
TAIL_LINES = 60
"""Last lines of the output that the error message shows of a command that failed."""
ALIKE: Mapping[str, Sequence[object]] = {
    "parallelism.tensor_parallel_degree": (1,),
    "parallelism.data_parallel_replicate_degree": (1,),
    "activation_checkpoint.mode": ("none", "selective", "full"),
    "optimizer.state_dtype": (None, "float32"),
    "training.dtype": ("float32",),
    "training.enable_cpu_offload": (False,),
}
"""Values, by key, that torchtitan and the bare loop implement too."""

Measurement = TypeVar("Measurement")


@dataclass(frozen=True)
class Ratios:
    """Ratios of at least two pairs of measurements."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, ones: Sequence[float], others: Sequence[float]) -> "Ratios":
        """Divide `ones` by `others`, pair by pair."""
        return cls(tuple(one / other for one, other in zip(ones, others, strict=True)))

    @property
    def quartiles(self) -> list[float]:
        """First quartile, median and third quartile."""
        return statistics.quantiles(self.values, n=4, method="inclusive")

    @property
    def standard_error(self) -> float:
        """Standard error of the median, estimated from the distance of the quartiles, so that a few
        outliers do not count. Exact for a normal distribution."""
        low, _, high = self.quartiles
        deviation = (high - low) / (2 * statistics.NormalDist().inv_cdf(0.75))
        return math.sqrt(math.pi / 2 / len(self.values)) * deviation

    def __str__(self) -> str:
        """Median, standard error, quartiles and number of pairs."""
        low, median, high = self.quartiles
        error, pairs = self.standard_error, len(self.values)
        return f"{median:.3f} +- {error:.3f} (quartiles {low:.3f}, {high:.3f}; {pairs} pairs)"


def measure_pairs(
    one: Callable[[], Measurement], other: Callable[[], Measurement], *, pairs: int
) -> tuple[list[Measurement], list[Measurement]]:
    """Return what `one` and `other` measured in `pairs` pairs of alternating order."""
    ones: list[Measurement] = []
    others: list[Measurement] = []
    for pair in range(pairs):
        turns = [(one, ones), (other, others)]
        for measure, into in turns[:: -1 if pair % 2 else 1]:
            into.append(measure())
    return ones, others


def seconds_of(action: Callable[[], object]) -> float:
    """Call `action` and return the seconds that it took."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def tell(figures: Iterable[Mapping[str, Any]]) -> None:
    """Print each figure as a line of JSON, for waits.py."""
    for figure in figures:
        print(json.dumps(figure), flush=True)


def figures_told(run: "Watched") -> list[dict[str, Any]]:
    """Return the figures that a command has printed by `tell`."""
    return [json.loads(line) for _, line in run.lines if line.startswith('{"name"')]


@dataclass(frozen=True)
class Watched:
    """A command that ended with exit code 0."""

    lines: tuple[tuple[float, str], ...]
    """What it printed: each line with the seconds from the command's start to its arrival."""
    peak_mib: float
    """Peak resident memory of the largest of its processes. Linux counts it from this process's
    own memory on, because they are forked from it."""

    def find(self, pattern: str) -> str:
        """Return the first group of the first match of `pattern`. Raises RunError for none."""
        for _, line in self.lines:
            if match := re.search(pattern, line):
                return match[1]
        raise RunError(f"no line matches {pattern!r}:\n{_tail(self.lines)}")


def watch(
    command: Sequence[str], *, env: Mapping[str, str], timeout_s: float = TIMEOUT_S
) -> Watched:
    """Run `command` to its end. Raises RunError if it fails or is terminated after `timeout_s`."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=dict(env),
    )
    assert process.stdout is not None, "stdout is a pipe"

    timer = threading.Timer(timeout_s, process.terminate)
    timer.start()
    lines: list[tuple[float, str]] = []
    try:
        for line in process.stdout:
            lines.append((time.perf_counter() - began, line.rstrip("\n")))
    except BaseException:
        process.terminate()
        raise
    finally:
        _, status, usage = os.wait4(process.pid, 0)  # unlike Popen.wait it returns the memory
        process.returncode = os.waitstatus_to_exitcode(status)
        timer.cancel()

    if process.returncode != 0:
        raise RunError(f"{' '.join(command)} ended with {process.returncode}:\n{_tail(lines)}")
    return Watched(tuple(lines), usage.ru_maxrss / 1024)  # KiB on Linux


def _tail(lines: Sequence[tuple[float, str]]) -> str:
    return "\n".join(line for _, line in lines[-TAIL_LINES:])


def torchrun(words: Sequence[str], *, processes: int, python: str = sys.executable) -> list[str]:
    """Command that runs `words` in that many processes."""
    start = [python, "-m", "torch.distributed.run", "--standalone"]
    return [*start, "--nproc-per-node", str(processes), *words]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment with `changes`, and one thread a process unless it is set."""
    return {"OMP_NUM_THREADS": "1", **os.environ, **changes}


def run_config(
    config: Config,
    *,
    processes: int,
    program: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> tuple[Watched, list[dict[str, Any]]]:
    """Train `config` in a new folder, by our launcher or by `program` under torchrun, and return
    the output and the records, of which there are none if the program writes no metrics.jsonl."""
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        path = Path(folder)
        (path / "config.toml").write_text(config.to_toml())
        words = ["--job.config_file", str(path / "config.toml")]
        words += ["--job.dump_folder", str(path / "run")]
        command = [sys.executable, "-m", "torchtitan_lite", "train", *words]
        if program:
            command = torchrun([*program, *words], processes=processes)

        # With a cache of its own each run compiles, and none profits from the one before.
        own = {"TORCHINDUCTOR_CACHE_DIR": str(path / "compiled"), "NGPU": str(processes)}
        watched = watch(command, env=environment(**{**own, **(env or {})}))
        records = path / "run/metrics.jsonl"
        lines = records.read_text().splitlines() if records.exists() else []
        return watched, [json.loads(line) for line in lines]


@dataclass(frozen=True)
class Figures:
    """Measurements of one run from outside."""

    tps: float
    """Tokens per second per process, from the end of step WARMUP_STEPS to the last step's."""
    first_step_s: float
    """From the start of torchrun to the end of the first step."""
    peak_mib: float

    @classmethod
    def of(cls, run: Watched, *, tokens: int) -> "Figures":
        """Measure a run that trains `tokens` tokens a step and process. Raises RunError if a step
        is missing in its log."""
        ends: dict[int, float] = {}
        for seconds, line in run.lines:
            if match := STEP_LINE.search(line):
                ends.setdefault(int(match[1]), seconds)  # torchtitan logs on other ranks too
        if sorted(ends) != list(range(1, len(ends) + 1)) or len(ends) < LEAST_STEPS:
            raise RunError(f"the log has steps {sorted(ends)}, not 1 to {LEAST_STEPS} or more")
        last = max(ends)
        seconds = ends[last] - ends[WARMUP_STEPS]
        return cls(tokens * (last - WARMUP_STEPS) / seconds, ends[1], run.peak_mib)


TITLES = {
    "tps": "tokens/s a process",
    "first_step_s": "launch to end of step 1, s",
    "peak_mib": "peak memory, MiB",
}


def format_comparison(ours: Sequence[Figures], other: str, theirs: Sequence[Figures]) -> str:
    """Table of the medians of both, and of the ratios pair by pair."""
    lines = [f"{'':28}{'torchtitan_lite':>17}{other:>14}   ratio"]
    for name in TITLES:
        values = [[getattr(run, name) for run in runs] for runs in (ours, theirs)]
        medians, ratios = list(map(statistics.median, values)), Ratios.of(*values)
        lines.append(f"{TITLES[name]:28}{medians[0]:>17,.1f}{medians[1]:>14,.1f}   {ratios}")
    return "\n".join(lines)


def check_values(config: Config, values: Mapping[str, Sequence[object]], *, other: str) -> None:
    """Raise ConfigError if a key of `config` has none of the `values` that `other` implements, or
    if the run is too short to measure."""
    if config.training.steps < LEAST_STEPS:
        raise ConfigError(
            f"[training] steps = {config.training.steps}: the first {WARMUP_STEPS} are not "
            f"measured; train at least {LEAST_STEPS}."
        )
    for name, allowed in values.items():
        table, key = name.split(".")
        value = getattr(getattr(config, table), key)
        if value not in allowed:
            fitting = " or ".join(map(json.dumps, allowed))
            raise ConfigError(
                f"[{table}] {key} = {json.dumps(value)} is not the same in {other}; set it to "
                f"{fitting}."
            )


def tokens_a_step(config: Config, *, processes: int) -> int:
    """Tokens of a step for each of the data-parallel `processes`."""
    training = config.training
    if training.global_batch_size > 0:
        return training.global_batch_size * training.seq_len // processes
    return training.local_batch_size * training.seq_len


def describe_machine() -> str:
    """Line that belongs to every figure: device and versions."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchao"))
    return f"{device_name()}; Python {platform.python_version()}, {versions}"


def device_name() -> str:
    """Return the name of the GPU at hand, or of the CPU with its number of cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"CPU: {next(models, platform.machine())}, {len(os.sched_getaffinity(0))} cores"
