"""The training loop: a run's parts, the order of a step, and the work between steps."""

import contextlib
import gc
import itertools
import math
import signal
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.base.collectives import agree, on_rank0
from torchtitan_lite.base.errors import RunError
from torchtitan_lite.base.logger import logger
from torchtitan_lite.base.outside import load_object
from torchtitan_lite.checkpoint.manifest import NEW_RUN, TrainingProgress
from torchtitan_lite.checkpoint.resume import Resume
from torchtitan_lite.config.job import Job
from torchtitan_lite.data.dataloader import Batch, prefetch
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.float8.convert import update_scales
from torchtitan_lite.float8.observe import StepObserver
from torchtitan_lite.metrics.flops import document_squares, document_values
from torchtitan_lite.metrics.processor import StepValues
from torchtitan_lite.metrics.records import has_validation
from torchtitan_lite.parallel.fsdp import free_gathered
from torchtitan_lite.parallel.mesh import Groups, all_gather
from torchtitan_lite.run.process_group import set_timeouts
from torchtitan_lite.run.run_folder import RunFolder
from torchtitan_lite.run.watchdog import Watchdog

from .build import build_batches, build_loaded_model, build_metrics, check_resume
from .model import build_microbatches
from .optim import UpdateGuard, clip_gradients, set_learning_rate, step_unless

STATUS_SECONDS = 5.0  # minimum time between updates of status.json, because each waits for the disk


class Stopped(Exception):
    """Raised on all ranks at the same point to stop; the message names the signal."""


