"""The main job: builds everything in order from a config, steps, and closes. Started by torchrun on every process."""

import contextlib
import errno
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from torchtitan_lite.build import build_batches, build_metrics, build_model
from torchtitan_lite.checkpoint import Checkpointer, Progress, find_resume_step, read_progress, step_folder
from torchtitan_lite.config import (
    Config,
    DebugConfig,
    check_decay,
    dump_config,
    format_help,
    load_config,
    resolve_batch,
    resolve_degrees,
)
from torchtitan_lite.data.prefetch import Prefetcher
from torchtitan_lite.data.tokenizer import build_tokenizer
from torchtitan_lite.errors import STOPPED_EXIT_CODE, ConfigError, NumericError, RunError, StorageError
from torchtitan_lite.float8.convert import build_scale_hook
from torchtitan_lite.logger import init_logger, logger
from torchtitan_lite.meta import resolve_model_args
from torchtitan_lite.metrics.metrics import StepValues, summary_lines
from torchtitan_lite.metrics.records import Record
from torchtitan_lite.metrics.wandb_writer import check_wandb_installed
from torchtitan_lite.models.loss import cross_entropy_sum
from torchtitan_lite.optim import build_optimizer, lr_factor, step_unless
from torchtitan_lite.parallel.distributed import StopSignal, init_distributed, leave_distributed, on_rank0, set_timeouts
from torchtitan_lite.parallel.mesh import build_mesh, flatten_data_parallel
from torchtitan_lite.profiling import profile
from torchtitan_lite.run_folder import RunFolder, open_run_folder, report_failure

STATUS_SECONDS = 5.0
"""Between updates of status.json, which wait for the disk."""


