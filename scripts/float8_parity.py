"""Compare the losses of float8 with bf16, and of compiled with eager runs.

python scripts/float8_parity.py [--out DIR] [--page FILE] [--jobs N]

Trains train_configs/float8_parity.toml with each recipe and seed, and two recipes compiled, each
run in a process of its own. Then writes the page docs/float8_parity.md. Runs that are done are not
repeated.
"""

import argparse
import itertools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import torch

from torchtitan_lite.base.errors import ConfigError, RunError
from torchtitan_lite.base.logger import init_logger, logger
from torchtitan_lite.base.tables import format_columns
from torchtitan_lite.base.terminal import run_script
from torchtitan_lite.run.run_folder import read_status
from torchtitan_lite.tools.comparison import compare, format_runs, read_runs

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
    "blockwise": (*FLOAT8, "--float8.recipe_name=blockwise"),
}
"""Overrides of each recipe; all are compared with the first."""
COMPILED_RECIPES = ("bf16", "tensorwise_all_gather")
COMPILE = ("--compile.enable", "--training.steps=100")
COMPILED = {
    "compile": COMPILE,
    "compile_op_ac": (*COMPILE, "--activation_checkpoint.mode=selective"),
    "compile_full_ac": (*COMPILE, "--activation_checkpoint.mode=full"),
}
"""Overrides of the compiled runs; each is compared with the first steps of the eager run."""
LAST = 20
"""A final loss is the mean of this many last steps."""
COLUMNS = ("run", "steps", "final loss", "to first", "loss at most off", "grad norm at most off")
PAGE = """# Training parity

Does float8 train as well as bf16, and a compiled run as well as an eager one? A model of 4 layers
and dim 256 is trained on the default corpus by
[float8_parity.toml](../train_configs/float8_parity.toml), each run in one process.
`tensorwise_all_gather` casts weights as for FSDP's float8 all-gather, although one process gathers
nothing. This page was written by

    python scripts/float8_parity.py

on {made}.

## Recipes

Mean loss of the last {last} steps, and its difference from bf16 with the same seed. The seed
determines the weights and the order of the data: the bf16 row shows what the seed alone changes.

{summary}

{first_seed}

`torchtitan-lite compare` prints such a table of any runs. On a CPU float8 is emulated, and these
runs shared the machine with others, so their speeds cannot be compared.

## Compiled runs

The first steps of the same schedule with torch.compile: without activation checkpointing, with the
"op" policy, and with full recomputation, beside the eager run. Compiled code rounds in fewer
places, and training amplifies each difference: the loss and gradient norm of a single step drift,
the mean of the losses hardly does.

{compiled}
"""


def list_runs() -> dict[str, tuple[str, ...]]:
    """Overrides of every run by its name."""
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
    """Train a run in the folder `out`/`name`, unless it is done. Raises RunError if it fails."""
    folder, log = out / name, out / f"{name}.log"
    status = read_status(folder)
    if status is not None and status.state == "done":
        return

    logger.info(f"{name}: starts")
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
    """Return a table of the final losses of all recipes and seeds, and the largest difference from
    the first recipe."""
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


def write_page(out: Path, page: Path) -> None:
    """Write the page about the runs in `out`."""

    def table(names: list[str]) -> str:
        return format_runs(read_runs([out / name for name in names]), last=LAST, columns=COLUMNS)

    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    )

    # The device and versions, then the tables and pictures of each part.
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchao"))
    text = PAGE.format(
        made=f"{time.strftime('%Y-%m-%d')}, with {device}, {versions}",
        last=LAST,
        summary=summarize(out),
        first_seed=table([f"{recipe}-{SEEDS[0]}" for recipe in RECIPES]),
        compiled="\n\n".join(
            table([f"{recipe}-{part}" for part in (SEEDS[0], *COMPILED)])
            for recipe in COMPILED_RECIPES
        ),
    )
    page.write_text(text)


def main(argv: list[str]) -> None:
    """Train the runs that are not done yet, and write the page. Raises RunError."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--out", type=Path, default=ROOT / "outputs/float8_parity", help="folder of the runs")
    option("--page", type=Path, default=ROOT / "docs/float8_parity.md", help="page to write")
    option("--jobs", type=int, default=2, help="runs at a time (default: 2)")
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
