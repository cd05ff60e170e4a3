"""The parts of waits.py that run whole trainings: launch to step 1, tokens/s, memory."""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import Figures, environment, measure_pairs, run_config, seconds_of, tell, tokens_a_step
from versus_torchtitan import SETTINGS, run_torchtitan

from torchtitan_lite.catalog.flavors import block_linear_shapes
from torchtitan_lite.config import load_config, resolve_model
from torchtitan_lite.data.tokenizer import build_tokenizer

PEER = "torchtitan 0.2.2"
DEBUG = (
    *("--job.config_file=train_configs/debug_model.toml", "--training.seq_len=256"),
    *("--training.local_batch_size=4", "--training.steps=15"),
)
SIZES: dict[str, tuple[str, ...]] = {
    "30M": ("--model.dim=512", "--model.n_layers=8", "--model.ffn_dim=1536"),
    "150M": ("--model.flavor=150M", "--model.vocab_size=2256", "--model.tie_embeddings=false"),
}
TITLES = {"tps": "tokens/s", "first_step_s": "launch to the end of step 1, s", "peak_mib": "MiB"}


def compare_runs(
    title: str,
    words: tuple[str, ...],
    *,
    python: str,
    pairs: int,
    processes: int = 2,
    warm: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield the figures of runs of both. With `warm`, their compilers' caches are kept."""
    config = load_config([*DEBUG, *words, *SETTINGS], world_size=processes)
    tokens = tokens_a_step(config, processes=processes)
    with TemporaryDirectory() as ours_cache, TemporaryDirectory() as their_cache:

        def ours() -> Figures:
            cache = {"TORCHINDUCTOR_CACHE_DIR": ours_cache} if warm else {}
            env = {"CUDA_VISIBLE_DEVICES": "", **cache}
            return Figures.of(run_config(config, processes=processes, env=env)[0], tokens=tokens)

        def theirs() -> Figures:
            cache = Path(their_cache) if warm else None
            run = run_torchtitan(
                config, python=python, processes=processes, shard_one=False, cache=cache
            )
            return Figures.of(run, tokens=tokens)

        if warm:
            ours(), theirs()
        one, other = measure_pairs(ours, theirs, pairs=pairs)
    for name, unit in TITLES.items():
        ours_values, their_values = ([getattr(run, name) for run in runs] for runs in (one, other))
        figure = {"name": f"{title}: {unit}", "peer": PEER}
        yield {**figure, "ours": ours_values, "theirs": their_values}


def measure(python: str) -> Iterator[dict[str, Any]]:
    """Yield the figures of a small model, eager and compiled, and of commands that end at once."""
    compiled = ("--compile.enable",)
    many = ("--training.steps=10", "--training.local_batch_size=1", "--training.seq_len=64")
    compare = partial(compare_runs, python=python)
    yield from compare("5.9M, eager", (), pairs=5)
    yield from compare("5.9M, compiled, empty cache", compiled, pairs=2)
    yield from compare("5.9M, compiled, kept cache", compiled, pairs=3, warm=True)
    yield from compare("5.9M, eager, 8 ranks", many, pairs=2, processes=8)

    def command(*words: str, of: str = sys.executable) -> float:
        run = partial(subprocess.run, [of, *words], capture_output=True, check=False)
        return seconds_of(lambda: run(env=environment(CUDA_VISIBLE_DEVICES="")))

    train = ("-m", "torchtitan_lite", "train")
    titan = ("-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "torchtitan.train")
    for name, word in (("a wrong value, s", "--training.steps=x"), ("--help, s", "--help")):
        theirs = titan if word != "--help" else titan[-2:]
        ours, others = measure_pairs(
            partial(command, *train, word), partial(command, *theirs, word, of=python), pairs=3
        )
        yield {"name": name, "peer": PEER, "ours": ours, "theirs": others}


def measure_sizes(python: str) -> Iterator[dict[str, Any]]:
    """Yield the figures of larger models, eager, and how far a step is from its matmuls."""
    for name, words in SIZES.items():
        steps = ("--training.steps=10", "--training.local_batch_size=2")
        for figure in compare_runs(name, (*words, *steps), python=python, pairs=2):
            if "launch" not in figure["name"]:
                yield figure
    for name, words in {"5.9M": (), **SIZES}.items():
        for recipe, dtype in (("bf16", torch.bfloat16), ("tensorwise, emulated", torch.float32)):
            yield measure_floor(f"{name}, {recipe}", words, dtype)


def measure_floor(name: str, words: tuple[str, ...], dtype: torch.dtype) -> dict[str, Any]:
    """Return the seconds of an eager step of one process, and those of its matmuls alone, in the
    type in which they run."""
    float8 = dtype == torch.float32
    short = ("--training.steps=6", "--training.local_batch_size=2", "--training.epochs=")
    flag = f"--float8.enable_float8_linear={str(float8).lower()}"
    config = load_config([*DEBUG, *words, *short, *SETTINGS, flag], world_size=1)
    records = run_config(config, processes=1, env={"CUDA_VISIBLE_DEVICES": ""})[1]

    args = resolve_model(config.model)
    vocab_size = args.vocab_size or build_tokenizer("").vocab_size
    matmuls = [(shape, dtype) for shape in block_linear_shapes(args).values()] * args.n_layers
    matmuls.append(((vocab_size, args.dim), torch.bfloat16))
    tokens = config.training.local_batch_size * config.training.seq_len
    torch.set_num_threads(1)

    def multiply() -> None:
        for (rows, columns), kind in matmuls:
            x, weight = (torch.ones(size, columns, dtype=kind) for size in (tokens, rows))
            y = x @ weight.t()
            torch.mm(y, weight), torch.mm(y.t(), x)

    floor = [seconds_of(multiply) for _ in range(4)][1:]
    ours = [record["step_time_s"] for record in records][-3:]
    return {
        "name": f"{name}: a step, s",
        "peer": "its matmuls alone",
        "ours": ours,
        "theirs": floor,
    }


if __name__ == "__main__":
    part, python = sys.argv[1:]
    tell({"launch": measure, "sizes": measure_sizes}[part](python))
