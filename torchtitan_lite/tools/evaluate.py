"""Evaluate a model on a text, as a validation of its run would: in one process, not compiled. Or on
the tasks of EleutherAI's lm-evaluation-harness, such as HellaSwag."""

import math
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomli_w
import torch

from torchtitan_lite.base.errors import ConfigError, DataError
from torchtitan_lite.base.paths import fetch
from torchtitan_lite.checkpoint.folders import find_checkpoints, naming
from torchtitan_lite.checkpoint.hf_export import export_hf
from torchtitan_lite.checkpoint.hf_folder import HfReader, model_settings
from torchtitan_lite.checkpoint.manifest import read_manifest
from torchtitan_lite.config import did_you_mean, load_config
from torchtitan_lite.data.corpus import build_validation_corpus, open_data
from torchtitan_lite.data.dataloader import ValidationBatches
from torchtitan_lite.models.loss import IGNORED
from torchtitan_lite.parallel.mesh import build_mesh, init_alone, set_determinism
from torchtitan_lite.planner.prepare import prepare_job
from torchtitan_lite.run.compiler_checks import check_compiler
from torchtitan_lite.training.build import build_loaded_model
from torchtitan_lite.training.model import build_microbatches

TABLES = ("model", "training", "float8", "debug")
"""Tables of the run's config that an evaluation uses."""


def evaluate(source: Path, *, data: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the mean loss of the model in `source` over the tokens of `data`, a text or token
    store, and figures that follow from it. Raises RunError."""
    for word in overrides:
        if word.startswith("--") and word[2:].split(".")[0] not in TABLES:
            raise ConfigError(f"{word} has no effect in an evaluation; leave it out.")

    # The job of a run that validates on all of the text, in one process.
    tables = read_source(source)
    tables["validation"] = {"enable": True, "dataset_path": data, "steps": -1}
    forced = ["--training.global_batch_size=-1", "--training.enable_cpu_offload=false"]
    with TemporaryDirectory() as folder:
        file = Path(folder, "config-of-the-checkpoint.toml")
        file.write_text(tomli_w.dumps(tables))
        config = load_config([f"--job.config_file={file}", *overrides, *forced], world_size=1)
    check_compiler(os.environ, compiles=False, on_gpu=False)  # attention in documents compiles
    set_determinism(config.debug)
    device = init_alone()
    job, tokenizer = prepare_job(config, device=device)

    # Its text and its model.
    training, seq_len = config.training, config.training.seq_len
    shape = {"vocab_size": job.model_args.vocab_size, "seed": 0}
    store = open_data("evaluate", data, training.text_field, tokenizer, key="--data")
    corpus, samples = build_validation_corpus(training, config.validation, store, **shape)
    fits = max(1, 2**18 // seq_len)  # the config of a checkpoint may ask for any batch size
    size = min(training.local_batch_size, samples, fits)
    batches = ValidationBatches(corpus, size, samples=samples, dp_rank=0, dp_degree=1)
    mesh = build_mesh(job.degrees, device_type=device.type)
    built, _, _ = build_loaded_model(job, mesh, device=device, resume=None)
    microbatches = build_microbatches(
        job, built, mesh, device=device, timed=lambda _: nullcontext()
    )

    # Its loss.
    loss, n_bytes, tokens = 0.0, 0, samples * seq_len
    for ids, labels in batches:
        batch = ids.to(device), labels.to(device)
        loss += microbatches.evaluate([batch], scale=1 / tokens).item()
        n_bytes += len(tokenizer.decode(labels[labels != IGNORED].tolist()).encode())
    if not math.isfinite(loss):
        raise DataError(f"the loss is {loss}: the weights or the text have values that overflow")
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": loss * tokens / math.log(2) / max(n_bytes, 1),
        "tokens": tokens,
        "bytes": n_bytes,
        "seq_len": seq_len,
    }


def read_source(source: Path) -> dict[str, Any]:
    """Return the tables of a config that loads the weights in `source` as its run trained them."""
    path, tables = source, {}
    if (source / "config.json").is_file():
        reader = HfReader(source)
        args = reader.args
        tables["model"] = model_settings(args) | {"tokenizer_path": str(reader.folder)}
        tables["training"] = {"seq_len": min(args.max_seq_len, 2048)}
    else:
        path = find_checkpoints(source)[-1]
        with naming(path, fix="; name another step."):
            saved = read_manifest(path).tables
        tables = {name: saved.get(name, {}) for name in TABLES}
        for key in ("dataset", "loss", "after_step"):  # the run's own code, which has no part here
            tables["training"].pop(key, None)
        # Float8 scales are of a microbatch.
        parallelism = saved.get("parallelism", {})
        if parallelism.get("pipeline_parallel_degree", 1) != 1:
            size = parallelism.get("pipeline_parallel_microbatch_size", 1)
            tables["training"]["local_batch_size"] = size
    loading = {"enable": True, "load_only": True, "initial_load_path": str(path)}
    return tables | {"checkpoint": loading}


def evaluate_tasks(
    source: Path, names: Sequence[str], *, include_path: Path | None, **options: Any
) -> tuple[dict[str, Any], str]:
    """Return the harness's results for the weights in `source`, and its table of them. transformers
    computes, in bfloat16 on a GPU, else in float32. `options` are the harness's `limit` and
    `num_fewshot`. Raises RunError."""
    try:
        import lm_eval.models.huggingface  # heavy, of the [eval] extra
        import lm_eval.tasks
    except ImportError as error:
        fix = 'pip install "torchtitan-lite[eval]"'
        raise ConfigError(f"--tasks needs the package {error.name}; {fix}") from error

    manager = lm_eval.tasks.TaskManager(include_path=include_path)
    for name in names:
        if name not in manager.all_tasks:
            near = did_you_mean(name, manager.all_tasks)
            raise ConfigError(f"--tasks {name} is not known to lm-evaluation-harness{near}")

    on_gpu = torch.cuda.is_available()
    options |= {"device": "cuda", "batch_size": "auto"} if on_gpu else {"device": "cpu"}
    bare = sys.__stderr__  # the stream of the commands would escape the bars' carriage returns
    with TemporaryDirectory() as scratch, redirect_stdout(bare), redirect_stderr(bare):
        folder = Path(scratch, "model")
        if (source / "config.json").is_file():
            folder = fetch(source)
        else:
            export_hf(find_checkpoints(source)[-1], folder)
        if not (folder / "tokenizer_config.json").is_file():
            fix = "add the tokenizer.json and tokenizer_config.json of its Hugging Face model"
            raise DataError(f"{source} has no tokenizer that transformers reads; export it, {fix}")
        weights = {"pretrained": str(folder), "dtype": "bfloat16" if on_gpu else "float32"}
        try:
            results = lm_eval.simple_evaluate("hf", weights, names, task_manager=manager, **options)
        except (ImportError, OSError, ValueError) as error:  # of a task or its dataset
            offline = "; a dataset that is in the cache needs HF_DATASETS_OFFLINE=1, not a network"
            fix = offline if isinstance(error, ConnectionError) else ""
            raise DataError(f"--tasks {' '.join(names)}: {error}{fix}") from error
    return results["results"], lm_eval.utils.make_table(results)
