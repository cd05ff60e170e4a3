"""Benchmark training on one device: rows of config overrides, each trained as a run of its own.

The table of the runs is the one of `torchtitan-lite compare`. docs/performance.md explains it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torchtitan_lite.base.errors import StorageError
from torchtitan_lite.base.files import storage_fix
from torchtitan_lite.base.logger import logger
from torchtitan_lite.catalog.recipes import RECIPES

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
