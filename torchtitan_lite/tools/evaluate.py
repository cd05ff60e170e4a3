"""Evaluate a model: its mean loss, perplexity and bits per byte on held-out text.

The model runs as in the validations of its run, in the same precisions and with the same float8
linears, in one process and without torch.compile.
"""

import math
import os
import re
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import tomli_w
import torch

from torchtitan_lite.base.errors import ConfigError, DataError
from torchtitan_lite.base.jsonfile import parse_toml
from torchtitan_lite.base.logger import logger
from torchtitan_lite.catalog.run_files import WRITERS
from torchtitan_lite.checkpoint.folders import find_checkpoints, naming
from torchtitan_lite.checkpoint.hf_folder import HfReader, model_settings
from torchtitan_lite.checkpoint.manifest import NEW_RUN, TrainingProgress, read_manifest
from torchtitan_lite.config import Config, given_keys, load_config
from torchtitan_lite.config.job import Job
from torchtitan_lite.config.keys import show, show_key
from torchtitan_lite.data.corpus import build_corpora, build_validation_corpus, has_own_data
from torchtitan_lite.data.dataloader import ValidationBatches
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.float8.convert import update_scales
from torchtitan_lite.models.loss import IGNORED
from torchtitan_lite.parallel.alone import init_alone
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.planner.prepare import prepare_job
from torchtitan_lite.run.compiler_checks import check_compiler
from torchtitan_lite.training.build import build_checkpointer
from torchtitan_lite.training.model import build_microbatches, build_model
from torchtitan_lite.training.optim import build_optimizer

LONGEST_WINDOW = 2048
"""Of a Hugging Face model's text, in tokens, unless [training] seq_len is given."""
MOST_TOKENS = 1 << 18
"""Of a batch. The config of a checkpoint may ask for any number."""
ONE_PROCESS = {
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": -1,
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.context_parallel_degree": 1,
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.pipeline_parallel_schedule": "1F1B",
    "parallelism.enable_async_tensor_parallel": "false",
    "training.global_batch_size": -1,
    "training.enable_cpu_offload": "false",
    "compile.enable": "false",
    "activation_checkpoint.mode": "none",
    "checkpoint.enable": "true",
    "checkpoint.load_only": "true",
    "checkpoint.last_save_in_hf": "false",
    "checkpoint.initial_load_in_hf": "false",
    **{f"metrics.{writer.key}": "false" for writer in WRITERS},
    "validation.enable": "true",
}
"""Values of a run's config that an evaluation replaces."""


@dataclass(frozen=True)
class Evaluation:
    """A model's losses on a text."""

    loss: float
    """Mean over tokens, nat."""
    perplexity: float
    bits_per_byte: float
    """The loss of all tokens over the UTF-8 bytes of their text: comparable across tokenizers."""
    tokens: int
    bytes: int
    text: str
    """Names of the stores."""
    seq_len: int
    """Tokens of a window of the text, which is what a token sees at most."""


def evaluate(source: Path, *, data: str | None, overrides: Sequence[str]) -> Evaluation:
    """Evaluate the checkpoint or Hugging Face model in `source` on the run's own validation data,
    or on `data`, a text or token store. Raises RunError."""
    path, text, progress = read_source(source)
    forced = ONE_PROCESS | {"checkpoint.initial_load_path": path}
    if data is not None:
        forced |= {"validation.dataset_path": data, "validation.steps": -1}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config-of-the-checkpoint.toml"
        file.write_text(text)
        words = ["--job.config_file", str(file)]
        given = given_keys([*words, *overrides])
        for key in given & forced.keys():
            raise ConfigError(f"--{key} is {forced[key]} in an evaluation; leave it out.")
        if any(re.match("--job.config.file", word) for word in overrides):
            raise ConfigError("--job.config_file is the run's in an evaluation; leave it out.")
        words += [f"--{key}={value}" for key, value in forced.items()]
        config = load_config([*words, *overrides], world_size=1)
    check_data(config, path, given=given | forced.keys())

    check_compiler(os.environ, compiles=False, on_gpu=False)  # attention in documents compiles
    device = init_alone()
    job, tokenizer = prepare_job(config, device=device)
    # Float8 scales are of a microbatch: take those of the run, which are smaller in a pipeline.
    size = config.training.local_batch_size
    if parse_toml(text.encode()).get("parallelism", {}).get("pipeline_parallel_degree", 1) > 1:
        size = config.parallelism.pipeline_parallel_microbatch_size
    batches = build_validation_batches(job, tokenizer, microbatch_size=size, progress=progress)
    return measure(job, tokenizer, batches, device=device)


