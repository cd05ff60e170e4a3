"""The main job: join the other processes, open the run folder, train, and report the outcome.

torchrun starts it in every process: `torchrun -m torchtitan_lite.train --job.config_file FILE`.
"""

import gc
import os
import signal
import sys

if __name__ == "__main__":
    # For the watchdog: the agent, or torchrun. It may end during the imports, and before them.
    os.environ.setdefault("TORCHTITAN_LITE_AGENT", str(os.getppid()))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of an import
    gc.disable()  # imports create many permanent objects; scanning them repeatedly wastes time
    first = sys.path[0] or "."
    if (
        not getattr(sys.flags, "safe_path", False)
        and os.path.exists(first)  # noqa: PTH110
        and os.path.samefile(first, ".")  # noqa: PTH121
    ):
        del sys.path[0]  # a random.py in the working directory would shadow the standard library's

import json
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.exc import BackendCompilerFailed, InvalidBackend
from torch.distributed.elastic.multiprocessing.errors import record

from torchtitan_lite.base.collectives import on_rank0
from torchtitan_lite.base.errors import STOPPED_EXIT_CODE, ConfigError, RunError
from torchtitan_lite.base.files import allow_open_files, hash_file, hash_sources
from torchtitan_lite.base.logger import init_logger, logger
from torchtitan_lite.base.outside import load_object
from torchtitan_lite.checkpoint.folders import HF_SUFFIX, remove_drafts
from torchtitan_lite.checkpoint.manifest import installed_versions
from torchtitan_lite.checkpoint.resume import Resume, find_resume
from torchtitan_lite.config import (
    Config,
    format_help,
    load_config,
    outside_names,
    own_names,
    shared_settings,
)
from torchtitan_lite.metrics.summary import curves_line, summary_lines
from torchtitan_lite.parallel.mesh import set_determinism
from torchtitan_lite.planner.prepare import prepare_job
from torchtitan_lite.run.compiler_checks import check_compiler
from torchtitan_lite.run.process_group import (
    check_started_alike,
    end_process,
    init_distributed,
    local_world_size,
    read_rank,
)
from torchtitan_lite.run.run_folder import RunFolder
from torchtitan_lite.run.watchdog import Watchdog
from torchtitan_lite.training.trainer import Trainer


def run_training(config: Config) -> int:
    """Train with `config` in this process, one of those that torchrun has started. Return the exit
    code, 0 or that of a stop by a signal. Raises RunError."""
    init_logger()
    folder = RunFolder(Path(config.job.dump_folder), own_names(config).values())
    watchdog = Watchdog(report=folder.fail)
    watchdog.timeout_s = config.comm.init_timeout_seconds
    try:
        stopped_by = join_and_train(config, watchdog, folder)
    except Exception as caught:
        error = watchdog.explain(caught)
        refusals, backend = (InvalidBackend, BackendCompilerFailed), config.compile.backend
        if isinstance(caught, refusals) and backend != "inductor":
            said = str(getattr(caught, "inner_exception", caught)).rstrip(".")
            error = ConfigError(f'[compile] backend = "{backend}": {said}; use "inductor"')
        folder.fail(error, watchdog.step)
        watchdog.fail(str(error))
        if error is caught or type(error) is RunError:  # an unexpected one has a traceback
            raise
        raise error from caught

    dist.barrier()
    watchdog.close()
    dist.destroy_process_group()
    return STOPPED_EXIT_CODE if stopped_by else 0


def join_and_train(config: Config, watchdog: Watchdog, folder: RunFolder) -> str | None:
    """Join the other processes and train. Return what stopped the run early, if anything."""
    # At a time-out, NCCL's flight recorder writes into the run folder, unless the environment names
    # a place.
    allow_open_files()
    traces = folder.path.absolute() / config.comm.save_traces_folder
    trace_file = f"{traces}/{config.comm.save_traces_file_prefix}"
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", trace_file)
    set_determinism(config.debug)

    # Join the other processes. All must have the same config, versions and sources. No variable may
    # be added from here on: a thread of gloo or NCCL that reads the environment meanwhile crashes.
    device = init_distributed(config.comm)
    check_started_alike(start_facts(config))

    # Lock the run folder, and find the checkpoint to continue from.
    resume = open_folder(config, folder)
    logger.info(f"run folder: {folder.path}")

    # Derive the job, the single source of truth from here on.
    job, tokenizer = prepare_job(config, device=device, resume=resume)
    if config.job.description:
        logger.info(config.job.description)
    if config.job.print_config:
        logger.info(f"config:\n{job.config.to_toml()}")

    own_folder = folder if dist.get_rank() == 0 else None
    trainer = Trainer(
        job, tokenizer, device=device, run_folder=own_folder, resume=resume, watchdog=watchdog
    )
    if device.type == "cuda" and config.comm.trace_buf_size:
        traces.mkdir(parents=True, exist_ok=True)
    stopped_by = trainer.train()
    finish(trainer, stopped_by=stopped_by)
    return stopped_by


