"""The training loop: a run's parts, its steps, and what comes between them. A hub; train.py starts
and ends it."""

import contextlib
import gc
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchtitan_lite.build import build_batches, build_checkpointer, build_metrics, build_model
from torchtitan_lite.checkpoint.changes import check_model, config_changes
from torchtitan_lite.checkpoint.manifest import NEW_RUN, Manifest, Progress
from torchtitan_lite.checkpoint.state import random_state
from torchtitan_lite.collectives import Wishes, agree, on_rank0
from torchtitan_lite.config import (
    Config,
    DebugConfig,
    TrainingConfig,
    dump_config,
    resolve_batch,
    resolve_degrees,
)
from torchtitan_lite.data.dataloader import Batch
from torchtitan_lite.data.prefetch import Prefetcher
from torchtitan_lite.data.tokenizer import build_tokenizer
from torchtitan_lite.errors import STOPPED_EXIT_CODE, DataError, NumericError, RunError
from torchtitan_lite.float8.convert import build_scale_hook, is_float8
from torchtitan_lite.float8.numerics import NumericsMonitor
from torchtitan_lite.float8.observe import StepObserver
from torchtitan_lite.logger import logger
from torchtitan_lite.metrics.cpu_peaks import report_moved_peaks
from torchtitan_lite.metrics.processor import Skips, StepValues
from torchtitan_lite.metrics.records import summary_lines
from torchtitan_lite.metrics.wandb_writer import check_wandb_installed
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.loss import CrossEntropy
from torchtitan_lite.optim import UpdateGuard, build_optimizer, lr_factor, step_unless
from torchtitan_lite.parallel.distributed import set_timeouts
from torchtitan_lite.parallel.mesh import build_mesh, flatten_data_parallel
from torchtitan_lite.parallel.watchdog import Watchdog
from torchtitan_lite.planner.meta_model import resolve_model_args
from torchtitan_lite.profiling import Profiler
from torchtitan_lite.run_folder import RunFolder

STATUS_SECONDS = 5.0
"""Between updates of status.json, which wait for the disk."""


