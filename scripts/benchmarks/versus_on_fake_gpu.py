"""Compare with torchtitan 0.2.2 on the fake H100 of tests/deviceless: memory, launches, bytes, time
of the host.

PYTHONPATH=$PWD ENV/bin/python scripts/benchmarks/versus_on_fake_gpu.py [WORD ...]

WORDs choose cases: fsdp1 compiled op runs these three with each recipe. An axis without a word is
run with all of its words. README.md beside this file says how to make the environment, what is the
same in both, and what is not.

  layout     one    one GPU, as each trainer uses it by itself
             fsdp1  one GPU, over which torchtitan shards
             fsdp2  two GPUs, over which both shard
  mode       compiled, eager
  recompute  none, op, full (activation checkpointing)
  recipe     bf16, tensorwise, gathered (tensorwise, FSDP gathers weights in float8; fsdp2 only)
"""

import argparse
import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from common import environment, measure_pairs, run_config, torchrun, watch
from fake_gpu_probe import STEPS, Settings, fake_gpu
from versus_torchtitan import torchtitan_dimensions, torchtitan_options

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.tables import format_columns
from torchtitan_lite.base.terminal import run_script
from torchtitan_lite.config import Config, load_config

CONFIG = Path(__file__).parents[2] / "train_configs/llama3_8b.toml"
PROBE = Path(__file__).with_name("fake_gpu_probe.py")
AXES = {
    "layout": ("one", "fsdp1", "fsdp2"),
    "mode": ("compiled", "eager"),
    "recompute": ("none", "op", "full"),
    "recipe": ("bf16", "tensorwise", "gathered"),
}
"""Words that choose cases."""
GATHERED = ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
"""Keys, in either trainer's table of float8, of weights that are gathered in float8."""

Run: TypeAlias = dict[str, Any]
"""Figures of one run, as fake_gpu_probe.py writes them."""
Figure: TypeAlias = Callable[[Sequence[Run]], float]
"""Compute a figure from a trainer's runs, of which the first had empty compiler caches."""


@dataclass(frozen=True)
class Case:
    """One comparison: a word of each axis."""

    layout: str
    mode: str
    recompute: str
    recipe: str

    @property
    def gpus(self) -> int:
        """Number of fake GPUs, and of processes."""
        return 2 if self.layout == "fsdp2" else 1

    @property
    def compiled(self) -> bool:
        """Whether blocks and loss are compiled."""
        return self.mode == "compiled"

    def config(self, *, layers: int) -> Config:
        """Config of layers of Llama 3.1 8B, a sequence of 8,192 tokens on each GPU."""
        selective, float8 = self.recompute == "op", self.recipe != "bf16"
        words = [f"model.n_layers={layers}", f"training.steps={STEPS}", "metrics.log_freq=1"]
        words.append("parallelism.fsdp_reshard_after_forward=default")
        words.append(f"activation_checkpoint.mode={'selective' if selective else self.recompute}")
        words.append(f"compile.enable={str(self.compiled).lower()}")
        words.append(f"float8.enable_float8_linear={str(float8).lower()}")
        words += [f"float8.{key}" for key in GATHERED if self.recipe == "gathered"]
        return load_config(
            ["--job.config_file", str(CONFIG), *(f"--{word}" for word in words)],
            world_size=self.gpus,
        )


def choose_cases(words: Sequence[str]) -> list[Case]:
    """Return the cases that `words` of AXES choose. Raises ConfigError if there are none."""
    known = list(itertools.chain.from_iterable(AXES.values()))
    if unknown := [word for word in words if word not in known]:
        raise ConfigError(f"{' '.join(unknown)}: no such word; choose from {' '.join(known)}")
    chosen = [[word for word in axis if word in words] or axis for axis in AXES.values()]
    cases = [Case(*each) for each in itertools.product(*chosen)]
    cases = [case for case in cases if case.recipe != "gathered" or case.gpus > 1]
    if not cases:
        raise ConfigError("float8 weights are gathered from several GPUs: add the word fsdp2")
    return cases


def check_can_run() -> None:
    """Raise ConfigError if this Python lacks torchtitan or PyTorch's CUDA build."""
    if torch.version.cuda is None or importlib.util.find_spec("torchtitan") is None:
        raise ConfigError(
            f"{sys.executable} needs torchtitan 0.2.2 and PyTorch's CUDA build; "
            "scripts/benchmarks/README.md says how to install them."
        )


def run_ours(config: Config, settings: Settings, *, gpus: int, env: dict[str, str]) -> None:
    """Train `config` with this project."""
    run_config(config, processes=gpus, program=(str(PROBE), json.dumps(asdict(settings))), env=env)


def torchtitan_float8(config: Config) -> list[str]:
    """Return torchtitan's options for the float8 linears of `config`."""
    if not config.float8.enable_float8_linear:
        return []
    table = "quantize.linear.float8"
    keys = [key for key in GATHERED if getattr(config.float8, key)]
    return [f"--model.converters={table}"] + [
        f"--{table}.{setting}" for setting in ("filter_fqns=output", *keys)
    ]


def run_torchtitan(config: Config, settings: Settings, *, gpus: int, env: dict[str, str]) -> None:
    """Train the model of `config` with torchtitan."""
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        words = [str(PROBE), json.dumps(asdict(settings)), f"--job.dump_folder={folder}/run"]
        words += [*torchtitan_options(config), *torchtitan_float8(config)]
        watch(torchrun(words, processes=gpus), env=environment(**env))