class Trainer:
    """The training loop. The constructor builds every part of the run; `train` runs the steps."""

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        *,
        device: torch.device,
        run_folder: RunFolder | None = None,
        resume: Resume | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        """Build the parts of `job` and load the checkpoint `resume`, if any. Begin the run in
        `run_folder`, which is None on all ranks but 0, once nothing can be refused any more. A
        collective call."""
        self.job, self.config = job, job.config
        self.device, self.run_folder = device, run_folder
        self.watchdog = watchdog or Watchdog(report=lambda *_: None)
        self.groups = Groups(job.degrees, device_type=device.type)
        mesh = self.groups.mesh

        # Data, from the first sample that has not been trained on.
        progress = NEW_RUN if resume is None else resume.manifest.progress
        if resume is not None:
            check_resume(resume, job)
        self.batches, self.validation_batches = build_batches(
            job, tokenizer, dp_rank=self.groups.dp_rank, progress=progress
        )
        if resume is not None:
            resume.check_can_train(last_step=self.batches.last_step)
        self.step = self.saved_step = progress.step
        self.first_step, self.last_step = progress.step + 1, self.batches.last_step
        self.tokens = progress.tokens

        # Model, optimizer, the checkpoint in both, and the guard.
        self.built, self.optimizer, self.checkpointer = build_loaded_model(
            job, mesh, device=device, resume=resume
        )
        self.model = self.built.model
        self.guard = UpdateGuard(
            self.config.training, progress, device=device, group=self.groups.replicas
        )

        # Nothing in the run folder has changed yet, but checkpoints after `resume` are set aside.
        resumes = self.checkpointer.last_saved is not None  # loaded from this folder
        toml = self.config.to_toml()
        on_rank0(
            lambda: None if run_folder is None else run_folder.begin(resumes=resumes, config=toml)
        )
        if not resumes:
            self.checkpointer.begin()

        # Measurements, and what runs the model under them.
        self.metrics = build_metrics(
            job, self.built.ledger, mesh, device=device, last_step=self.last_step, progress=progress
        )
        self.microbatches = build_microbatches(
            job, self.built, mesh, device=device, timed=self.metrics.timed
        )
        self.build_optional(tokenizer)
        self.prefetched = prefetch(self.batches, device=device, ahead=job.batch.grad_accum_steps)

    def build_optional(self, tokenizer: Tokenizer) -> None:
        """Build what only some configs ask for. Only runs with them load its modules."""
        self.profiler, self.numerics, self.samples = None, None, None
        key, named = "[training] after_step", self.config.training.after_step
        self.after_step = [load_object(key, each) for each in named]
        job, profiling, linears = self.job, self.config.profiling, self.built.linears
        if profiling.enable_profiling or profiling.enable_memory_snapshot:
            from .profiling import Profiler

            self.profiler = Profiler(
                profiling,
                run_folder=job.folder,
                rank=dist.get_rank(),
                done_steps=self.step,
                outside_step=self.metrics.outside_step,
            )
        if self.config.float8.log_numerics_freq and linears:
            from torchtitan_lite.float8.numerics import NumericsMonitor

            self.numerics = NumericsMonitor(self.model, linears, device=self.device)
        if self.config.checkpoint.last_save_in_hf:
            from torchtitan_lite.checkpoint import hf_export

            self.hf_export = hf_export  # for the end, when the installed sources may be others
        if self.config.validation.enable and self.config.validation.prompts:
            from .samples import Samples

            self.samples = Samples(job, tokenizer, self.model, self.groups.stages, self.device)

    def train(self) -> str | None:
        """Train to the last step. Return the signal that stopped the run, if any."""
        gc.disable()  # it would pause ranks at different moments, and all would wait each time
        stopped_by: str | None = None
        self.report_progress()
        if self.step >= self.last_step:
            fix = "raise --training.steps (or epochs, if they end the run) to go on"
            logger.info(f"all {self.last_step} steps are done; {fix}")

        with contextlib.closing(self.prefetched), self.profiler or contextlib.nullcontext():
            try:
                due = self.config.validation.due(self.step, last=self.step == self.last_step)
                if due and on_rank0(lambda: not has_validation(self.job.folder, self.step)):
                    self.validate(self.step)  # the run was stopped in it
                for step in range(self.first_step, self.last_step + 1):
                    self.advance(step)
                    if self.profiler is not None:
                        self.profiler.end_step(step)
            except Stopped as stopped:
                stopped_by = str(stopped)
                self.metrics.settle()
                if self.checkpointer.saves and self.saved_step < self.step:
                    self.save()
            except RunError:
                with contextlib.suppress(RunError):  # report the first error, not a later one
                    self.checkpointer.wait()
                    self.report_progress()
                raise

        self.checkpointer.wait()
        gc.unfreeze()
        self.report_progress()
        self.metrics.close()
        return stopped_by

    def advance(self, step: int) -> None:
        """Train and log one step. Then, outside its time, validate, save and collect garbage."""
        config, first, last = self.config, step == self.first_step, step == self.last_step

        # The step. In the first one, check that float8 runs where the config asks for it. In later
        # ones, measure float8's numerics when due.
        observer = StepObserver() if first else None
        freq = config.float8.log_numerics_freq
        numerics = self.numerics if freq and step % freq == 0 and not first else None
        with observer or (numerics.observe() if numerics else contextlib.nullcontext()):
            values = self.train_step(step)
        logged = self.metrics.end_step(values)
        for call in self.after_step:
            call(self, values)
        if numerics:
            self.metrics.log_numerics(step, numerics.figures())
        if observer:
            strict = config.debug.deterministic
            observer.report(self.model, self.built.asked, step=step, deterministic=strict)
        self.step = step

        # Validation and checkpoint. A step's record is on disk before its checkpoint.
        saves = self.checkpointer.due(step, last=last)
        if saves or last:
            self.metrics.settle()
            if error := self.metrics.skips_error(config.training.max_consecutive_skips):
                raise error  # after settling, all ranks have the same counts
        if config.validation.due(step, last=last):
            self.validate(step)
        if saves:
            self.save()

        # Collect garbage at the same step on every rank.
        if first or step % config.training.gc_freq == 0:
            with self.metrics.outside_step("gc", step=step):
                gc.collect()
        if first:
            gc.freeze()  # never scan objects again that live as long as the run
            set_timeouts(config.comm.train_timeout_seconds, but_of=self.checkpointer.group)
            self.watchdog.timeout_s = config.comm.train_timeout_seconds
        if saves or last or (logged and time.monotonic() - self.reported_at > STATUS_SECONDS):
            self.report_progress()

    def train_step(self, step: int) -> StepValues:
        """Train on the global batch of `step`: forward and backward, clip, guard, update."""
        training, batch_sizes, degrees = self.config.training, self.job.batch, self.job.degrees
        lr = set_learning_rate(self.optimizer, self.config, step=step, last_step=self.last_step)

        # Forward and backward. Each rank sums its share of the mean loss over its microbatches;
        # FSDP averages the gradients over ranks, after each of them or after the last one.
        batches = self.next_batches(self.prefetched)
        scale = 1 / (len(batches) * self.job.microbatch_tokens)
        loss = self.microbatches.train(batches, scale=scale)

        # Exchange losses: [pp, dp * cp], 0 but for the last stage; summed over stages, [dp * cp].
        self.watchdog.at(step, "optimizer")
        rank_losses = all_gather(loss, self.groups.losses).view(degrees.pp, -1).sum(0)
        mean_loss = rank_losses.mean()
        share, imbalance = self.attention_figures(batches)

        # Update, unless the loss or the gradient is not finite, or the loss is a spike.
        grad_norm = clip_gradients(
            self.model.parameters(), training.max_norm, stages=self.groups.stages
        )
        parameter_device, grad_norm = grad_norm.device, grad_norm.to(self.device)  # CPU offload
        found_inf = self.guard.found_inf(mean_loss, grad_norm)
        step_unless(self.optimizer, found_inf.to(parameter_device))
        self.optimizer.zero_grad()
        update_scales(self.model, self.config.float8)

        self.tokens += batch_sizes.global_batch_size * training.seq_len
        return StepValues(
            step=step,
            tokens=self.tokens,
            loss=mean_loss,
            loss_max=rank_losses.max(),
            grad_norm=grad_norm,
            skipped_steps=self.guard.skipped_steps,
            consecutive_skips=self.guard.consecutive_skips,
            lr=lr,
            epochs=self.batches.passes(step),
            attention_share=share,
            attention_imbalance=imbalance,
        )

    def attention_figures(self, batches: list[Batch]) -> tuple[Tensor | None, Tensor | None]:
        """Return attention_share and attention_imbalance of a step, None without document masks."""
        job, bos_id = self.job, self.job.model_args.document_bos_id
        if bos_id is None:
            return None, None
        part = self.built.stages[0].shard_sequence
        squares = [
            document_squares(tokens, bos_id=bos_id, shard_sequence=part) for tokens, _ in batches
        ]
        of_ranks = all_gather(torch.stack(squares), self.groups.losses)
        ranks = job.degrees.dp * job.degrees.cp  # the stages of a pipeline have the same documents
        whole = job.batch.global_batch_size * self.config.training.seq_len**2
        return document_values(of_ranks[:ranks], whole=whole)

    def next_batches(self, batches: Iterator[Batch]) -> list[Batch]:
        """Return this rank's next batches, as many as a step has, or fewer at the end, on its
        device. Raises an error of any rank, and `Stopped` after a signal."""
        self.watchdog.at(self.step + 1, "data")
        taken, error = [], None
        try:
            with self.metrics.timed("data"):
                taken = list(itertools.islice(batches, self.job.batch.grad_accum_steps))
        except RunError as caught:
            error = caught

        # Agree whether to go on: otherwise ranks would wait for one that has left.
        self.watchdog.at(self.step + 1, "agreement")
        max_skips = self.config.training.max_consecutive_skips
        error = error or self.checkpointer.failure() or self.metrics.skips_error(max_skips)
        asked, times = self.watchdog.stop_signal.received, self.metrics.own_times()
        stop, rank_times = agree(stop=asked, error=error, figures=times)
        if self.metrics.stage_times is not None:
            self.metrics.stage_times.exchanged(rank_times)
        if stop:
            raise Stopped(signal.Signals(stop).name)

        self.watchdog.at(self.step + 1, "forward and backward")
        return [
            (tokens.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True))
            for tokens, labels in taken
        ]

    @torch.no_grad()
    def validate(self, step: int) -> None:
        """Log the mean loss over the validation windows."""
        assert self.validation_batches is not None, "validation is enabled"
        with self.metrics.outside_step("validation", step=step):
            tokens = self.validation_batches.samples * self.validation_batches.corpus.seq_len
            loss = torch.zeros((), device=self.device)
            batches = iter(self.validation_batches)
            while taken := self.next_batches(batches):
                loss += self.microbatches.evaluate(taken, scale=1 / tokens)
            dist.all_reduce(loss, group=self.groups.losses)
            for stage in self.built.stages:
                free_gathered(stage)
            self.watchdog.at(step, "samples")
            samples = self.samples.make() if self.samples is not None else []
        self.metrics.write_scalars(step, {"validation_loss": loss.item()})
        self.metrics.write_samples(step, samples)

    def save(self) -> None:
        """Save the state after the last finished step, if the run folder is still this run's."""
        self.watchdog.at(self.step, "checkpoint")
        folder = self.run_folder
        on_rank0(lambda: None if folder is None else folder.check_is_ours(step=self.step))
        with self.metrics.outside_step("checkpoint", step=self.step):
            self.checkpointer.save(self.progress(), last=self.step == self.last_step)
        self.saved_step = self.step

    def progress(self) -> TrainingProgress:
        """Return the progress to store in a checkpoint of the last finished step."""
        loss_mean = self.guard.loss_mean.item()
        return TrainingProgress(
            step=self.step,
            samples=self.batches.samples(self.step),
            tokens=self.tokens,
            data=self.batches.identity(),
            skipped_steps=int(self.guard.skipped_steps.item()),
            consecutive_skips=int(self.guard.consecutive_skips.item()),
            loss_mean=None if math.isnan(loss_mean) else loss_mean,
        )

    def report_progress(self) -> None:
        """Write the last finished step and the last checkpoint into status.json."""
        self.reported_at = time.monotonic()
        if self.run_folder is not None:
            saved = self.checkpointer.last_saved
            known = {"last_checkpoint": saved and str(saved), "total_steps": self.last_step}
            device, world_size = self.metrics.peaks.device_name, self.metrics.n_devices
            known |= {"device": device, "world_size": world_size}
            figures = self.metrics.progress(last_step=self.last_step)
            self.run_folder.update(step=self.step, **known, **figures)
