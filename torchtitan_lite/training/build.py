"""Build each part of a run from its job: batches, model and checkpointer, metrics."""

import inspect
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo import on_compile_end, on_compile_start
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.base.collectives import on_all_ranks
from torchtitan_lite.base.errors import CheckpointError, ConfigError
from torchtitan_lite.base.logger import logger
from torchtitan_lite.base.outside import check_outside, load_object
from torchtitan_lite.base.paths import open_path
from torchtitan_lite.checkpoint.checkpointer import Checkpointer
from torchtitan_lite.checkpoint.manifest import CheckpointManifest, TrainingProgress, check_model
from torchtitan_lite.checkpoint.resume import Resume
from torchtitan_lite.config.job import Job
from torchtitan_lite.config.keys import config_changes
from torchtitan_lite.data.corpus import (
    build_corpora,
    check_same_data,
    log_data,
    open_validation,
)
from torchtitan_lite.data.dataloader import (
    Batches,
    OutsideBatches,
    TrainingBatches,
    ValidationBatches,
)
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.float8.convert import has_float8_units, update_scales
from torchtitan_lite.metrics.base_writer import Writer, WrittenRun
from torchtitan_lite.metrics.flops import FlopsLedger
from torchtitan_lite.metrics.hardware import find_peaks
from torchtitan_lite.metrics.processor import MetricsProcessor
from torchtitan_lite.metrics.writers import build_writers

from .model import BuiltModel, build_model
from .optim import build_optimizer, parameter_groups

# ----- Data and checkpoints -----


def check_resume(resume: Resume, job: Job) -> None:
    """Raise CheckpointError for a checkpoint of another model, or with an optimizer's state that
    this run's does not have. Log the config's changes since."""
    saved = resume.manifest
    check_model(saved.model, asdict(job.model_args), path=resume.path)
    before = saved.tables.get("optimizer", {}).get("name", "AdamW")
    name = job.config.optimizer.name
    if before != name and not {before, name} <= {"AdamW", "Adam"} and not resume.new_moments:
        raise CheckpointError(
            f'[optimizer] name = "{name}": {resume.path} has the state of "{before}"; set name to '
            f'"{before}", or for a new state [checkpoint] exclude_from_loading = ["optimizer"], or '
            "name another [job] dump_folder."
        )
    for change in config_changes(saved.config, job.config.to_toml()):
        logger.info(f"since step {saved.progress.step}: {change}")


def build_batches(
    job: Job, tokenizer: Tokenizer, *, dp_rank: int, progress: TrainingProgress
) -> tuple[Batches, ValidationBatches | None]:
    """Build a data-parallel rank's training batches after `progress`, and its validation batches.

    Raises DataError if the data has changed or differs between ranks."""
    training, validation = job.config.training, job.config.validation
    shape = {"vocab_size": job.model_args.vocab_size, "seed": job.config.debug.seed}
    place: dict[str, Any] = {
        "sizes": job.batch,
        "dp_rank": dp_rank,
        "dp_degree": job.degrees.dp,
        "steps": training.steps,
        "first_step": progress.step + 1,
        "first_sample": progress.samples,
    }
    batches: Batches
    if training.has_outside_data:
        batches = build_outside_batches(job, tokenizer, **place)
        if validation.enable:
            validation_corpus, validated = open_validation(training, validation, tokenizer, **shape)
    else:
        corpus, validation_corpus, validated = build_corpora(
            training,
            validation,
            tokenizer,
            shares=job.dataset_shares,
            held_out_before=progress.held_out,
            **shape,
        )
        batches = TrainingBatches(corpus=corpus, epochs=training.epochs, **place)
        log_data(batches, training)

    if progress.data:
        check_same_data(
            progress.data,
            batches.identity(),
            step=progress.step,
            samples=progress.samples,
            allow_change=training.allow_data_change,
        )
    if not validation.enable:
        return batches, None

    size = validation.local_batch_size if job.degrees.pp == 1 else None  # stages know one shape
    return batches, ValidationBatches(
        validation_corpus,
        local_batch_size=size or job.batch.local_batch_size,
        samples=validated,
        dp_rank=dp_rank,
        dp_degree=job.degrees.dp,
    )