def read_source(source: Path) -> tuple[Path, str, TrainingProgress]:
    """Return the folder of the weights, the config of their run as TOML, and its progress."""
    if (source / "config.json").is_file():
        args = HfReader(source).args
        model = model_settings(args) | {"tokenizer_path": str(source)}
        training = {"seq_len": min(args.max_seq_len, LONGEST_WINDOW)}
        return source, tomli_w.dumps({"model": model, "training": training}), NEW_RUN
    step_dir = find_checkpoints(source)[-1]
    with naming(step_dir, fix="; name another step."):
        manifest = read_manifest(step_dir)
    return step_dir, manifest.config, manifest.progress


def check_data(config: Config, source: Path, *, given: Collection[str]) -> None:
    """Raise ConfigError for a text that neither the command line names, with the keys `given`, nor
    the run itself: a checkpoint outside its run folder may come from anyone."""
    if Path(config.job.dump_folder).resolve() in source.resolve().parents:
        return
    if has_own_data(config.validation):
        texts = {"validation.dataset_path": config.validation.dataset_path}
    else:
        names = [each.path for each in config.training.datasets]
        texts = {"training.dataset_path": config.training.dataset_path}
        texts |= {"training.datasets": ", ".join(names)}
    for key, text in texts.items():
        if text and key not in given:
            raise ConfigError(
                f"{show_key(key)} = {show(text)} is not read: only the config of {source} names "
                "it, and that is not in the folder of its run, [job] dump_folder = "
                f"{show(config.job.dump_folder)}; name it by --{key}, or another text by --data"
            )


def build_validation_batches(
    job: Job, tokenizer: Tokenizer, *, microbatch_size: int, progress: TrainingProgress
) -> ValidationBatches:
    """Build the batches that a validation of the run reads."""
    training, validation = job.config.training, job.config.validation
    shape = {"vocab_size": job.model_args.vocab_size, "seed": job.config.debug.seed}

    # Data of its own, or the windows that the run held out of its training data.
    if has_own_data(validation):
        corpus, samples = build_validation_corpus(
            training, validation, tokenizer, seq_len=training.seq_len, **shape
        )
    else:
        _, corpus, samples = build_corpora(
            training,
            validation,
            tokenizer,
            shares=job.dataset_shares,
            held_out_before=progress.held_out,
            **shape,
        )
        if progress.step and not any(map(progress.held_out, range(1, len(corpus.windows) + 1))):
            logger.warning(
                "the run held out no text, so it may have trained on this one; --data evaluates on "
                "another"
            )
    size = min(microbatch_size, samples, max(1, MOST_TOKENS // training.seq_len))
    return ValidationBatches(corpus, size, samples=samples, dp_rank=0, dp_degree=1)


def measure(
    job: Job, tokenizer: Tokenizer, batches: ValidationBatches, *, device: torch.device
) -> Evaluation:
    """Load the model and compute its loss. Raises DataError if that is not a finite number."""
    mesh = build_mesh(job.degrees, device_type=device.type)
    built = build_model(job, mesh, device=device)
    (model,) = built.stages
    optimizer = build_optimizer(model.parameters(), job.config.optimizer)  # has no state yet
    build_checkpointer(job, model, optimizer, mesh=mesh, device=device, resume=None)
    update_scales(model, job.config.float8)
    microbatches = build_microbatches(
        job, built, mesh, device=device, timed=lambda _: nullcontext()
    )

    tokens, n_bytes = batches.samples * job.config.training.seq_len, 0
    total = torch.zeros((), device=device)
    for each in batches:
        batch = each[0].to(device), each[1].to(device)
        total += microbatches.evaluate([batch], scale=1 / tokens)
        n_bytes += tokenizer.count_bytes(each[1][each[1] != IGNORED].tolist())
    loss = total.item()
    if not math.isfinite(loss):
        raise DataError(f"the loss is {loss}: the weights or the text have values that overflow")
    return Evaluation(
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=loss * tokens / math.log(2) / max(n_bytes, 1),
        tokens=tokens,
        bytes=n_bytes,
        text=", ".join(windows.name for windows in batches.corpus.windows),
        seq_len=job.config.training.seq_len,
    )


def format_evaluation(found: Evaluation) -> str:
    """Return the figures in a line."""
    figures = asdict(found)
    return (
        "loss {loss:.4f} nat per token, perplexity {perplexity:,.2f}, {bits_per_byte:.4f} bits per "
        "byte; {text}: {tokens:,} tokens in windows of {seq_len:,}, {bytes:,} bytes"
    ).format(**figures)
