"""Build a run's parts from its job, in order: mesh, data, model, optimizer, checkpoint, metrics."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo import on_compile_end, on_compile_start
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.build_model import build_model, rates_of
from torchtitan_lite.checkpoint.checkpointer import Checkpointer
from torchtitan_lite.checkpoint.compare import check_model, config_changes
from torchtitan_lite.checkpoint.manifest import NEW_RUN, CheckpointManifest, TrainingProgress
from torchtitan_lite.collectives import on_all_ranks, on_rank0
from torchtitan_lite.config import CheckpointConfig, Config, LRSchedulerConfig, check_decay
from torchtitan_lite.data.corpus import build_corpora, check_same_data, log_data
from torchtitan_lite.data.dataloader import TrainingBatches, ValidationBatches
from torchtitan_lite.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.float8.convert import (
    build_scale_hook,
    has_float8_units,
    is_float8,
)
from torchtitan_lite.float8.numerics import NumericsMonitor
from torchtitan_lite.float8.observe import Asked
from torchtitan_lite.job import Job, build_job
from torchtitan_lite.logger import logger
from torchtitan_lite.metrics.figures import Writer
from torchtitan_lite.metrics.flops import FlopsLedger
from torchtitan_lite.metrics.hardware import host_memory_gib, resolve_peaks, total_memory_gib
from torchtitan_lite.metrics.processor import MetricsProcessor
from torchtitan_lite.metrics.writers import build_writers
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.models.loss import CrossEntropy
from torchtitan_lite.optim import UpdateGuard, build_optimizer
from torchtitan_lite.parallel.distributed import build_mesh, local_world_size
from torchtitan_lite.planner.meta_model import (
    resolve_auto,
)


def prepare_job(config: Config, *, device: torch.device) -> tuple[Job, Tokenizer]:
    """Derive the job, with "auto" values chosen for this device, and its tokenizer.

    A collective call. Raises ConfigError or DataError.
    """
    tokenizer = build_tokenizer(config.model.tokenizer_path)
    job = build_job(config, world_size=dist.get_world_size(), tokenizer=tokenizer.values)

    # The rank with the least memory decides for all.
    memory_gib = on_all_ranks(
        lambda: total_memory_gib(device) or host_memory_gib() / local_world_size()
    )
    job = resolve_auto(
        job,
        memory_gib=min(memory_gib),
        rates=rates_of(device, config),
        on_cpu=device.type == "cpu",
    )
    return job, tokenizer


@dataclass
class Parts:
    """What a Trainer needs, built and loaded."""

    progress: TrainingProgress
    """Where the run continues."""
    batches: TrainingBatches
    validation_batches: ValidationBatches | None
    model: Transformer
    cross_entropy: CrossEntropy
    fuses_output: bool
    """Whether the loss computes the output projection itself, one chunk of tokens at a time."""
    expected: Asked
    """Float8 operations that the first step must show."""
    optimizer: torch.optim.Optimizer
    scale_hook: Callable[[], None]
    """To be called after each change of the weights."""
    guard: UpdateGuard
    checkpointer: Checkpointer
    numerics: NumericsMonitor
    metrics: MetricsProcessor
    dp_group: dist.ProcessGroup
    """The data-parallel ranks, among which the loss is averaged."""


def build_parts(
    job: Job, tokenizer: Tokenizer, *, device: torch.device, resume: CheckpointManifest | None
) -> Parts:
    """Build every part of `job` and load the checkpoint. A collective call.

    `resume` is the manifest of the checkpoint to continue from; None for a new run.
    """
    config, degrees = job.config, job.degrees
    logger.info(f"{job.layout()}, on {device.type}")
    mesh = build_mesh(degrees, device_type=device.type)
    dp_mesh = mesh["dp_replicate", "dp_shard"]._flatten("dp")  # ranks that train on other samples

    # Data, from the first sample that is not trained on yet.
    progress = accept_progress(resume, job)
    batches, validation_batches = build_batches(
        job, tokenizer, dp_rank=dp_mesh.get_local_rank(), progress=progress
    )

    # Model and optimizer.
    model, ledger, expected = build_model(job, mesh=mesh, device=device)
    optimizer = build_optimizer(model.parameters(), config.optimizer)
    scale_hook = build_scale_hook(model, float8=config.float8)

    # Checkpoint.
    checkpointer = build_checkpointer(
        job, model=model, optimizer=optimizer, mesh=mesh, device=device
    )
    load_state(checkpointer, config.checkpoint, resume=resume)
    scale_hook()  # for the weights just loaded

    gathers_logits = degrees.tp > 1 and config.parallelism.disable_loss_parallel
    return Parts(
        progress=progress,
        batches=batches,
        validation_batches=validation_batches,
        model=model,
        cross_entropy=CrossEntropy(compiled=config.compile.covers("loss")),
        fuses_output=not (gathers_logits or is_float8(model.output)),
        expected=expected,
        optimizer=optimizer,
        scale_hook=scale_hook,
        guard=build_guard(job, progress, device=device),
        checkpointer=checkpointer,
        numerics=NumericsMonitor(model, freq=config.float8.log_numerics_freq, device=device),
        metrics=build_metrics(
            job, ledger, device=device, total_steps=batches.last_step, progress=progress
        ),
        dp_group=dp_mesh.get_group(),
    )


def build_guard(job: Job, progress: TrainingProgress, *, device: torch.device) -> UpdateGuard:
    """Build the guard that skips updates, with the counts of the steps before."""
    training = job.config.training
    return UpdateGuard(
        training,
        device=torch.device("cpu") if training.enable_cpu_offload else device,
        skipped_steps=progress.skipped_steps,
        consecutive_skips=progress.consecutive_skips,
        loss_mean=progress.loss_mean,
    )


def accept_progress(resume: CheckpointManifest | None, job: Job) -> TrainingProgress:
    """Return the progress to continue from, and log the keys that have changed since.

    Raises CheckpointError for a checkpoint of another model.
    """
    if resume is None:
        return NEW_RUN
    check_model(resume.model, asdict(job.model_args), path=job.checkpoint_folder)
    for change in config_changes(resume.config, job.to_toml()):
        logger.info(f"since step {resume.progress.step}: {change}")
    return resume.progress


def build_batches(
    job: Job, tokenizer: Tokenizer, *, dp_rank: int, progress: TrainingProgress
) -> tuple[TrainingBatches, ValidationBatches | None]:
    """Build the batches of a data-parallel rank after `progress`, and those of its validation.

    Raises DataError for data that has changed, or that is not the same on all ranks, and
    ConfigError if the data ends the run within the schedule's warm-up or decay.
    """
    training, validation = job.config.training, job.config.validation
    corpus, validation_corpus = build_corpora(
        training,
        validation,
        tokenizer,
        shares=job.dataset_shares,
        vocab_size=job.model_args.vocab_size,
        seed=job.config.debug.seed,
        held_out_before=progress.held_out,
    )
    if progress.step:
        check_same_data(
            progress.data,
            corpus.identity(),
            step=progress.step,
            samples=progress.samples,
            allow_change=training.allow_data_change,
        )

    batches = TrainingBatches(
        corpus=corpus,
        sizes=job.batch,
        dp_rank=dp_rank,
        dp_degree=job.degrees.dp,
        steps=training.steps,
        epochs=training.epochs,
        first_step=progress.step + 1,
        first_sample=progress.samples,
    )
    for problem in check_decay(job.config.lr_scheduler, steps=batches.last_step):
        raise ConfigError(f"{problem}; [training] epochs = {training.epochs} end the run there.")
    log_short_warmup(job.config.lr_scheduler, steps=batches.last_step)
    log_data(batches, training)
    if not validation.enable:
        return batches, None
    return batches, ValidationBatches(
        validation_corpus,
        local_batch_size=training.local_batch_size,
        steps=validation.steps,
        dp_rank=dp_rank,
        dp_degree=job.degrees.dp,
    )


def log_short_warmup(schedule: LRSchedulerConfig, *, steps: int) -> None:
    """Log that the warm-up of a run of `steps` is shortened, if it is."""
    if (total := schedule.total_steps or steps) < schedule.warmup_steps:
        logger.info(
            f"[lr_scheduler] warmup_steps = {schedule.warmup_steps} is longer than the schedule of "
            f"{total} steps: the warm-up is shortened to {total}, and nothing follows it; set "
            "warmup_steps to less, or total_steps to the whole run's steps"
        )


def build_checkpointer(
    job: Job,
    *,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    device: torch.device,
) -> Checkpointer:
    """Build the Checkpointer of the run folder."""
    assert mesh.mesh_dim_names is not None, "build_mesh names its dimensions"
    return Checkpointer(
        model,
        optimizer,
        job.config.checkpoint,
        folder=job.checkpoint_folder,
        device=device,
        mesh=dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)),
        model_args=asdict(job.model_args),
        config_toml=job.to_toml(),
    )


def load_state(
    checkpointer: Checkpointer, checkpoint: CheckpointConfig, *, resume: CheckpointManifest | None
) -> None:
    """Load the checkpoint to continue from, or the weights to start with, if there are any."""
    initial = checkpoint.initial_load_path
    if resume is not None:
        if initial is not None:
            logger.info("[checkpoint] initial_load_path is ignored: this run resumes")
        checkpointer.load(resume)
    elif initial is not None:
        checkpointer.load_weights(Path(initial), hashes=checkpoint.verify_hashes)


def build_metrics(
    job: Job,
    ledger: FlopsLedger,
    *,
    device: torch.device,
    total_steps: int,
    progress: TrainingProgress,
) -> MetricsProcessor:
    """Build the metrics of a run that continues after `progress`. Only rank 0 writes.

    On CPU all ranks measure their peaks here, at the same time.
    """
    dist.barrier()
    config = job.config
    precisions = {precision for precision, count in ledger.by_precision.items() if count}
    if has_float8_units(device):
        precisions |= {"bf16", "fp8"}
    peaks = resolve_peaks(
        device, config.metrics, precisions=precisions, file=job.folder / "peaks.json"
    )
    logger.info(f"{peaks}")

    writers: list[Writer] = []
    on_rank0(
        lambda: writers.extend(
            build_writers(
                config.metrics,
                dump_folder=job.folder,
                total_steps=total_steps,
                resume_step=progress.step,
                config_toml=job.to_toml(),
                hparams=job.hparams(),
                numerics=config.float8.log_numerics_freq > 0,
            )
        )
    )
    metrics = MetricsProcessor(
        log_freq=config.metrics.log_freq,
        ledger=ledger,
        peaks=peaks,
        device=device,
        n_devices=job.degrees.world_size,
        writers=writers,
        start_tokens=progress.tokens,
    )
    if config.compile.enable:
        on_compile_start(lambda _: metrics.compile_began())
        on_compile_end(lambda _: metrics.compile_ended())
    return metrics
