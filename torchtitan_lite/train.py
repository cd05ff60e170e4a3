"""The main job: join the other processes, open the run folder, train, and say how it ended.

torchrun starts it on every process: `torchrun -m torchtitan_lite.train --job.config_file FILE`.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # imports make many objects that stay; scanning them repeatedly is wasted time

import os
import shlex
import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from torchtitan_lite.build import prepare_job
from torchtitan_lite.checkpoint.folders import remove_drafts
from torchtitan_lite.checkpoint.manifest import CheckpointManifest, installed_versions
from torchtitan_lite.checkpoint.resume import find_resume
from torchtitan_lite.collectives import on_rank0
from torchtitan_lite.config import Config, format_help, load_config, shared_settings
from torchtitan_lite.errors import (
    STOPPED_EXIT_CODE,
    CheckpointError,
    ConfigError,
    DataError,
    NumericError,
    RunError,
)
from torchtitan_lite.failures import FailureReport, explain, is_within
from torchtitan_lite.files import hash_sources
from torchtitan_lite.job import Job
from torchtitan_lite.logger import init_logger, logger
from torchtitan_lite.metrics.figures import summary_lines
from torchtitan_lite.parallel.agreement import check_started_alike
from torchtitan_lite.parallel.distributed import end_process, init_distributed, read_rank
from torchtitan_lite.parallel.signals import StopSignal
from torchtitan_lite.parallel.watchdog import Watchdog
from torchtitan_lite.run_folder import RunFolder, open_run_folder, read_status
from torchtitan_lite.trainer import Trainer

FINAL_EXIT_CODES = {
    STOPPED_EXIT_CODE,
    *(error.exit_code for error in (ConfigError, DataError, CheckpointError, NumericError)),
}
"""Exit codes after which a restart by torchrun's --max-restarts ends at once: it would fail again,
or the user stopped the run."""


def run(config: Config) -> int:
    """Train as `config` says, on this process. Return the exit code."""
    rank: int | None
    rank, world_size = read_rank()
    failure = FailureReport(Path(config.job.dump_folder))
    watchdog = Watchdog(
        rank=rank,
        world_size=world_size,
        stop_signal=StopSignal(),
        report=lambda cause: failure.write(cause, step=watchdog.step),
        timeout_s=config.comm.init_timeout_seconds,
    )
    try:
        stopped_by = join_and_train(config, watchdog, failure)
    except Exception as caught:
        error = explain(caught, folder=failure.folder, watchdog=watchdog)
        if error is None:
            cause, exit_code = f"{type(caught).__name__}: {caught}", 1
        else:
            cause, exit_code, rank = str(error), error.exit_code, error.rank
        failure.write(cause, step=watchdog.step, exit_code=exit_code, rank=rank)
        watchdog.fail(cause)
        if error is None or error is caught:
            raise
        raise error from caught

    dist.barrier()
    watchdog.close()
    dist.destroy_process_group()
    return STOPPED_EXIT_CODE if stopped_by else 0


def join_and_train(config: Config, watchdog: Watchdog, failure: FailureReport) -> str | None:
    """Join the other processes and train. Return the signal that stopped the run, if one did."""
    # Join the other processes, which must have been started alike.
    check_started_alike(start_facts(config), timeout_s=config.comm.init_timeout_seconds)
    device = init_distributed(config.comm)

    # Lock the run folder, and find the checkpoint to continue from.
    run_folder, resume = open_folder(config)
    failure.begin()
    logger.info(f"run folder: {failure.folder}")

    # Derive the job: from here on it is the only truth about the run.
    job, tokenizer = prepare_job(config, device=device)
    on_rank0(partial(write_config, run_folder, job))
    if config.job.description:
        logger.info(config.job.description)
    if config.job.print_config:
        logger.info(f"config:\n{job.to_toml()}")

    trainer = Trainer(
        job, tokenizer, device=device, run_folder=run_folder, resume=resume, watchdog=watchdog
    )
    stopped_by = trainer.train()
    finish(trainer, run_folder, stopped_by=stopped_by)
    return stopped_by


def write_config(run_folder: RunFolder | None, job: Job) -> None:
    """Write the resolved config into the run folder. Rank 0 only."""
    assert run_folder is not None, "rank 0 has opened it"
    run_folder.write_config(job.to_toml())


def start_facts(config: Config) -> dict[str, str]:
    """Return the facts that must be the same on all ranks: config, versions and our sources."""
    versions = {name: text for name, text in installed_versions().items() if name != "python"}
    sources = hash_sources(Path(__file__).parent)
    return {
        **shared_settings(config),
        **versions,
        "sources of torchtitan_lite (SHA-256)": sources[:16],
    }


def open_folder(config: Config) -> tuple[RunFolder | None, CheckpointManifest | None]:
    """Lock the run folder, and move an earlier run aside if nothing is resumed. A collective call.

    Returns the folder, on rank 0 only, and the manifest of the checkpoint to resume from, on all
    ranks. Raises ConfigError, without changing anything, if the folder holds files of no run.
    """
    path, checkpoint = Path(config.job.dump_folder), config.checkpoint
    folder: RunFolder | None = None

    def lock() -> bool:
        nonlocal folder
        folder = open_run_folder(path)
        earlier = folder.earlier_attempt()
        if earlier is not None and earlier.exit_code in FINAL_EXIT_CODES:
            error = RunError(earlier.cause)
            error.exit_code = earlier.exit_code
            raise error
        return earlier is not None

    def begin() -> None:
        assert folder is not None, "rank 0 has locked it"
        initial = checkpoint.initial_load_path
        if resume is None and initial is not None and is_within(path / checkpoint.folder, initial):
            raise ConfigError(
                f'[checkpoint] initial_load_path = "{initial}" is in [job] dump_folder = "{path}", '
                "whose checkpoints move to previous/ when a new run starts; "
                "name another dump_folder."
            )
        if checkpoint.enable and read_status(path) is not None:
            # Drafts of a killed save in a linked folder would stop the move to previous/.
            remove_drafts(path / checkpoint.folder)
        resumed_config = None if resume is None else resume.config
        folder.begin(resumed_config=resumed_config, entries=run_entries(config))

    # After a restart by torchrun, load_step has been obeyed by the first attempt.
    if on_rank0(lock):
        checkpoint = checkpoint.model_copy(update={"load_step": -1})
    try:
        resume = find_resume(checkpoint, folder=path / checkpoint.folder)
        on_rank0(begin)
    except RunError as error:
        if folder is not None:
            folder.refuse(cause=str(error), exit_code=error.exit_code)
            folder.close()
        raise
    return folder, resume


def run_entries(config: Config) -> list[str]:
    """Return the names of the files and folders that this run writes in its run folder."""
    return [
        "metrics.jsonl",
        "numerics.jsonl",
        "peaks.json",
        "wandb",
        config.checkpoint.folder,
        config.metrics.save_tb_folder,
        config.profiling.save_traces_folder,
        config.profiling.save_memory_snapshot_folder,
    ]


def finish(trainer: Trainer, run_folder: RunFolder | None, *, stopped_by: str | None) -> None:
    """Log how the run went, and write into status.json how it ended.

    Raises the error of the last save if it failed.
    """
    if run_folder is not None:
        log_outcome(trainer, stopped_by=stopped_by)
    if trainer.checkpointer.last_failure is not None:
        raise trainer.checkpointer.last_failure
    if run_folder is not None:
        if stopped_by is None:
            run_folder.done()
        else:
            run_folder.stopped(cause=f"stopped by {stopped_by} after step {trainer.step}")


def log_outcome(trainer: Trainer, *, stopped_by: str | None) -> None:
    """Log the summary, the epochs, and where to look next."""
    config, batches = trainer.config, trainer.parts.batches
    if (summary := trainer.metrics.summary()) is not None:
        entropy = None
        try:
            entropy = batches.corpus.unigram_entropy()
        except DataError as damage:  # in a part of the data that no step has read
            logger.warning(f"the unigram entropy is not known: {damage}")
        for line in summary_lines(summary, unigram_entropy=entropy):
            logger.info(line)

    passes = batches.corpus.epochs(batches.samples(trainer.step))
    logger.info(f"epochs: {', '.join(f'{name} {count:.4g}' for name, count in passes.items())}")
    if stopped_by is None and batches.left_over is not None:
        epochs = config.training.epochs
        logger.info(f"{epochs:g} epochs done: the data ended the run at step {trainer.step}")
    if config.metrics.enable_tensorboard:
        curves = trainer.job.folder / config.metrics.save_tb_folder
        command = shlex.join([sys.executable, "-m", "tensorboard.main", "--logdir", str(curves)])
        logger.info(f"curves: {command}")
    logger.info(f"run folder: {trainer.job.folder}")


@record
def main() -> None:
    """Train as the command line says. A RunError is printed without a traceback."""
    init_logger()
    if {"-h", "--help"} & set(sys.argv):
        print(format_help())
        return
    try:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        exit_code = run(load_config(sys.argv[1:], world_size=world_size))
    except RunError as error:
        logger.info(
            f"error:\n{error}"
        )  # at info level, printed by LOG_RANK's ranks: most have the same
        exit_code = error.exit_code
    end_process(exit_code)


if __name__ == "__main__":
    gc.freeze()  # later collections scan only objects made after the imports
    gc.enable()
    main()
