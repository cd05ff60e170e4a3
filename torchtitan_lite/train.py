"""The main job: joins the other processes, opens the run folder, trains, and says how it ended.
Started by torchrun on every process."""

import gc

if __name__ == "__main__":
    gc.disable()  # else it looks, again and again, at what the imports make, which is there to stay

import contextlib
import errno
import os
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from torchtitan_lite.checkpoint.folders import remove_drafts
from torchtitan_lite.checkpoint.manifest import CheckpointManifest, installed_versions
from torchtitan_lite.checkpoint.resume import find_resume
from torchtitan_lite.collectives import on_rank0
from torchtitan_lite.config import Config, dump_config, format_help, load_config, shared_settings
from torchtitan_lite.errors import (
    STOPPED_EXIT_CODE,
    CheckpointError,
    ConfigError,
    DataError,
    NumericError,
    RankLostError,
    RunError,
    StorageError,
)
from torchtitan_lite.files import DISK_FULL, hash_sources
from torchtitan_lite.logger import init_logger, logger
from torchtitan_lite.parallel.agreement import check_started_alike
from torchtitan_lite.parallel.distributed import end_process, init_distributed, read_rank
from torchtitan_lite.parallel.signals import StopSignal
from torchtitan_lite.parallel.watchdog import Watchdog, is_rank_loss
from torchtitan_lite.run_folder import (
    RunFolder,
    lock_inode,
    open_run_folder,
    read_status,
    report_failure,
)
from torchtitan_lite.trainer import Trainer

NOT_TRIED_AGAIN = {
    STOPPED_EXIT_CODE,
    *(cause.exit_code for cause in (ConfigError, DataError, CheckpointError, NumericError)),
}
"""Exit codes after which a start by torchrun's --max-restarts ends at once: more of the same, or
not wished for."""
CACHED_CODE = "torch._inductor.runtime.compile_tasks."
"""How the names begin of modules that are loaded from the compiler's cache."""


DISK_ERRORS = DISK_FULL | {errno.EIO, errno.EROFS, errno.ESTALE}


def run_entries(config: Config) -> list[str]:
    """Names of what this run writes within its folder."""
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


def start_facts(config: Config) -> dict[str, str]:
    """Return by name what must be the same on all ranks: the config, the versions of
    torchtitan_lite, torch and torchao, and this package's sources."""
    versions = {name: version for name, version in installed_versions().items() if name != "python"}
    sources = hash_sources(Path(__file__).parent)
    return {
        **shared_settings(config),
        **versions,
        "sources of torchtitan_lite (SHA-256)": sources[:16],
    }


def open_folder(config: Config) -> tuple[RunFolder | None, CheckpointManifest | None]:
    """The run folder, on rank 0, and the manifest of the checkpoint to resume from, on all ranks.
    What an earlier run left there is moved aside where nothing is resumed. Raises ConfigError,
    without changing anything, if the folder holds files that no run wrote."""
    path, checkpoint = Path(config.job.dump_folder), config.checkpoint
    folder: RunFolder | None = None

    def lock() -> bool:
        nonlocal folder
        folder = open_run_folder(path)
        earlier = folder.earlier_attempt()
        if earlier is not None and earlier.exit_code in NOT_TRIED_AGAIN:
            error = RunError(earlier.cause)
            error.exit_code = earlier.exit_code
            raise error
        return earlier is not None

    def begin() -> None:
        assert folder is not None, "rank 0 has locked it"
        initial = checkpoint.initial_load_path
        if resume is None and initial is not None and is_within(path / checkpoint.folder, initial):
            raise ConfigError(
                f'[checkpoint] initial_load_path = "{initial}" is in [job] dump_folder = "{path}", whose checkpoints '
                "move to previous/ when a new run starts; name another dump_folder."
            )
        if checkpoint.enable and read_status(path) is not None:
            remove_drafts(
                path / checkpoint.folder
            )  # a killed save's draft in a linked folder would be in the way
        folder.begin(
            resumed_config=None if resume is None else resume.config, entries=run_entries(config)
        )
        folder.write_config(dump_config(config))

    if on_rank0(lock):  # what load_step asks for was done in the attempt before
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