def start_facts(config: Config) -> dict[str, str]:
    """Import what the config names outside the package. Return what must be equal on
    all ranks: config, versions, sources, NNODES and NGPU."""
    versions = {name: text for name, text in installed_versions().items() if name != "python"}
    sources: dict[str, str] = {}
    for name, key in outside_names(config).items():
        load_object(key, name)
        module = sys.modules[name.partition(":")[0]]
        file = Path(module.__file__ or os.devnull)
        sources[f"source of {module.__name__} (SHA-256)"] = hash_file(file)
    return {
        **shared_settings(config),
        **versions,
        **sources,
        "sources of torchtitan_lite (SHA-256)": hash_sources(Path(__file__).parent),
        "NNODES": os.environ.get("GROUP_WORLD_SIZE", "1"),
        "NGPU": str(local_world_size()),
    }


def open_folder(config: Config, folder: RunFolder) -> Resume | None:
    """Lock the run folder. Return the checkpoint in it to go on from. A collective call.

    Raises ConfigError if the folder holds files that no run wrote."""
    checkpoint = config.checkpoint
    restarted, folder.started = on_rank0(lambda: (folder.lock(), folder.started))
    if restarted:  # by torchrun: the first attempt has loaded load_step
        checkpoint = checkpoint.model_copy(update={"load_step": -1})
    return find_resume(checkpoint, folder=checkpoint.within(folder.path))


def finish(trainer: Trainer, *, stopped_by: str | None) -> None:
    """Log the summary, and write the outcome into status.json. Collective."""
    folder, step = trainer.run_folder, trainer.step
    if folder is not None:
        log_outcome(trainer, stopped_by=stopped_by)
    if stopped_by is None and trainer.config.checkpoint.last_save_in_hf:
        trainer.watchdog.at(step, "export")
        on_rank0(lambda: export_last(trainer), group=trainer.checkpointer.group)
    if folder is not None and stopped_by is None:
        folder.update(step=step, state="done", exit_code=0)
    elif folder is not None:
        cause = f"stopped by {stopped_by} after step {step}"
        folder.update(step=step, state="stopped", cause=cause, exit_code=STOPPED_EXIT_CODE)


def export_last(trainer: Trainer) -> None:
    """Write the last checkpoint as a Hugging Face model beside it. A model that is there already is
    kept if this start of the run has trained no step."""
    saved, settings = trainer.checkpointer.last_saved, trainer.config.checkpoint
    if saved is None:  # initial_load_path's checkpoint is of the last step already
        logger.warning("[checkpoint] last_save_in_hf = true, but no step was trained and saved")
        return
    target = saved.with_name(f"{saved.name}{HF_SUFFIX}")
    if trainer.first_step > trainer.last_step and (target / "config.json").exists():
        logger.info(f"{target} was there already, and is kept")
    else:
        # A checkpoint of weights alone has the type of the export already.
        keeps = settings.last_save_model_only
        remove_drafts(saved.parent)  # of an export that was killed
        trainer.hf_export.export_hf(saved, target, dtype="keep" if keeps else settings.export_dtype)


def log_outcome(trainer: Trainer, *, stopped_by: str | None) -> None:
    """Log the summary, the epochs, and where the curves and the run folder are."""
    config, batches = trainer.config, trainer.batches
    if (summary := trainer.metrics.summary()) is not None:
        for line in summary_lines(summary):
            logger.info(line)

    if passes := batches.passes(trainer.step):
        logger.info(f"epochs: {', '.join(f'{name} {count:.4g}' for name, count in passes.items())}")
    if stopped_by is None and batches.left_over is not None:
        epochs = config.training.epochs
        logger.info(f"{epochs:g} epochs done: the data ended the run at step {trainer.step}")
    if config.metrics.enable_tensorboard:
        logger.info(curves_line(str(trainer.job.folder)))
    logger.info(f"run folder: {trainer.job.folder}")


def record_cause(error: RunError) -> None:
    """Write the file in which torch's agent looks for what ended a process, without a traceback."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        known = {"message": str(error), "extraInfo": {"timestamp": int(time.time())}}
        with suppress(OSError):  # a full disk: the error itself matters more
            Path(file).write_text(json.dumps({"message": known}))


@record
def main() -> None:
    """Train with the command line's config. A RunError is printed without a traceback."""
    init_logger()
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(format_help())
        return
    try:
        world_size = read_rank()[1] if "RANK" in os.environ else 1
        config = load_config(sys.argv[1:], world_size=world_size)
        on_gpu = torch.cuda.is_available()
        check_compiler(os.environ, compiles=config.compile.enable, on_gpu=on_gpu)
        exit_code = run_training(config)
    except RunError as error:
        # At info level only LOG_RANK's ranks print it: most ranks have the same error.
        logger.info(f"error:\n{error}")
        record_cause(error)
        exit_code = error.exit_code
    end_process(exit_code)


if __name__ == "__main__":
    gc.freeze()  # later collections scan only objects made after the imports
    gc.enable()
    main()