def build_outside_batches(job: Job, tokenizer: Tokenizer, **place: Any) -> OutsideBatches:
    """Build the batches of the function that [training] dataset names. Raises ConfigError if it
    could not go on after a checkpoint."""
    name, saves = job.config.training.dataset, job.config.checkpoint.enable
    make = load_object("[training] dataset", name)
    arguments = {each: place[each] for each in ("dp_rank", "dp_degree", "first_sample")}
    if "first_sample" not in inspect.signature(make).parameters:
        if saves:
            raise ConfigError(
                f'[training] dataset = "{name}" takes no first_sample, so that a resumed run would '
                "train on the same data again; add that argument, or set [checkpoint] enable = "
                "false"
            )
        del arguments["first_sample"]
    made = make(job, tokenizer, **arguments)
    check_outside("[training] dataset", name, isinstance(made, Iterable), "must return an iterator")
    return OutsideBatches(
        name=name,
        batches=made,
        seq_len=job.config.training.seq_len,
        vocab_size=job.model_args.vocab_size,
        **place,
    )


def build_loaded_model(
    job: Job, mesh: DeviceMesh, *, device: torch.device, resume: Resume | None
) -> tuple[BuiltModel, torch.optim.Optimizer, Checkpointer]:
    """Build the model, its optimizer and their Checkpointer. Load the checkpoint `resume` or, in a
    new run, initial weights, if any; compute the float8 scales of the weights. Collective."""
    config, settings = job.config, job.config.checkpoint
    built = build_model(job, mesh, device=device)
    groups = parameter_groups(built.model.named_parameters(), config.optimizer)
    optimizer = build_optimizer(groups, config.optimizer, mesh=mesh, backend=config.compile.backend)
    manifest = CheckpointManifest(
        world_size=job.degrees.world_size,
        mesh=asdict(job.degrees),
        model=asdict(job.model_args),
        config=job.config.to_toml(),
    )
    checkpointer = Checkpointer(
        built.model,
        optimizer,
        settings,
        folder=settings.within(job.folder),
        device=device,
        manifest=manifest,
        stages=mesh["pp"].get_group(),
    )

    # initial_load_path is only for a new run: a resumed run has its weights already.
    initial = settings.initial_load_path
    if initial is None and settings.initial_load_in_hf:
        initial = config.model.tokenizer_path
    if resume is not None:
        checkpointer.load(resume)
    elif initial is not None:
        checkpointer.load_weights(open_path(initial), job.model_args)
    update_scales(built.model, config.float8)
    return built, optimizer, checkpointer


# ----- Metrics -----


def build_metrics(
    job: Job,
    ledger: FlopsLedger,
    mesh: DeviceMesh,
    *,
    device: torch.device,
    last_step: int,
    progress: TrainingProgress,
) -> MetricsProcessor:
    """Build the metrics of a run that continues after `progress`."""
    # Find the peak of each precision in use. On a float8 GPU find both, to compare runs. On CPU all
    # ranks measure theirs at the same time.
    dist.barrier()
    config = job.config
    precisions = {precision for precision, count in ledger.by_precision.items() if count}
    if has_float8_units(device):
        precisions |= {"bf16", "fp8"}
    logger.info(peaks := find_peaks(device, config.metrics, precisions=precisions))

    # If a rank cannot open its files, all ranks end.
    run = WrittenRun(
        folder=job.folder,
        rank=dist.get_rank(),
        total_steps=last_step,
        resume_step=progress.step,
        config_toml=job.config.to_toml(),
    )
    writers: list[Writer] = []
    on_all_ranks(lambda: writers.extend(build_writers(config.metrics, run)))
    stage_times = None
    if job.degrees.pp > 1:
        from torchtitan_lite.metrics.stage_times import StageTimes  # of pipelines only

        stage_times = StageTimes(
            [job.rank_stages(rank) for rank in range(job.degrees.pp)],
            pipeline_rank=mesh["pp"].get_local_rank(),
            flops=[ledger.count(names) for names in job.stages],
        )
    metrics = MetricsProcessor(
        log_freq=config.metrics.log_freq,
        ledger=ledger,
        peaks=peaks,
        device=device,
        n_devices=job.degrees.world_size,
        seq_len=config.training.seq_len,
        writers=writers,
        start_tokens=progress.tokens,
        stage_times=stage_times,
    )
    if config.compile.enable:
        logger.info("the first step compiles the model, which may take minutes")
        compiling = ExitStack()
        on_compile_start(lambda _: compiling.enter_context(metrics.timed("compile")))
        on_compile_end(lambda _: compiling.close())
    return metrics