class Stopped(Exception):
    """Unwinds what a signal interrupted, on all ranks at the same place."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)


class Trainer:
    """A run, from the step after that of a checkpoint on: made ready by the constructor, trained by
    `train`."""

    def __init__(
        self,
        config: Config,
        *,
        device: torch.device,
        run_folder: RunFolder | None,
        resume: Manifest | None,
        watchdog: Watchdog,
    ) -> None:
        """Rank 0 alone has the `run_folder`. `resume` is the manifest of the checkpoint to go on
        from."""
        self.config, self.device, self.run_folder, self.watchdog = (
            config,
            device,
            run_folder,
            watchdog,
        )
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
        progress = accept_progress(resume, config, args)
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
        self.model, ledger, self.asked = build_model(config, args, mesh=mesh, device=device)
        self.cross_entropy = CrossEntropy(compiled=config.compile.covers("loss"))
        gathers_logits = degrees.tp > 1 and config.parallelism.disable_loss_parallel
        self.fuses_output = not (gathers_logits or is_float8(self.model.output))
        self.optimizer = build_optimizer(self.model.parameters(), config.optimizer)
        self.scale_hook = build_scale_hook(self.model, float8=config.float8)
        self.numerics = NumericsMonitor(
            self.model, freq=config.float8.log_numerics_freq, device=device
        )
        self.guard = UpdateGuard(
            training,
            device=torch.device("cpu") if training.enable_cpu_offload else device,
            skipped_steps=progress.skipped_steps,
            consecutive_skips=progress.consecutive_skips,
            loss_mean=progress.loss_mean,
        )
        self.checkpointer = build_checkpointer(
            config, args, model=self.model, optimizer=self.optimizer, mesh=mesh, device=device
        )
        self.load(resume)
        self.generators = random_state(device)
        self.step = self.saved_step = progress.step
        self.first_step, self.tokens = progress.step + 1, progress.tokens
        self.save_wanted = False
        self.metrics = build_metrics(
            config, ledger, device=device, total_steps=self.last_step, progress=progress
        )
        self.prefetched = Prefetcher(self.batches, device=device)

    @property
    def path(self) -> Path:
        """The run folder."""
        return Path(self.config.job.dump_folder)

    def load(self, resume: Manifest | None) -> None:
        """Read the state of the checkpoint to go on from, or the weights to begin with, if there
        are such."""
        checkpoint = self.config.checkpoint
        if resume is not None:
            if checkpoint.initial_load_path is not None:
                logger.info(
                    "[checkpoint] initial_load_path is for new runs, and not used: this one resumes"
                )
            self.checkpointer.load(resume)
        elif checkpoint.initial_load_path is not None:
            self.checkpointer.load_weights(
                Path(checkpoint.initial_load_path), hashes=checkpoint.verify_hashes
            )
        self.scale_hook()  # of the weights as they are now

    def next_batch(self, batches: Iterator[Batch]) -> Batch | None:
        """This rank's next batch, None after the last, once all ranks are ready for its forward
        pass. Raises on every rank what ends the run on one of them, `Stopped` if that is a
        signal."""
        self.watchdog.at(self.step + 1, "data")
        batch, error = None, None
        try:
            with self.metrics.data_wait():
                batch = next(batches, None)
        except RunError as caught:
            error = caught
        self.watchdog.at(self.step + 1, "agreement")
        error = (
            error
            or self.checkpointer.failure()
            or too_many_skips(self.metrics.skips, self.config.training)
        )
        wishes = agree(
            Wishes(self.watchdog.stop_signal.received, self.save_requested()), error=error
        )
        self.save_wanted |= wishes.save
        if wishes.stop:
            raise Stopped(wishes.stop)
        self.watchdog.at(self.step + 1, "forward and backward")
        return batch

    def save_requested(self) -> bool:
        """Whether this rank, which is rank 0, has found the file that asks for a save. The file is
        removed."""
        if self.run_folder is None or not self.checkpointer.enabled:
            return False
        request = self.path / self.config.checkpoint.save_request_file
        if not request.is_file():
            return False
        request.unlink(missing_ok=True)
        logger.info(f"{request} asks for a save")
        return True

    def loss(self, tokens: Tensor, labels: Tensor, *, scale: float) -> Tensor:
        """`scale` times the summed cross-entropy of one microbatch, [] float32. Where gradients are
        enabled, its own is added to the parameters'."""
        tokens, labels = (t.to(self.device, non_blocking=True) for t in (tokens, labels))
        if self.fuses_output:
            loss = self.model(
                tokens, partial(self.cross_entropy.of_linear, labels=labels, scale=scale)
            )
        else:
            loss = self.cross_entropy.of_logits(self.model(tokens), labels, scale=scale)
        if torch.is_grad_enabled():
            loss.backward()
        return loss.detach()

    def train_step(self, step: int) -> StepValues:
        """Train on the global batch of `step`."""
        training, accum_steps = self.config.training, self.batch.grad_accum_steps
        schedule = lr_factor(step, schedule=self.config.lr_scheduler, training_steps=self.last_step)
        lr = self.config.optimizer.lr * schedule
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # FSDP averages gradients over the data-parallel ranks; each sums its microbatches' share of
        # the mean here.
        scale = 1 / (accum_steps * training.microbatch_tokens)
        losses = []
        for accum_step in range(accum_steps):
            batch = self.next_batch(self.prefetched)
            assert batch is not None, "the batches last up to the last step"
            tokens, labels = batch
            last = accum_step == accum_steps - 1
            cast(FSDPModule, self.model).set_requires_gradient_sync(last)
            losses.append(self.loss(tokens, labels, scale=scale))
        loss = torch.stack(losses).sum()
        self.watchdog.at(step, "optimizer")
        gathered = [torch.empty_like(loss) for _ in range(self.dp_mesh.size())]
        gathering = dist.all_gather(gathered, loss, group=self.dp_mesh.get_group(), async_op=True)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), training.max_norm)
        grad_norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
        gathering.wait()
        rank_losses = torch.stack(gathered)
        mean_loss = rank_losses.mean()
        found_inf = self.guard.found_inf(mean_loss.to(grad_norm.device), grad_norm)
        step_unless(self.optimizer, found_inf)
        self.optimizer.zero_grad()
        self.scale_hook()
        self.tokens += self.batch.global_batch_size * training.seq_len
        return StepValues(
            tokens=self.tokens,
            loss=mean_loss,
            loss_max=rank_losses.max(),
            grad_norm=grad_norm.to(self.device),  # from CPU where parameters are offloaded
            skipped_steps=self.guard.skipped_steps.to(self.device),
            consecutive_skips=self.guard.consecutive_skips.to(self.device),
            lr=lr,
            epochs=self.batches.corpus.epochs(self.batches.samples(step)),
        )

    @torch.no_grad()
    def validate(self, step: int) -> None:
        """Log the mean loss over the validation windows."""
        assert self.validation_batches is not None
        on_gpu = [self.device] if self.device.type == "cuda" else []
        # What validation draws changes nothing of the training, also of one that resumes after it.
        with self.metrics.outside_step("validation", step=step), torch.random.fork_rng(on_gpu):
            scale = 1 / (self.config.validation.steps * self.config.training.microbatch_tokens)
            loss = torch.zeros((), device=self.device)
            batches = iter(self.validation_batches)
            while (batch := self.next_batch(batches)) is not None:
                loss += self.loss(*batch, scale=scale)
            dist.all_reduce(loss, group=self.dp_mesh.get_group())
            mean = loss.item()
        self.metrics.log_validation(step, mean)

    def train(self) -> int:
        """The run's exit code, after its last step, or after a signal stopped it between two
        forward passes."""
        config = self.config
        gc.disable()  # it would run at different moments on different ranks, each time stopping all of them
        stopped_by: str | None = None
        self.report_progress()
        if self.step >= self.last_step:
            logger.info(
                f"nothing left to train: resumed at step {self.step}, and the last one is {self.last_step}"
            )
        with (
            contextlib.closing(self.prefetched),
            Profiler(
                config.profiling,
                run_folder=self.path,
                rank=dist.get_rank(),
                device=self.device,
                done_steps=self.step,
                outside_step=self.metrics.outside_step,
            ) as profiler,
        ):
            try:
                for step in range(self.first_step, self.last_step + 1):
                    self.advance(step)
                    profiler.end_step(step)
            except Stopped as stopped:
                stopped_by = str(stopped) if self.step < self.last_step else None
                self.metrics.settle()
                if self.checkpointer.enabled and self.saved_step < self.step:
                    self.save()
            except RunError:
                with contextlib.suppress(RunError):  # every rank has one, and the first counts
                    self.checkpointer.wait()
                    self.report_progress()
                raise
        self.checkpointer.wait()
        gc.unfreeze()
        self.finish(stopped_by=stopped_by)
        return STOPPED_EXIT_CODE if stopped_by else 0

    def advance(self, step: int) -> None:
        """Train, log and follow up `step`. Validation, checkpoints and garbage collection are in no
        step's time."""
        config = self.config
        measured = (
            self.numerics.due(step) and step > self.first_step
        )  # the first compiles, within a longer time-out
        observer = StepObserver() if step == self.first_step else None
        with self.numerics.observe() if measured else observer or contextlib.nullcontext():
            values = self.train_step(step)
        logged = self.metrics.end_step(step, values)
        if measured:
            self.metrics.log_numerics(step, self.numerics.figures())
        if observer is not None:
            observer.report(
                self.model, self.asked, step=step, deterministic=config.debug.deterministic
            )
        self.step, self.generators = step, random_state(self.device)
        last = step == self.last_step
        saves = self.checkpointer.due(step, last=last) or self.save_wanted
        if saves or last:
            self.metrics.settle()  # a step's record is on disk before its checkpoint
            if (
                error := too_many_skips(self.metrics.skips, config.training)
            ) is not None:  # now known to all ranks
                raise error
        if self.validation_batches is not None and (last or step % config.validation.freq == 0):
            self.validate(step)
        if saves:
            self.save()
        if step == self.first_step or step % config.training.gc_freq == 0:
            with self.metrics.outside_step("gc", step=step):
                gc.collect()
        if step == self.first_step:
            gc.freeze()  # what stays for the whole run is not looked at again
            set_timeouts(config.comm.train_timeout_seconds, but_of=self.checkpointer.group)
            self.watchdog.timeout_s = config.comm.train_timeout_seconds
        if saves or last or (logged and time.monotonic() - self.reported_at > STATUS_SECONDS):
            self.report_progress()

    def save(self) -> None:
        """Save the state after the last finished step."""
        self.watchdog.at(self.step, "checkpoint")
        on_rank0(self.check_run_folder)
        with self.metrics.outside_step("checkpoint", step=self.step):
            self.checkpointer.save(self.progress(), self.generators)
        self.saved_step, self.save_wanted = self.step, False

    def check_run_folder(self) -> None:
        """Raise StorageError if the run folder, where this rank has it, is no longer this run's."""
        if self.run_folder is not None:
            self.run_folder.check_is_ours(step=self.step)

    def progress(self) -> Progress:
        """What is saved of the last finished step, besides tensors and random states."""
        loss_mean = self.guard.loss_mean.item()
        return Progress(
            step=self.step,
            samples=self.batches.samples(self.step),
            tokens=self.tokens,
            data=self.batches.corpus.identity(),
            skipped_steps=int(self.guard.skipped_steps.item()),
            consecutive_skips=int(self.guard.consecutive_skips.item()),
            loss_mean=None if math.isnan(loss_mean) else loss_mean,
        )

    def report_progress(self) -> None:
        """Write into status.json how far the run is."""
        self.reported_at = time.monotonic()
        if self.run_folder is not None:
            saved = self.checkpointer.last_saved
            self.run_folder.running(
                step=self.step, last_checkpoint=None if saved is None else str(saved)
            )

    def finish(self, *, stopped_by: str | None) -> None:
        """Say how the run went, and write how it ended. Raises StorageError if its last save
        failed."""
        self.report_progress()
        self.metrics.close()
        if self.metrics.peaks.approximate and stopped_by is None:
            report_moved_peaks(self.metrics.peaks.measured)
        if self.run_folder is not None:
            self.log_outcome(stopped_by=stopped_by)
        if self.checkpointer.last_failure is not None:
            raise self.checkpointer.last_failure
        if self.run_folder is not None:
            if stopped_by is None:
                self.run_folder.done()
            else:
                self.run_folder.stopped(cause=f"stopped by {stopped_by} after step {self.step}")

    def log_outcome(self, *, stopped_by: str | None) -> None:
        """Say how the run went."""
        corpus = self.batches.corpus
        if (summary := self.metrics.summary()) is not None:
            entropy = None
            try:
                entropy = corpus.unigram_entropy()
            except DataError as damage:  # it reads what no step did, and the training is done
                logger.warning(f"the unigram entropy is not known: {damage}")
            for line in summary_lines(summary, unigram_entropy=entropy):
                logger.info(line)
        passes = corpus.epochs(self.batches.samples(self.step))
        logger.info(f"epochs: {', '.join(f'{name} {count:.4g}' for name, count in passes.items())}")
        if stopped_by is None and self.batches.left_over is not None:
            logger.info(
                f"{self.config.training.epochs:g} epochs done: the data ended the run at step {self.step}"
            )
        if self.config.metrics.enable_tensorboard:
            curves = self.path / self.config.metrics.save_tb_folder
            logger.info(f"curves: {sys.executable} -m tensorboard.main --logdir {curves}")
        logger.info(f"run folder: {self.path}")