def explain_compiler(error: Exception) -> RunError | None:
    """What to do about the compiler's cache, which outlives the run, where `error` is about a file
    of it; else None."""
    while isinstance(
        inner := getattr(error, "inner_exception", None), Exception
    ):  # the compiler wraps what it meets
        error = inner
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # set by the compiler where it was not
    if folder is None or not any(name in str(error) for name in (folder, CACHED_CODE)):
        return None
    return RunError(
        "torch.compile failed, and a file of its cache may be why, which breaks where a machine goes down or a disk is "
        f"full: remove the folder {folder} and start again, or set TORCHINDUCTOR_CACHE_DIR to another. It said: "
        f"{type(error).__name__}: {error}"
    )


def is_within(folder: Path, file: str | bytes | int | None) -> bool:
    """Return whether `file` is a path inside `folder`; neither needs to exist."""
    return isinstance(file, str | bytes) and Path(os.fsdecode(file)).resolve().is_relative_to(
        folder.resolve()
    )


def explain(error: Exception, *, config: Config, watchdog: Watchdog) -> RunError | None:
    """What `error` comes to for a user; None if it was not expected."""
    if isinstance(error, RunError):
        return error
    if (broken := explain_compiler(error)) is not None:
        return broken
    folder = Path(config.job.dump_folder)
    if isinstance(error, OSError) and (
        error.errno in DISK_ERRORS or is_within(folder, error.filename)
    ):
        return StorageError(
            f'[job] dump_folder = "{folder}": {error}; make room, or name a folder on another disk.'
        )
    if is_rank_loss(error):
        return watchdog.explain(error)
    return None


def run(config: Config) -> int:
    """The exit code of the run that `config` describes, on this process."""
    rank, world_size = read_rank()
    path = Path(config.job.dump_folder)
    lock: int | None = None

    def report(
        cause: str, exit_code: int = RankLostError.exit_code, rank: int | None = None
    ) -> None:
        if lock is not None and lock == lock_inode(
            path
        ):  # else the status on file is another run's
            with contextlib.suppress(RunError):  # a full disk: what is reported matters more
                report_failure(
                    path, cause=cause, exit_code=exit_code, rank=rank, step=watchdog.step
                )

    watchdog = Watchdog(
        rank=rank,
        world_size=world_size,
        stop_signal=StopSignal(),
        report=report,
        timeout_s=config.comm.init_timeout_seconds,
    )
    try:
        check_started_alike(start_facts(config), timeout_s=config.comm.init_timeout_seconds)
        device = init_distributed(config.comm)
        folder, resume = open_folder(config)
        lock = lock_inode(path)
        logger.info(f"run folder: {path}")
        if config.job.description:
            logger.info(config.job.description)
        if config.job.print_config:
            logger.info(f"config:\n{dump_config(config)}")
        exit_code = Trainer(
            config, device=device, run_folder=folder, resume=resume, watchdog=watchdog
        ).train()
    except Exception as caught:
        error = explain(caught, config=config, watchdog=watchdog)
        cause = f"{type(caught).__name__}: {caught}" if error is None else str(error)
        report(cause, *((1, rank) if error is None else (error.exit_code, error.rank)))
        watchdog.fail(cause)
        if error is None or error is caught:
            raise
        raise error from caught
    dist.barrier()
    watchdog.close()
    dist.destroy_process_group()
    return exit_code


@record
def main() -> None:
    """Train as the command line says; a RunError is reported without a traceback."""
    init_logger()
    if {"-h", "--help"} & set(sys.argv):
        print(format_help())
        return
    try:
        exit_code = run(
            load_config(sys.argv[1:], world_size=int(os.environ.get("WORLD_SIZE", "1")))
        )
    except RunError as error:
        logger.info(f"error:\n{error}")  # most errors are every rank's: one of them tells
        exit_code = error.exit_code
    end_process(exit_code)


if __name__ == "__main__":
    gc.freeze()  # for good: later collections look at what came after the imports only
    gc.enable()
    main()