class Trainer:
    """A run from step `resume_step` + 1 on: made ready by the constructor, trained by `train`."""

    def __init__(self, config: Config, *, device: torch.device, run_folder: RunFolder | None, resume_step: int) -> None:
        """Rank 0 alone has the `run_folder`."""
        self.config, self.device, self.run_folder = config, device, run_folder
        self.stop_signal = StopSignal()
        on_rank0(lambda: check_wandb_installed(config.metrics))
        set_determinism(config.debug)
        training, world_size = config.training, dist.get_world_size()
        degrees = resolve_degrees(config.parallelism, world_size=world_size)
        mesh = build_mesh(degrees, device_type=device.type)
        self.dp_mesh = flatten_data_parallel(mesh)
        self.batch = resolve_batch(training, dp_degree=degrees.dp)
        logger.info(
            f"{world_size} processes on {device.type}: dp_replicate {degrees.dp_replicate} x dp_shard "
            f"{degrees.dp_shard} x tp {degrees.tp}; global batch {self.batch.global_batch_size} x {training.seq_len} "
            f"tokens in {self.batch.grad_accum_steps} microbatches a rank"
        )
        tokenizer = build_tokenizer(config.model.tokenizer_path)
        args = resolve_model_args(config, tokenizer)
        progress = on_rank0(lambda: read_progress(self.path / config.checkpoint.folder, resume_step))
        self.batches, self.validation_batches = build_batches(
            config,
            tokenizer,
            self.batch,
            vocab_size=args.vocab_size,
            dp_rank=self.dp_mesh.get_local_rank(),
            dp_degree=degrees.dp,
            progress=progress,
        )
        self.last_step = self.batches.last_step
        if problems := list(check_decay(config.lr_scheduler, steps=self.last_step)):
            raise ConfigError(f"{problems[0]}; [training] epochs = {training.epochs} end the run there.")
        self.model, ledger = build_model(config, args, mesh=mesh, device=device)
        self.loss_fn: Callable[[Tensor, Tensor], Tensor] = cross_entropy_sum
        if config.compile.covers("loss"):
            self.loss_fn = torch.compile(cross_entropy_sum)
        self.splits_logits = degrees.tp > 1 and not config.parallelism.disable_loss_parallel
        self.optimizer = build_optimizer(self.model.parameters(), config.optimizer)
        self.scale_hook = build_scale_hook(self.model, float8=config.float8)
        self.checkpointer = Checkpointer(
            self.model, self.optimizer, config.checkpoint, folder=self.path / config.checkpoint.folder
        )
        self.skipped_steps = torch.zeros((), device=device)
        self.step, self.first_step, self.tokens = resume_step, resume_step + 1, progress.tokens
        self.last_checkpoint: str | None = None
        if resume_step:
            self.checkpointer.load(resume_step)
            self.last_checkpoint = str(step_folder(self.checkpointer.folder, resume_step))
        self.metrics = build_metrics(config, ledger, device=device, total_steps=self.last_step, progress=progress)
        self.prefetched = Prefetcher(self.batches, device=device)

    @property
    def path(self) -> Path:
        """The run folder."""
        return Path(self.config.job.dump_folder)

    def loss(self, tokens: Tensor, labels: Tensor, *, backward_scale: float | None = None) -> Tensor:
        """Summed cross-entropy of one microbatch, [] float32. Its gradient times `backward_scale`, if given, is
        added to the parameters' gradients."""
        tokens, labels = (t.to(self.device, non_blocking=True) for t in (tokens, labels))
        with loss_parallel() if self.splits_logits else contextlib.nullcontext():
            total = self.loss_fn(self.model(tokens), labels)
            if backward_scale is not None:
                (total * backward_scale).backward()
        total = total.detach()
        return total.full_tensor() if isinstance(total, DTensor) else total

    def train_step(self, step: int) -> StepValues:
        """Train on the global batch of `step`."""
        training, accum_steps = self.config.training, self.batch.grad_accum_steps
        schedule = lr_factor(step, schedule=self.config.lr_scheduler, training_steps=self.last_step)
        lr = self.config.optimizer.lr * schedule
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # FSDP averages gradients over the data-parallel ranks; each sums its microbatches' share of the mean here.
        scale = 1 / (accum_steps * training.microbatch_tokens)
        losses = []
        for accum_step in range(accum_steps):
            with self.metrics.data_wait():
                tokens, labels = next(self.prefetched)
            last = accum_step == accum_steps - 1
            cast(FSDPModule, self.model).set_requires_gradient_sync(last)
            losses.append(self.loss(tokens, labels, backward_scale=scale))
        loss = torch.stack(losses).sum() * scale
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), training.max_norm)
        grad_norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
        gathered = [torch.empty_like(loss) for _ in range(self.dp_mesh.size())]
        dist.all_gather(gathered, loss, group=self.dp_mesh.get_group())
        rank_losses = torch.stack(gathered)
        mean_loss = rank_losses.mean()
        # The same on all ranks, and not read here: that would stall the device.
        finite = mean_loss.to(grad_norm.device).isfinite() & grad_norm.isfinite()
        found_inf = 1 - finite.float()
        step_unless(self.optimizer, found_inf)
        self.optimizer.zero_grad()
        self.scale_hook()
        self.skipped_steps += found_inf.to(self.device)
        self.tokens += self.batch.global_batch_size * training.seq_len
        return StepValues(
            tokens=self.tokens,
            loss=mean_loss,
            loss_max=rank_losses.max(),
            grad_norm=grad_norm.to(self.device),  # from CPU where parameters are offloaded
            skipped_steps=self.skipped_steps,
            lr=lr,
            epochs=self.batches.corpus.epochs(self.batches.samples(step)),
        )

    @torch.no_grad()
    def validate(self, step: int) -> None:
        """Log the mean loss over the validation windows."""
        assert self.validation_batches is not None
        with self.metrics.outside_step("validation", step=step):
            total = torch.zeros((), device=self.device)
            for tokens, labels in self.validation_batches:
                total += self.loss(tokens, labels)
            dist.all_reduce(total, group=self.dp_mesh.get_group())
            loss = total.item() / (self.config.validation.steps * self.config.training.microbatch_tokens)
        self.metrics.log_validation(step, loss)

    def train(self) -> int:
        """The run's exit code, after the last step or the step at whose end a signal stopped it."""
        config = self.config
        gc.disable()  # it would run at different moments on different ranks, each time stopping all of them
        stopped_by: signal.Signals | None = None
        self.report_progress()
        if self.step >= self.last_step:
            logger.info(f"nothing left to train: resumed at step {self.step}, and the last one is {self.last_step}")
        with (
            contextlib.closing(self.prefetched),
            profile(
                config.profiling, run_folder=self.path, rank=dist.get_rank(), device=self.device, done_steps=self.step
            ) as profiler,
        ):
            for step in range(self.first_step, self.last_step + 1):
                stopped_by = self.advance(step)
                profiler.end_step(step)
                if stopped_by is not None:
                    break
        early = stopped_by.name if stopped_by and self.step < self.last_step else None
        self.finish(stopped_by=early)
        return STOPPED_EXIT_CODE if early else 0

    def advance(self, step: int) -> signal.Signals | None:
        """Train, log and follow up `step`; the signal that ends the run with it, if one does."""
        values = self.train_step(step)
        stopped_by, failed = self.stop_signal.agreed(failed=self.metrics.non_finite is not None)
        last = step == self.last_step or stopped_by is not None
        saves = self.checkpointer.due(step, last=last)
        # What is saved is logged, and so checked, first. All ranks then know the same of this step.
        settle = last or saves or failed
        logged = self.metrics.end_step(step, values, settle=settle)
        if settle:
            check_finite(self.metrics.non_finite)
        self.step = step
        self.after_step(saves=saves)
        if settle or (logged and time.monotonic() - self.reported_at > STATUS_SECONDS):
            self.report_progress()
        return stopped_by

    def after_step(self, *, saves: bool) -> None:
        """What comes between steps. Validation and checkpoints are in no step's time."""
        config, step = self.config, self.step
        validation_due = step % config.validation.freq == 0 or step == self.last_step
        if self.validation_batches is not None and validation_due:
            self.validate(step)
        if saves:
            with self.metrics.outside_step("checkpoint", step=step):
                self.last_checkpoint = self.checkpointer.save(self.progress())
        if step % config.training.gc_freq == 0:
            gc.collect(1)
        if step == self.first_step:
            set_timeouts(config.comm.train_timeout_seconds)

    def progress(self) -> Progress:
        """What is saved of the step that was trained last, besides the model and the optimizer."""
        samples, data = self.batches.samples(self.step), self.batches.corpus.identity()
        return Progress(step=self.step, samples=samples, tokens=self.tokens, data=data)

    def report_progress(self) -> None:
        """Write into status.json how far the run is."""
        self.reported_at = time.monotonic()
        if self.run_folder is not None:
            self.run_folder.running(step=self.step, last_checkpoint=self.last_checkpoint)

    def finish(self, *, stopped_by: str | None) -> None:
        """Say how the run went, and write how it ended."""
        self.metrics.close()
        if self.run_folder is None:
            return
        corpus = self.batches.corpus
        if (summary := self.metrics.summary()) is not None:
            for line in summary_lines(summary, unigram_entropy=corpus.unigram_entropy()):
                logger.info(line)
        passes = corpus.epochs(self.batches.samples(self.step))
        logger.info(f"epochs: {', '.join(f'{name} {count:.4g}' for name, count in passes.items())}")
        if stopped_by is None and self.batches.left_over is not None:
            logger.info(f"{self.config.training.epochs:g} epochs done: the data ended the run at step {self.step}")
        if self.config.metrics.enable_tensorboard:
            curves = self.path / self.config.metrics.save_tb_folder
            logger.info(f"curves: {sys.executable} -m tensorboard.main --logdir {curves}")
        logger.info(f"run folder: {self.path}")
        if stopped_by is None:
            self.run_folder.done()
        else:
            self.run_folder.stopped(cause=f"stopped by {stopped_by} after step {self.step}")