def accept_progress(resume: Manifest | None, config: Config, args: ModelArgs) -> Progress:
    """The progress to go on from, after telling what has changed in the config since. Raises
    CheckpointError for a checkpoint of another model."""
    if resume is None:
        return NEW_RUN
    step = resume.progress.step
    check_model(
        resume.model, asdict(args), path=Path(config.job.dump_folder) / config.checkpoint.folder
    )
    for change in config_changes(resume.config, dump_config(config)):
        logger.info(f"since step {step}: {change}")
    return resume.progress


def too_many_skips(skips: Skips, training: TrainingConfig) -> NumericError | None:
    """The error that ends a run after max_consecutive_skips steps in a row without an update; None
    before."""
    limit = training.max_consecutive_skips
    if skips.consecutive < limit:
        return None
    return NumericError(
        f"[training] max_consecutive_skips = {limit}: the {skips.consecutive} steps up to {skips.step} had no update, "
        f"as their loss or gradient was not finite, or their loss a spike; step {skips.step}: loss = {skips.loss}, "
        f"grad_norm = {skips.grad_norm}. Lower [optimizer] lr, lengthen [lr_scheduler] warmup_steps, or look at the "
        "data."
    )


def set_determinism(debug: DebugConfig) -> None:
    """Seed torch, and where asked for have it use deterministic algorithms only."""
    torch.manual_seed(debug.seed)
    if debug.deterministic:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # cuBLAS reads it at its first call
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
