"""Runs of a tiny model one after the other in the same processes: `matrix_worker.py FOLDER RUNS`,
where RUNS is JSON, {"NAME": ["--OVERRIDE", ...], ...}.

Each trains matrix.toml, changed by its overrides, in FOLDER/NAME, and leaves an ended.txt there,
which is empty unless the run was refused. One that names another folder goes on from the checkpoint
there. Flavors are `debugmodel` and `blocks`, with the tokenizer's vocabulary, and `vocab-N`.
"""

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fault_worker import keep_environment
from torch._dynamo.callback import callback_handler

from torchtitan_lite.base.errors import RunError
from torchtitan_lite.base.logger import init_logger
from torchtitan_lite.catalog.flavors import FLAVORS, ModelArgs, RopeScaling
from torchtitan_lite.checkpoint.resume import find_resume
from torchtitan_lite.config import CommConfig, DebugConfig, load_config
from torchtitan_lite.config.job import Job
from torchtitan_lite.metrics import hardware
from torchtitan_lite.parallel.mesh import set_determinism
from torchtitan_lite.planner.prepare import prepare_job
from torchtitan_lite.run.process_group import end_process, init_distributed
from torchtitan_lite.run.watchdog import Watchdog
from torchtitan_lite.training.trainer import Trainer

CONFIG = Path(__file__).with_name("matrix.toml")
# A rank's share of each dimension is a multiple of 16, as float8 matmuls need it, of the first on 4
# ranks and of the others on 8.
SIZES = {"dim": 128, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 192}
FLAVORS["debugmodel"] = ModelArgs(**SIZES, vocab_size=0)
for size in (2256, 32000, 50257):
    wider = replace(FLAVORS["debugmodel"], n_kv_heads=8, ffn_dim=256, vocab_size=size)
    FLAVORS[f"vocab-{size}"] = wider
# Halves of each dimension are multiples of 128, as blocks of that size need it.
BLOCKS = {"dim": 256, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 256}
FLAVORS["blocks"] = ModelArgs(**BLOCKS, vocab_size=0)
# Like Llama 3.2 1B: the vocabulary is most of it, and RoPE scaling reaches its short sequences.
SCALING = RopeScaling(factor=32.0, original_max_position_embeddings=32)
FLAVORS["tied"] = ModelArgs(**SIZES, vocab_size=4096, tie_embeddings=True, rope_scaling=SCALING)


def train(arguments: list[str], *, device: torch.device, watchdog: Watchdog) -> str:
    """Train, on from the newest checkpoint if there is one. Returns why the run was refused; "" if
    it was not."""
    try:
        config = load_config(arguments, world_size=dist.get_world_size())
        folder = Path(config.job.dump_folder) / config.checkpoint.folder
        resume = find_resume(config.checkpoint, folder=folder)
        set_determinism(config.debug)
        job, tokenizer = prepare_job(config, device=device)
        trainer = Trainer(
            job, tokenizer, device=device, run_folder=None, resume=resume, watchdog=watchdog
        )
        trainer.train()
    except RunError as error:
        return str(error)
    return ""


def build_job(overrides: list[str], *, device: torch.device) -> Job:
    """Return the job of matrix.toml, changed by overrides."""
    words = ["--job.config_file", str(CONFIG), *overrides]
    config = load_config(words, world_size=dist.get_world_size())
    set_determinism(config.debug)
    return prepare_job(config, device=device)[0]


def tell_each(look: Callable[..., Any]) -> None:
    """Print as a line of JSON, by name, what `look` finds with the overrides of each run of the
    first argument, RUNS, on a device."""
    device = join()
    found = {}
    for name, overrides in json.loads(sys.argv[1]).items():
        found[name] = look(overrides, device=device)
        forget_compiled()
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    end_process(0)


def join() -> torch.device:
    """Join the other processes for several runs. Return this process's device."""
    set_determinism(DebugConfig(deterministic=True))  # before a run of its own sets a variable
    device = init_distributed(CommConfig())
    sys.addaudithook(keep_environment)
    return device


def forget_compiled() -> None:
    """Leave to the next run, of what this one compiled, only the cache on disk."""
    torch._dynamo.reset()
    callback_handler.clear()
    torch.compiler.config.cache_key_tag = ""
    gc.collect()


def main() -> None:
    init_logger()
    watchdog = Watchdog(report=print)
    device = join()
    hardware.measure_peak = lambda *_: 1.0  # the peak of float32, which no config gives
    folder, runs = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name, overrides in runs.items():
        run = folder / name
        run.mkdir(parents=True, exist_ok=True)
        arguments = ["--job.config_file", str(CONFIG), "--job.dump_folder", str(run), *overrides]
        ended = train(arguments, device=device, watchdog=watchdog)
        if dist.get_rank() == 0:
            (run / "ended.txt").write_text(ended)
        forget_compiled()
    end_process(0)


if __name__ == "__main__":
    main()