def check_finite(non_finite: Record | None) -> None:
    """Raise NumericError if there is a record of steps that had no update, as their loss or gradient was not finite."""
    if non_finite is not None:
        step, skipped = non_finite.step, non_finite.skipped_steps
        raise NumericError(
            f"{skipped} of the steps up to {step} had a loss or gradient that is not finite, and so no update; step "
            f"{step}: loss = {non_finite.loss}, grad_norm = {non_finite.grad_norm}. Lower [optimizer] lr, lengthen "
            "[lr_scheduler] warmup_steps, or look at the data."
        )


def set_determinism(debug: DebugConfig) -> None:
    """Seed torch, and where asked for have it use deterministic algorithms only."""
    torch.manual_seed(debug.seed)
    if debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first call
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def run_entries(config: Config) -> list[str]:
    """Names of what this run writes within its folder."""
    return [
        "metrics.jsonl",
        "wandb",
        config.checkpoint.folder,
        config.metrics.save_tb_folder,
        config.profiling.save_traces_folder,
        config.profiling.save_memory_snapshot_folder,
    ]


def open_folder(config: Config) -> tuple[RunFolder | None, int]:
    """The run folder, on rank 0, and the step to resume from, on all ranks. What an earlier run left there is moved
    aside where nothing is resumed."""
    path = Path(config.job.dump_folder)
    folder: RunFolder | None = None

    def open_it() -> int:
        nonlocal folder
        resume_step = find_resume_step(config.checkpoint, folder=path / config.checkpoint.folder)
        folder = open_run_folder(path, resume=resume_step > 0, entries=run_entries(config))
        folder.write_config(dump_config(config))
        return resume_step

    resume_step = on_rank0(open_it)
    return folder, resume_step


def explain_disk_failure(error: Exception, folder: str) -> Exception:
    """The StorageError that `error` is, if the disk failed or is full; else `error` itself."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
        return StorageError(f'[job] dump_folder = "{folder}": {error}; make room, or name a folder on another disk.')
    return error


def run(config: Config) -> int:
    """The exit code of the run that `config` describes, on this process."""
    device = init_distributed(config.comm)
    folder, resume_step = open_folder(config)
    logger.info(f"run folder: {config.job.dump_folder}")
    if config.job.description:
        logger.info(config.job.description)
    if config.job.print_config:
        logger.info(f"config:\n{dump_config(config)}")
    try:
        return Trainer(config, device=device, run_folder=folder, resume_step=resume_step).train()
    except Exception as caught:
        error = explain_disk_failure(caught, config.job.dump_folder)
        cause = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        exit_code = error.exit_code if isinstance(error, RunError) else 1
        with contextlib.suppress(RunError):  # a full disk: what is raised matters more
            report_failure(Path(config.job.dump_folder), cause=cause, exit_code=exit_code)
        if error is caught:
            raise
        raise error from caught


@record
def main() -> None:
    """Train as the command line says; a RunError is reported without a traceback."""
    init_logger()
    if {"-h", "--help"} & set(sys.argv):
        print(format_help())
        return
    try:
        leave_distributed(run(load_config(sys.argv[1:], world_size=int(os.environ.get("WORLD_SIZE", "1")))))
    except RunError as error:
        logger.info(f"error:\n{error}")  # most errors are every rank's: one of them tells
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