def measure(case: Case, config: Config, *, caches: Path, theirs: bool) -> Run:
    """Run one trainer with the compiler's caches in the folder `caches`, and return its figures."""
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        # Each run has counters of its own.
        (Path(folder) / "calls").mkdir()
        env = fake_gpu.environment(fake_gpu.build()) | {
            "FAKE_GPU_COUNT": str(case.gpus),
            "FAKE_GPU_GIB": "1024",  # the whole model fits on one
            "FAKE_GPU_COUNTS": f"{folder}/calls",
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
        }

        # torchtitan is recognized by its model arguments.
        settings = Settings(
            out=f"{folder}/figures.json",
            began=time.time(),
            compiled=case.compiled,
            dimensions=torchtitan_dimensions(config) if theirs else None,
            shard_one=theirs and case.layout == "fsdp1",
        )
        run = run_torchtitan if theirs else run_ours
        run(config, settings, gpus=case.gpus, env=env)
        figures: Run = json.loads(Path(settings.out).read_text())
        return figures


def compare(case: Case, *, layers: int, pairs: int) -> tuple[list[Run], list[Run]]:
    """Return the figures of both trainers' runs: of one with empty caches of the compiler, and of
    `pairs` with what it left there."""
    config = case.config(layers=layers)
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        ours, theirs = (
            partial(measure, case, config, caches=Path(folder, str(side)), theirs=side == 1)
            for side in range(2)
        )
        cold = ours(), theirs()
        warm = measure_pairs(ours, theirs, pairs=pairs)
    return [cold[0], *warm[0]], [cold[1], *warm[1]]


def calls_a_step(*prefixes: str) -> Figure:
    """Return the mean number of calls in a steady step whose names begin so."""

    def count(runs: Sequence[Run]) -> float:
        steps = runs[-1]["calls"]
        found = (n for calls in steps for name, n in calls.items() if name.startswith(prefixes))
        return sum(found) / len(steps)

    return count


def sent_mib(runs: Sequence[Run]) -> float:
    """Return the MiB that each of two GPUs sends in a step. A rank sends its part of a gathered or
    scattered tensor, and as many bytes as a reduced tensor has. One GPU sends nothing: there it is
    the size of the buffers."""
    steps = runs[-1]["calls"]
    collectives = [item for calls in steps for item in calls.items() if item[0].startswith("nccl ")]
    return sum(n * int(name.split()[-2]) for name, n in collectives) / len(steps) / 2**20


FIGURES: dict[str, Figure] = {
    "allocated GiB": lambda runs: runs[-1]["allocated"] / 2**30,
    "reserved GiB": lambda runs: runs[-1]["reserved"] / 2**30,
    "launches": calls_a_step("kernel ", "matmul ", "nccl "),
    "matmuls": calls_a_step("matmul "),
    "copies": calls_a_step("copy ", "set memory"),
    "waits": calls_a_step("wait for ", "copy from device to pageable"),
    "collectives": calls_a_step("nccl "),
    "sent MiB": sent_mib,
    "block MiB": lambda runs: sum(runs[0]["block_bytes"]) / 2**20,
    "host ms": lambda runs: 1e3 * statistics.median(s for run in runs for s in run["host_s"]),
    "host CPU ms": lambda runs: 1e3 * min(s for run in runs for s in run["host_cpu_s"]),
    "cold s": lambda runs: runs[0]["first_step_s"],
    "cold CPU s": lambda runs: runs[0]["first_step_cpu_s"],
    "warm s": lambda runs: min(run["first_step_s"] for run in runs[1:]),
    "warm CPU s": lambda runs: min(run["first_step_cpu_s"] for run in runs[1:]),
}
"""The compared figures, by title. Memory is the peak of a whole run; calls are those of a step. The
host's time of a step is the median; its CPU time is the least, because a busy machine only adds to
it. "cold" and "warm" are from the launch to the end of step 1."""


def format_ratio(ours: float, theirs: float) -> str:
    """Ours over theirs, or both where theirs is 0."""
    return f"{ours / theirs:.2f}" if theirs else f"{ours:.0f} : 0"


def format_case(values: Sequence[tuple[float, float]]) -> str:
    """Table of a case's figures."""
    rows = [["", "torchtitan_lite", "torchtitan", "ratio"]]
    for title, (ours, theirs) in zip(FIGURES, values, strict=True):
        rows.append([title, f"{ours:,.1f}", f"{theirs:,.1f}", format_ratio(ours, theirs)])
    return format_columns(rows, right=(1, 2, 3))


def format_ratios(cases: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Table of all cases' ratios."""
    rows = [["ours / torchtitan's", *FIGURES]]
    for name, values in cases.items():
        rows.append([name, *(format_ratio(*both) for both in values)])
    return format_columns(rows, right=range(1, len(rows[0])), markdown=True)


def main(argv: list[str]) -> None:
    """Compare and print. Raises RunError."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("words", nargs="*", metavar="WORD", help="see above")
    option("--layers", type=int, default=4, help="of the model (default: 4)")
    option("--pairs", type=int, default=2, help="of runs with warm caches (default: 2)")
    option("--json", type=Path, help="file for the figures of all runs, by case")
    options = parser.parse_args(argv)

    # Refuse what cannot run before the first run, which takes a minute.
    check_can_run()
    if options.pairs < 1:
        raise ConfigError(f"--pairs {options.pairs} must be at least 1")
    cases = choose_cases(options.words)

    # Print and keep the figures of each case as soon as it ends.
    runs, values = {}, {}
    for case in cases:
        name = " ".join(asdict(case).values())
        runs[name] = compare(case, layers=options.layers, pairs=options.pairs)
        ours, theirs = runs[name]
        values[name] = [(figure(ours), figure(theirs)) for figure in FIGURES.values()]
        print(f"{name}\n{format_case(values[name])}\n", flush=True)
        if options.json:
            options.json.write_text(json.dumps(runs))
    print(format_ratios(values))


if __name__ == "__main__":
    run_script(main)
