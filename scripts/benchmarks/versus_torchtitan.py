"""Compare with torchtitan 0.2.2 on a CPU: speed, time to the first step, memory.

python scripts/benchmarks/versus_torchtitan.py --python ENV/bin/python --job.config_file X.toml ...

Runs of both take turns. README.md beside this file says how to make the environment, what is the
same in both, and what is not. All other options are overrides of the config, as in training.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    ALIKE,
    Figures,
    Watched,
    check_values,
    describe_machine,
    environment,
    format_comparison,
    measure_pairs,
    run_config,
    tokens_a_step,
    torchrun,
    watch,
)

from torchtitan_lite.base.errors import ConfigError, RunError
from torchtitan_lite.base.terminal import run_script
from torchtitan_lite.catalog.flavors import RopeScaling
from torchtitan_lite.config import Config, load_config, resolve_model
from torchtitan_lite.data.tokenizer import build_tokenizer

ADAPTER = Path(__file__).with_name("torchtitan_cpu.py")
PARAMETERS = r"([\d,]+) (?:total )?parameters"
"""Number of parameters in either log."""
THEIRS = {
    **ALIKE,
    "float8.enable_float8_linear": (False,),
    "training.document_mask": (False,),
}
"""Values, by key, that torchtitan implements on a CPU."""
SETTINGS = (
    *("--metrics.log_freq=1", "--metrics.enable_tensorboard", "--training.epochs="),
    *("--float8.enable_float8_linear=false", "--checkpoint.enable=false"),
    "--validation.enable=false",
)
SAME = {
    "training": (
        *("local_batch_size", "global_batch_size", "seq_len", "max_norm", "steps", "gc_freq"),
        *("mixed_precision_param", "mixed_precision_reduce"),
    ),
    "optimizer": ("name", "lr", "beta1", "beta2", "eps", "weight_decay", "implementation"),
    "lr_scheduler": (
        *("warmup_steps", "total_steps", "decay_ratio", "decay_type", "min_lr_factor"),
    ),
    "parallelism": ("fsdp_reshard_after_forward",),
    "activation_checkpoint": ("mode", "selective_ac_option"),
}
"""Keys, by table, that torchtitan gets from the config."""


def torchtitan_dimensions(config: Config) -> dict[str, Any]:
    """Return torchtitan's model arguments for the model of `config`. torchtitan derives the width
    of the feed-forward from a number of which it is a multiple. Raises ConfigError for a model with
    tied embeddings."""
    args = resolve_model(config.model)
    if args.tie_embeddings:
        raise ConfigError(
            "[model] tie_embeddings = true is not implemented in torchtitan 0.2.2; set it to false"
        )
    scaling = asdict(args.rope_scaling or RopeScaling(factor=1.0))
    names = ("dim", "n_layers", "n_heads", "n_kv_heads", "norm_eps", "rope_theta")
    return {name: getattr(args, name) for name in names} | {
        "multiple_of": args.ffn_dim,
        "vocab_size": args.vocab_size or build_tokenizer(config.model.tokenizer_path).vocab_size,
        "rope_scaling_args": {"scaling_factor": scaling.pop("factor"), **scaling},
    }


def torchtitan_options(config: Config) -> list[str]:
    """Return torchtitan's command line for `config`, with a line of log and curves every step."""
    values = {
        f"{table}.{key}": getattr(getattr(config, table), key)
        for table, keys in SAME.items()
        for key in keys
    }
    options = [f"--{name}={value}" for name, value in values.items() if value is not None]
    if config.compile.enable:
        components = ",".join(config.compile.components)
        options += ["--compile.enable", f"--compile.components={components}"]
    metrics = ("log_freq=1", "enable_tensorboard", "disable_color_printing")
    return [*options, *(f"--metrics.{setting}" for setting in metrics)]


def run_torchtitan(
    config: Config, *, python: str, processes: int, shard_one: bool, cache: Path | None = None
) -> Watched:
    """Train the model of `config` with torchtitan in a new folder, with an empty cache of the
    compiler, or with `cache`."""
    dimensions = json.dumps(torchtitan_dimensions(config))
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        words = [str(ADAPTER), dimensions, *["--shard-one"] * shard_one]
        words += [*torchtitan_options(config), f"--job.dump_folder={folder}/run"]
        compiled = str(cache or f"{folder}/compiled")
        env = environment(TORCHINDUCTOR_CACHE_DIR=compiled, CUDA_VISIBLE_DEVICES="")
        env.pop("PYTHONPATH", None)  # it is for this Python
        return watch(torchrun(words, processes=processes, python=python), env=env)


def compare(
    run_ours: Callable[[], Watched], run_theirs: Callable[[], Watched], *, tokens: int, pairs: int
) -> None:
    """Run both in pairs, after one run of each that is not counted, and print a table. Raises
    RunError if the models have different numbers of parameters."""
    counts = [int(run().find(PARAMETERS).replace(",", "")) for run in (run_ours, run_theirs)]
    if counts[0] != counts[1]:
        raise RunError(f"{counts[0]:,} parameters here, but {counts[1]:,} in torchtitan")

    def measure(run: Callable[[], Watched]) -> Figures:
        figures = Figures.of(run(), tokens=tokens)
        print(figures, flush=True)
        return figures

    ours, theirs = measure_pairs(
        partial(measure, run_ours), partial(measure, run_theirs), pairs=pairs
    )
    print(f"{counts[0]:,} parameters\n{format_comparison(ours, 'torchtitan', theirs)}")


def main(argv: list[str]) -> None:
    """Compare and print. Raises RunError."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--python", required=True, help="Python that has torchtitan 0.2.2")
    option("--processes", type=int, default=2, help="of each run (default: 2)")
    option("--pairs", type=int, default=3, help="of runs, at least 2 (default: 3)")
    option(
        "--shard-one",
        action="store_true",
        help="use FSDP2 on one process too, where torchtitan by itself trains under autocast",
    )
    options, overrides = parser.parse_known_args(argv)
    if shutil.which(options.python) is None:
        raise ConfigError(f"--python {options.python} cannot be run; name one with torchtitan.")
    if options.pairs < 2:
        raise ConfigError(f"--pairs {options.pairs} must be at least 2")

    processes = options.processes
    config = load_config([*overrides, *SETTINGS], world_size=processes)
    check_values(config, THEIRS, other="torchtitan on CPU")
    print(describe_machine())
    compare(
        lambda: run_config(config, processes=processes, env={"CUDA_VISIBLE_DEVICES": ""})[0],
        lambda: run_torchtitan(
            config, python=options.python, processes=processes, shard_one=options.shard_one
        ),
        tokens=tokens_a_step(config, processes=processes),
        pairs=options.pairs,
    )


if __name__ == "__main__":
    run_script(main)
