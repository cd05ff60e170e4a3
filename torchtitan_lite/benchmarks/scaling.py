"""How the cost of training grows with the work, and that it does not grow with the number of steps:
each point a run under torchrun, read from its metrics.jsonl. A hub."""

import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lite.benchmarks.estimates import Line, Ratios, block_quantiles
from torchtitan_lite.benchmarks.processes import (
    environment,
    read_records,
    resident_kib,
    torchrun,
    watch,
)

STEPS = 12
"""Of a run that is a point."""
WARM_UP_STEPS = 4
"""Of these, that are in no figure."""
BLOCKS = 10
"""Of steps, in each half of a long run."""
FASTEST = 0.1
"""Of a block's steps, that tell what a step costs: who else uses the machine makes one longer, and
never shorter."""
TIMEOUT_S = 600.0
"""For one run."""
TINY = {"dim": 64, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128}
"""A model so small that a step is what the host does."""
CONFIG = """
[model]
flavor = "debugmodel"

[lr_scheduler]
warmup_steps = 3

[activation_checkpoint]
mode = "none"

[metrics]
peak_tflops_bf16 = 1.0  # so that none is measured
"""


@dataclass(frozen=True)
class Setting:
    """What a run trains."""

    n_layers: int = 2
    seq_len: int = 128
    local_batch_size: int = 4
    ranks: int = 1


@dataclass(frozen=True)
class Point:
    """What a run came to."""

    step_s: float
    """Median seconds of a step."""
    tps: float
    """Tokens per second per rank in such a step."""
    flops: float
    """Of a step on one rank, by the ledger."""


Law = Callable[[Sequence[float], Sequence[Point]], list[float]]
"""The seconds of a step that are expected at each x, given what was measured."""


def affine(xs: Sequence[float], points: Sequence[Point]) -> list[float]:
    """By the straight line that fits best: a fixed cost, and the same again for each unit of
    work."""
    line = Line.through(xs, [point.step_s for point in points])
    return [line.at(x) for x in xs]


def ranks_a_core(ranks: float) -> float:
    """How many of `ranks` share a core of this machine: at least 1."""
    return max(1, ranks / len(os.sched_getaffinity(0)))


def shared_cores(xs: Sequence[float], points: Sequence[Point]) -> list[float]:
    """As long as on the first number of ranks, while there is a core for each, and longer as more
    of them share one."""
    return [points[0].step_s * ranks_a_core(x) / ranks_a_core(xs[0]) for x in xs]


def by_flops(settings: Sequence[Setting], points: Sequence[Point]) -> list[float]:
    """Seconds of a step at the rate in FLOPs a core of the last point, which has most of them."""
    work = [
        point.flops * ranks_a_core(setting.ranks)
        for setting, point in zip(settings, points, strict=True)
    ]
    return [points[-1].step_s * each / work[-1] for each in work]


@dataclass(frozen=True)
class Sweep:
    """Runs that differ in one respect."""

    varies: str
    settings: Mapping[int, Setting]
    """By what differs."""
    law: Law
    says: str
    """The law, in words."""


