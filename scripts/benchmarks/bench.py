"""Benchmark training on this machine: bf16 and float8, compiled and eager.

python scripts/benchmarks/bench.py [ROW ...] [--out FOLDER] [--table.key value ...]

Each row is a run of 12 steps in a process and a folder of its own. The table of `torchtitan-lite
compare` shows each row's tps over the first row's, its mfu and its memory. Without
--job.config_file, rows train 8B with 16 layers on a GPU, and the debug model on a CPU. Overrides
hold for all rows. Exit code 1 if no row is done; docs/performance.md has more.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from torchtitan_lite.base.errors import ConfigError, RunError, StorageError
from torchtitan_lite.base.files import storage_fix
from torchtitan_lite.base.logger import init_logger, logger
from torchtitan_lite.base.terminal import run_script
from torchtitan_lite.catalog.recipes import RECIPES
from torchtitan_lite.cli.parser import Parser
from torchtitan_lite.tools.comparison import format_runs, read_runs

TRAIN = ("-m", "torchtitan_lite.train")
"""What Python runs for a row."""
CONFIGS = {
    "CPU": ("--job.config_file=debug_model", "--training.local_batch_size=2"),
    "GPU": (
        "--job.config_file=llama3_8b",
        "--model.flavor=8B",
        "--model.n_layers=16",  # whose rows all fit 80 GB
        "--optimizer.state_dtype=bfloat16",
        "--activation_checkpoint.mode=selective",
    ),
}
"""What the rows train where the user names no config."""
SHORT = (
    "--training.steps=12",
    "--lr_scheduler.warmup_steps=2",
    "--metrics.enable_tensorboard=false",
    "--checkpoint.enable=false",
    "--validation.enable=false",
)
"""Overrides of all rows."""
EAGER_BF16 = (
    "--compile.enable=false",
    "--float8.enable_float8_linear=false",
    "--float8.enable_fsdp_float8_all_gather=false",
    "--float8.precompute_float8_dynamic_scale_for_fsdp=false",
)
EAGER = {"bf16": ()} | {
    recipe: ("--float8.enable_float8_linear=true", f"--float8.recipe_name={recipe}")
    for recipe in RECIPES
}
ROWS: dict[str, tuple[str, ...]] = {
    **EAGER,
    **{f"{name}_compiled": (*row, "--compile.enable=true") for name, row in EAGER.items()},
    "bf16_full_ac": ("--activation_checkpoint.mode=full",),
    "tensorwise_full_ac": (*EAGER["tensorwise"], "--activation_checkpoint.mode=full"),
}
"""Overrides of each row, after EAGER_BF16."""


def row_words(name: str, overrides: Sequence[str], *, on: str) -> list[str]:
    """Return the command line of a row's run on a "GPU" or a "CPU". The user's `overrides` may name
    another config; what the row is about comes last."""
    named = any(word.startswith("--job.config_file") for word in overrides)
    config = () if named else CONFIGS[on]
    return [*config, *SHORT, *overrides, *EAGER_BF16, *ROWS[name]]


def run_row(words: Sequence[str], folder: Path) -> int:
    """Train in a process of its own, in `folder`, with its log beside it. Return its exit code."""
    # It trains alone, in an environment as torchrun would set it.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    with folder.with_name(f"{folder.name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *TRAIN, *words, f"--job.dump_folder={folder}"],
            env=os.environ | alone,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the benchmark alone
        )
        try:
            return process.wait()
        finally:  # also ends what the run has started, such as the compiler's workers
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_rows(names: Sequence[str], overrides: Sequence[str], *, on: str, out: Path) -> list[Path]:
    """Run rows in folders of their names in `out`. Return the folders of those that are done.
    SIGTERM and SIGINT end the running row and the benchmark. Raises StorageError."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: KeyboardInterrupt
    done: list[Path] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in names:
            folder = out / name
            if code := run_row(row_words(name, overrides, on=on), folder):
                logger.warning(f"{name} failed with exit code {code}; its log is {folder}.log")
            else:
                logger.info(f"{name} is done")
                done.append(folder)
    except OSError as error:
        raise StorageError(f"--out {out}: {error}; {storage_fix(error)}.") from error
    return done


def main(argv: list[str]) -> None:
    """Run the rows, and print their table. Raises RunError."""
    parser = Parser(description=__doc__)
    parser.add_keys()
    names = f"rows to run, in this order (default: all): {', '.join(ROWS)}"
    parser.add_argument("rows", nargs="*", metavar="ROW", help=names)
    out = Path("outputs/bench")
    text = f"folder that gets a run folder and a log for each row (default: {out})"
    parser.add_argument("--out", type=Path, default=out, metavar="FOLDER", help=text)
    args = parser.parse(argv)
    rows = list(dict.fromkeys(args.rows)) or list(ROWS)
    if unknown := [name for name in rows if name not in ROWS]:
        raise ConfigError(f"{unknown[0]} is not a row; the rows are {', '.join(ROWS)}.")

    on = "GPU" if torch.cuda.is_available() else "CPU"
    done = run_rows(rows, args.overrides, on=on, out=args.out.absolute())
    if not done:
        raise RunError("no row is done")
    print(format_runs(read_runs(done), last=1))
    if on == "CPU":
        print("\nFloat8 is emulated on a CPU: its rows show that it runs, not what it gains.")


if __name__ == "__main__":
    init_logger()
    run_script(main)
