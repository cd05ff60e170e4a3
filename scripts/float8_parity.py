"""Does float8 train as bf16 does, and a compiled run as an eager one? python
scripts/float8_parity.py [--out DIR] ...

Trains train_configs/float8_parity.toml with each recipe and seed, and with two of the recipes
compiled, each run in a process of its own, and writes the page about them. Runs that are done are
not repeated.

  --out DIR    folder of the runs (default: outputs/float8_parity)
  --page FILE  page to write, its pictures beside it (default: docs/float8_parity.md); needs the plots extra
  --jobs N     runs at a time (default: 2)
"""

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import torch

from torchtitan_lite.errors import ConfigError, RunError, run_script
from torchtitan_lite.logger import init_logger, logger
from torchtitan_lite.metrics.comparison import (
    LoggedRun,
    compare,
    draw,
    format_runs,
    read_runs,
)
from torchtitan_lite.run_folder import read_status
from torchtitan_lite.tables import format_columns

ROOT = Path(__file__).parents[1]
SEEDS = (0, 1, 2)
FLOAT8 = ("--float8.enable_float8_linear",)
ALL_GATHER = (
    "--float8.enable_fsdp_float8_all_gather",
    "--float8.precompute_float8_dynamic_scale_for_fsdp",
)
RECIPES = {
    "bf16": (),
    "tensorwise": FLOAT8,
    "tensorwise_all_gather": (*FLOAT8, *ALL_GATHER),
    "rowwise": (*FLOAT8, "--float8.recipe_name=rowwise"),
    "rowwise_with_gw_hp": (*FLOAT8, "--float8.recipe_name=rowwise_with_gw_hp"),
    "mxfp8": (*FLOAT8, "--float8.recipe_name=mxfp8"),
}
"""What each recipe adds to the config; the others are held against the first."""
COMPILED_RECIPES = ("bf16", "tensorwise_all_gather")
COMPILE = ("--compile.enable", "--training.steps=100")
COMPILED = {
    "compile": COMPILE,
    "compile_op_ac": (*COMPILE, "--activation_checkpoint.mode=selective"),
    "compile_full_ac": (*COMPILE, "--activation_checkpoint.mode=full"),
}
"""What each compiled run adds to its recipe; it is held against the first steps of the eager
one."""
LAST = 20
"""Steps that a final loss is the mean of."""
COLUMNS = ("run", "steps", "final loss", "to first", "loss at most off", "grad norm at most off")
PAGE = """# Training parity

Whether float8 learns what bf16 learns, and compiled runs what eager ones do: a model of 4 layers and dim 256, trained
on the default corpus by [float8_parity.toml](../train_configs/float8_parity.toml), each run by one process, which casts
its weights as for an all-gather under `tensorwise_all_gather`, but gathers nothing. All of it is the outcome of

    python scripts/float8_parity.py

on {made}.

## Recipes

Loss after all steps, the mean of the last {last}, and how far it is from bf16's with the same seed. A seed draws the
weights and the order of the data, so that bf16's own column shows what a seed alone changes.

{summary}

{first_seed}

This picture, as those below, is one of `scripts/compare_runs.py`. On a CPU float8 is emulated, and these runs shared
the machine with others: their speeds cannot be compared.

## Compiled runs

The first steps of the same schedule with torch.compile, without activation checkpointing, with the "op" policy and with
full recomputation, beside the eager run without it. Compiled code rounds in fewer places, and training carries each
difference on: a step's own loss and gradient norm drift, the mean of the losses hardly.

{compiled}
"""


def list_runs() -> dict[str, tuple[str, ...]]:
    """What each run adds to the config, by its name."""
    eager = {
        f"{recipe}-{seed}": (*words, f"--debug.seed={seed}")
        for recipe, words in RECIPES.items()
        for seed in SEEDS
    }
    compiled = {
        f"{recipe}-{variant}": (*eager[f"{recipe}-{SEEDS[0]}"], *words)
        for recipe in COMPILED_RECIPES
        for variant, words in COMPILED.items()
    }
    return eager | compiled


def train(name: str, words: tuple[str, ...], *, out: Path) -> None:
    """Train a run into `out`/`name`, unless it is done. Raises RunError if it fails."""
    folder, log = out / name, out / f"{name}.log"
    status = read_status(folder)
    if status is not None and status.state == "done":
        return
    logger.info(f"{name}: begins")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += ["-m", "torchtitan_lite.train", "--job.config_file=train_configs/float8_parity.toml"]
    with log.open("w") as stream:
        code = subprocess.run(
            [*command, f"--job.dump_folder={folder}", *words],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=stream,
            stderr=subprocess.STDOUT,
        ).returncode
    if code:
        raise RunError(f"{name} ended with exit code {code}: see {log}")
    logger.info(f"{name}: done")


def summarize(out: Path) -> str:
    """The final losses of all recipes and seeds as a table, and the largest distance of one to the
    first recipe's."""
    comparisons = [
        compare(read_runs([out / f"{recipe}-{seed}" for recipe in RECIPES]), last=LAST)
        for seed in SEEDS
    ]
    rows = [
        [recipe, *(f"{run['final loss']:.4f} ({run['to first']:+.2f} %)" for run in runs)]
        for recipe, *runs in zip(RECIPES, *comparisons, strict=True)
    ]
    farthest = max(itertools.chain(*comparisons), key=lambda run: abs(run["to first"]))
    headings = ["recipe", *(f"seed {seed}" for seed in SEEDS)]
    table = format_columns([headings, *rows], right=range(1, len(headings)), markdown=True)
    return f"{table}\n\nThe farthest from bf16 is {farthest['run']}: {farthest['to first']:+.2f} %."


def show(runs: Sequence[LoggedRun], picture: Path) -> str:
    """The table of `runs`, and a link to their curves, which it draws into `picture`."""
    draw(runs, picture, last=LAST)
    curves = f"![Curves of {runs[0].name} and others]({picture.name})"
    return f"{format_runs(runs, last=LAST, columns=COLUMNS)}\n\n{curves}"


def write_page(out: Path, page: Path) -> None:
    """Write the page about the runs in `out`, and its pictures."""
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    )
    text = PAGE.format(
        made=f"{time.strftime('%Y-%m-%d')}, with {device}, torch {version('torch')}, torchao {version('torchao')}",
        last=LAST,
        summary=summarize(out),
        first_seed=show(
            read_runs([out / f"{recipe}-{SEEDS[0]}" for recipe in RECIPES]),
            page.with_suffix(".png"),
        ),
        compiled="\n\n".join(
            show(
                read_runs([out / f"{recipe}-{part}" for part in (SEEDS[0], *COMPILED)]),
                page.with_name(f"{page.stem}_compiled_{recipe}.png"),
            )
            for recipe in COMPILED_RECIPES
        ),
    )
    page.write_text(text)


def main(argv: list[str]) -> None:
    """Train what is left to train, and write the page. Raises RunError."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return
    parser = argparse.ArgumentParser(prog="scripts/float8_parity.py", usage=__doc__, add_help=False)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/float8_parity")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/float8_parity.md")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(argv)
    if options.jobs < 1:
        raise ConfigError(f"--jobs {options.jobs} must be at least 1")
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda run: train(*run, out=out), list_runs().items()))
    write_page(out, options.page)


if __name__ == "__main__":
    init_logger()
    run_script(main)