SWEEPS = {
    "layers": Sweep(
        "layers",
        {x: Setting(n_layers=x) for x in (1, 2, 4, 8)},
        affine,
        "the seconds of a step are affine in the layers",
    ),
    "seq_len": Sweep(
        "seq_len",
        {x: Setting(seq_len=x, local_batch_size=1024 // x) for x in (128, 256, 512, 1024)},
        affine,
        "of the same number of tokens, the seconds are affine in seq_len, by attention",
    ),
    "batch": Sweep(
        "local_batch_size",
        {x: Setting(local_batch_size=x) for x in (1, 2, 4, 8)},
        affine,
        "the seconds of a step are affine in the batch: tokens/s rise until the fixed part is small",
    ),
    "ranks": Sweep(
        "ranks",
        {x: Setting(ranks=x) for x in (1, 2, 4)},
        shared_cores,
        "the seconds of a step are constant up to a rank a core, and then in proportion to the ranks",
    ),
}


@dataclass(frozen=True)
class SweepResult:
    """A sweep, measured."""

    sweep: Sweep
    points: tuple[Point, ...]

    def rows(self) -> list[dict[str, float]]:
        """A row a point: what was measured, and what was expected of it."""
        xs, settings = list(self.sweep.settings), list(self.sweep.settings.values())
        expected = zip(
            xs,
            self.points,
            self.sweep.law(xs, self.points),
            by_flops(settings, self.points),
            strict=True,
        )
        return [
            {
                self.sweep.varies: x,
                "tps": point.tps,
                "step_s": point.step_s,
                "law_s": law_s,
                "over_law": point.step_s / law_s,
                "flops_s": flops_s,
                "over_flops": point.step_s / flops_s,
            }
            for x, point, law_s, flops_s in expected
        ]

    def __str__(self) -> str:
        """A table."""
        lines = [
            f"{self.sweep.varies}: {self.sweep.says}",
            f"{self.sweep.varies:>16}{'tokens/s a rank':>17}{'s a step':>10}{'by the law':>12}{'ratio':>7}"
            f"{'by FLOPs':>10}{'ratio':>7}",
        ]
        for row in self.rows():
            lines.append(
                f"{row[self.sweep.varies]:>16}{row['tps']:>17,.0f}{row['step_s']:>10.4f}{row['law_s']:>12.4f}"
                f"{row['over_law']:>7.2f}{row['flops_s']:>10.4f}{row['over_flops']:>7.2f}"
            )
        return "\n".join(lines)


def measure_sweep(sweep: Sweep, *, rounds: int) -> SweepResult:
    """The points of `sweep`, each the median of `rounds` runs, forward and backward in turn."""
    points: dict[int, list[Point]] = {x: [] for x in sweep.settings}
    for number in range(rounds):
        for x in list(sweep.settings)[:: -1 if number % 2 else 1]:
            points[x].append(run_point(sweep.settings[x]))
    return SweepResult(sweep, tuple(median_point(runs) for runs in points.values()))


def median_point(points: Sequence[Point]) -> Point:
    """The one that several runs of the same come to."""
    tokens = points[0].tps * points[0].step_s
    step_s = statistics.median(point.step_s for point in points)
    return Point(step_s, tokens / step_s, points[0].flops)


def run_point(setting: Setting) -> Point:
    """The outcome of a run of its own."""
    words = [
        f"--training.seq_len={setting.seq_len}",
        f"--training.local_batch_size={setting.local_batch_size}",
        f"--training.steps={STEPS}",
    ]
    records, _ = train({"n_layers": setting.n_layers}, words, ranks=setting.ranks)
    return point_of(records, tokens=setting.seq_len * setting.local_batch_size)


def point_of(records: Sequence[Mapping[str, Any]], *, tokens: int) -> Point:
    """What a run with `tokens` tokens a step and rank came to, from its records."""
    flops_per_token = 1e12 * records[-1]["tflops"] / records[-1]["tps"]
    step_s = statistics.median(record["step_time_s"] for record in records[WARM_UP_STEPS:])
    return Point(step_s, tokens / step_s, flops_per_token * tokens)


def train(
    dimensions: Mapping[str, int], words: Sequence[str], *, ranks: int = 1
) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """The records of a run of the debug model with other `dimensions`, and by step the resident
    memory in KiB of its largest process as the step's line was printed."""
    resident: dict[int, int] = {}

    def read_memory(pid: int, line: str) -> None:
        if match := re.search(r"\bstep +(\d+)/\d+ +loss", line):
            resident[int(match[1])] = resident_kib(pid)

    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        config, run = Path(folder) / "config.toml", Path(folder) / "run"
        config.write_text(CONFIG)
        module = ["-m", "torchtitan_lite.benchmarks.scaling_run", json.dumps(dimensions)]
        options = ["--job.config_file", str(config), "--job.dump_folder", str(run), *words]
        command = torchrun(sys.executable, *module, *options, processes=ranks)
        watch(command, env=environment(NO_COLOR="1"), timeout_s=TIMEOUT_S, on_line=read_memory)
        return read_records(run), resident


@dataclass(frozen=True)
class LongRun:
    """What becomes of a step's cost in a run of many."""

    steps: int
    first_s: float
    """Median seconds of a step in the first half."""
    median_ratio: float
    """Of the second half over the first."""
    ratios: Ratios
    """The same of the seconds that the fastest steps of a block stay below, block by block."""
    resident_mib: float
    """At the end."""
    growth: Line
    """Resident memory in KiB by step, in the second half."""

    def __str__(self) -> str:
        """The figures, in a few lines."""
        half = self.steps // 2
        return (
            f"{self.steps:,} steps of a tiny model, {1e3 * self.first_s:.2f} ms each; the law: no step costs more than "
            f"an earlier one\n"
            f"seconds of the last {half:,} steps over the first {half:,}, by the fastest {FASTEST:.0%} of each "
            f"{half // BLOCKS}: {self.ratios}\n"
            f"the same by the median, which whoever else uses the machine moves too: {self.median_ratio:.3f}\n"
            f"resident memory {self.resident_mib:,.1f} MiB; growth over the last {half:,} steps "
            f"{self.growth.slope:+.3f} KiB a step, standard error {self.growth.slope_error:.3f}"
        )

    def as_json(self) -> dict[str, float]:
        """The same figures."""
        return {
            "steps": self.steps,
            "step_s": self.first_s,
            "last_over_first": self.ratios.median,
            "last_over_first_error": self.ratios.standard_error,
            "last_over_first_by_median": self.median_ratio,
            "resident_mib": self.resident_mib,
            "growth_kib_per_step": self.growth.slope,
            "growth_error": self.growth.slope_error,
        }


def measure_long_run(*, steps: int) -> LongRun:
    """A run of that many steps of a tiny model, and as many to warm up as its kind needs."""
    words = [
        "--training.seq_len=16",
        "--training.local_batch_size=1",
        f"--training.steps={steps + WARM_UP_STEPS}",
    ]
    records, resident = train(TINY, words)
    return long_run([record["step_time_s"] for record in records[WARM_UP_STEPS:]], resident)


def long_run(seconds: Sequence[float], resident: Mapping[int, int]) -> LongRun:
    """What `seconds` of steps, and `resident` memory in KiB by step, come to."""
    half = len(seconds) // 2
    first, last = seconds[:half], seconds[-half:]
    counted = [step for step in sorted(resident) if step > max(resident) - half]
    growth = Line.through(
        block_quantiles(counted, blocks=BLOCKS),
        block_quantiles([resident[step] for step in counted], blocks=BLOCKS),
    )
    return LongRun(
        len(seconds),
        statistics.median(first),
        statistics.median(last) / statistics.median(first),
        Ratios.of(
            block_quantiles(last, blocks=BLOCKS, quantile=FASTEST),
            block_quantiles(first, blocks=BLOCKS, quantile=FASTEST),
        ),
        resident[max(resident)] / 1024,
        growth,
    )
