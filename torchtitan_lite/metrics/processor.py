"""Measure each step's time and throughput without synchronizing the device.

The host runs ahead of the device. So a step's tensors are copied to the host behind its own work,
and times are between events that are recorded there. A later call makes the record, once the device
has passed the end of the step: usually the call of the next step.
"""

import statistics
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchtitan_lite.base.errors import NumericError

from .base_writer import Writer
from .figures import CastErrors, StepRecord
from .flops import FlopsLedger, compute_rates
from .hardware import HostEvent, Peaks, peak_memory_gib, record_cuda_event, total_memory_gib
from .summary import FINAL_STEPS, Summary
from .writers import warn_left_out

if TYPE_CHECKING:
    from .stage_times import StageTimes

Scalar = Tensor | float
"""A number, or a floating-point scalar on the device."""
AVERAGED = ("attention_share", "attention_imbalance")
"""Values of a step that a record has as averages."""
Span = tuple[str, Any, Any]
"""Name and the events of begin and end: of a `step`, its `data` and `compile`, and with pipelines
of the `pipeline` and each computation of a `stage N` in it."""


@dataclass(frozen=True, kw_only=True)
class StepValues:
    """What a step computed, reduced over the ranks, by the names of figures in StepRecord."""

    step: int
    tokens: int
    epochs: Mapping[str, float]
    loss: Scalar
    loss_max: Scalar
    grad_norm: Scalar
    lr: float
    skipped_steps: Scalar
    consecutive_skips: Scalar
    """Steps without an update since the last one that had one."""
    attention_share: Scalar | None = None
    """With document masks, as the next one: see `flops.document_values`."""
    attention_imbalance: Scalar | None = None

    def on_device(self) -> dict[str, Tensor]:
        """Return the values that are on the device, by name."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}


@dataclass(frozen=True)
class _EndedStep:
    """A step whose values are on their way to the host, in `copy` after the event `arrives`."""

    time: float
    spans: list[Span]
    computed: StepValues
    copy: Tensor
    arrives: Any

    def values(self) -> StepValues:
        """Return the step's values as numbers, once they have arrived."""
        numbers = zip(self.computed.on_device(), self.copy.tolist(), strict=True)
        return replace(self.computed, **dict(numbers))


class MetricsProcessor:
    """Time the steps of a run, make a record of each logged step, and pass it to the writers.

    A step lasts from the end of the previous one to its own end, without the time under
    `outside_step`. Rates also leave out data waits and compilation."""

    def __init__(
        self,
        *,
        log_freq: int,
        ledger: FlopsLedger,
        peaks: Peaks,
        device: torch.device,
        n_devices: int,
        seq_len: int,
        writers: list[Writer],
        start_tokens: int,
        stage_times: "StageTimes | None" = None,
    ) -> None:
        """`start_tokens` is the number of tokens of earlier processes of the run. `stage_times`
        are of a pipeline."""
        self.log_freq, self.ledger, self.peaks = log_freq, ledger, peaks
        self.device, self.n_devices, self.seq_len = device, n_devices, seq_len
        self.writers, self.stage_times = writers, stage_times
        self._most_skips: StepValues | None = None  # of the step with the most consecutive ones

        # The steps that the host has not read yet, and the time of the one that runs.
        self.record_event: Any = record_cuda_event if device.type == "cuda" else HostEvent
        self._began = self.record_event()
        self._spans: list[Span] = []
        self._pending: deque[_EndedStep] = deque()
        self._last_ended: _EndedStep | None = None

        # Records.
        self._last_record: StepRecord | None = None
        self._losses: deque[float] = deque(maxlen=FINAL_STEPS)
        self._validation: tuple[int, float] | None = None  # step and loss of the last one
        self._steady_tps = array("d")  # of each record but the first; 8 bytes a record
        self._tokens = start_tokens  # at the last record

        # Sums over the steps: their number, the seconds of their spans, and the averaged values.
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._recorded = self._totals.copy()  # at the last record
        self._outside_s: defaultdict[str, float] = defaultdict(float)

    # ----- The clock -----

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the time as the step's span NAME, unless within `outside_step`."""
        began = self.record_event()
        yield
        self._spans.append((name, began, self.record_event()))

    @contextmanager
    def outside_step(self, name: str, *, step: int) -> Iterator[None]:
        """Leave the time after `step` out of every step, and write it as the figure NAME_s."""
        # What the steps have queued on the device is their time, so wait for it.
        began = self.record_event()
        self._spans.append(("step", self._began, began))
        began.synchronize()
        self._take_arrived()

        # Waits for data and compilation in here are not the step's.
        spans, self._spans = self._spans, []
        yield
        self._spans = spans

        self._began = self.record_event()
        self._began.synchronize()
        seconds = began.elapsed_time(self._began) / 1000
        self._outside_s[name] += seconds
        self.write_scalars(step, {f"{name}_s": seconds})

    # ----- Steps -----

    def end_step(self, values: StepValues) -> bool:
        """Take what a step computed. Return whether records were made, of this or earlier steps:
        of multiples of log_freq, and of this process's first step, which includes warm-up."""
        # The copy is queued behind the step's work, and the event behind the copy.
        copy = torch.stack([*values.on_device().values()]).to("cpu", non_blocking=True)
        ended, first = self.record_event(), self._last_ended is None

        spans = [*self._spans, ("step", self._began, ended)]
        self._last_ended = _EndedStep(time.time(), spans, values, copy, arrives=ended)
        self._pending.append(self._last_ended)
        self._began, self._spans = ended, []
        logged = self._take_arrived()
        if first:  # a writer that opens at the first record delays no step
            self._began = self.record_event()
        return logged

    def settle(self) -> None:
        """Wait for the device, and put all records on disk, with one of the last step."""
        if (last := self._last_ended) is None:
            return
        last.arrives.synchronize()
        self._take_arrived()
        if self._last_record is None or self._last_record.step < last.computed.step:
            self._write_record(last, last.values())
        self._tell(lambda writer: writer.flush())

    def _take_arrived(self) -> bool:
        """Take the steps that the device has finished, in order. Return whether one was logged."""
        previous = self._last_record
        while self._pending and self._pending[0].arrives.query():
            ended = self._pending.popleft()
            self._totals["steps"] += 1
            for name, began, end in ended.spans:
                self._totals[name] += began.elapsed_time(end) / 1000

            values = ended.values()
            for name in AVERAGED:
                if (value := getattr(values, name)) is not None:
                    self._totals[name] += value
            most = self._most_skips
            if most is None or values.consecutive_skips > most.consecutive_skips:
                self._most_skips = values
            if self._last_record is None or values.step % self.log_freq == 0:
                self._write_record(ended, values)
        return self._last_record is not previous

    def skips_error(self, limit: int) -> NumericError | None:
        """Return the error that ends a run after `limit` steps, max_consecutive_skips."""
        if (most := self._most_skips) is None or most.consecutive_skips < limit:
            return None
        return NumericError(
            f"[training] max_consecutive_skips = {limit}: the {most.consecutive_skips:.0f} steps "
            f"up to {most.step} had no update, as the loss or gradient of a rank was not finite, "
            f"or the loss a spike; step {most.step}: loss = {most.loss}, "
            f"grad_norm = {most.grad_norm}. Lower [optimizer] lr, lengthen [lr_scheduler] "
            "warmup_steps, or look at the data."
        )

    def own_times(self) -> list[float]:
        """Return the figures to exchange with the ranks of a pipeline; none without one."""
        if self.stage_times is None:
            return []
        return self.stage_times.own(self._totals, peak_memory_gib(self.device))

    # ----- Records -----

    def _write_record(self, ended: _EndedStep, values: StepValues) -> None:
        """Write the record of the steps since the last one, of which `ended` is the newest."""
        # Only training counts for rates.
        totals, recorded = self._totals.copy(), self._recorded
        since = defaultdict(float, {name: totals[name] - recorded[name] for name in totals})
        self._recorded = totals
        steps, data_s, compile_s = since["steps"], since["data"], since["compile"]
        training_s = since["step"] - data_s - compile_s

        tokens, self._tokens = values.tokens - self._tokens, values.tokens
        tps = tokens / training_s / self.n_devices
        step_time_s, data_time_s = (training_s + data_s) / steps, data_s / steps
        if self._last_record is not None:
            self._steady_tps.append(tps)

        memory_gib, on_gpu = peak_memory_gib(self.device), self.device.type == "cuda"
        share, imbalance = (since[name] / steps if name in since else None for name in AVERAGED)
        rates = compute_rates(tps, ledger=self.ledger, peaks=self.peaks, attention_share=share)
        stages = self.stage_times
        of_stages = {} if stages is None else stages.figures(tokens / steps, self.peaks)
        self._last_record = record = StepRecord(
            step=values.step,
            time=ended.time,
            tokens=values.tokens,
            epochs=values.epochs,
            loss=float(values.loss),
            loss_max=float(values.loss_max),
            grad_norm=float(values.grad_norm),
            lr=values.lr,
            skipped_steps=int(values.skipped_steps),
            sequences_per_s=tps / self.seq_len,
            attention_imbalance=imbalance,
            **rates,
            **of_stages,
            step_time_s=step_time_s,
            data_time_s=data_time_s,
            data_time_pct=100 * data_time_s / step_time_s,
            memory_gib=memory_gib,
            memory_pct=100 * memory_gib / total_memory_gib(self.device) if on_gpu else None,
            approximate_mfu=self.peaks.approximate,
        )
        self._losses.append(record.loss)
        self._tell(lambda writer: writer.write(record))
        if compile_s:
            self.write_scalars(values.step, {"compile_s": compile_s})

    def log_numerics(self, step: int, casts: CastErrors) -> None:
        """Write the errors of the casts of the last step. Waits for the device."""
        assert self._last_ended is not None, "a step has ended"
        self._last_ended.arrives.synchronize()
        self._take_arrived()
        self._tell(lambda writer: writer.write_numerics(step, casts))

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write figures that are in no record, such as a validation loss."""
        if "validation_loss" in scalars:
            self._validation = step, scalars["validation_loss"]
        self._tell(lambda writer: writer.write_scalars(step, scalars))

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write texts that the model generated after a step, if any."""
        if samples:
            self._tell(lambda writer: writer.write_samples(step, samples))

    def progress(self, *, last_step: int) -> dict[str, float | None]:
        """Return loss, tps and mfu of the last record, if there is one, and the seconds from it to
        `last_step`, which are not known while it includes warm-up."""
        if (record := self._last_record) is None:
            return {}
        left_s = (last_step - record.step) * record.step_time_s
        eta_s = left_s if self._steady_tps else None
        return {"loss": record.loss, "tps": record.tps, "mfu": record.mfu, "eta_s": eta_s}

    def summary(self) -> Summary | None:
        """Return the outcome so far, or None if no step was trained."""
        if self._last_record is None:
            return None
        tps = statistics.median(self._steady_tps) if self._steady_tps else None
        mfu = None if tps is None else self.peaks.utilisation(tps, self.ledger.by_precision)
        step_s, data_s, compile_s = (self._totals[name] for name in ("step", "data", "compile"))
        times_s = {"training": step_s - data_s - compile_s, "data": data_s, "compile": compile_s}
        return Summary(
            last=self._last_record,
            losses=tuple(self._losses),
            validation=self._validation,
            tps=tps,
            mfu=mfu,
            times_s=times_s | self._outside_s,
        )

    def close(self) -> None:
        """Close the writers."""
        self._tell(lambda writer: writer.close(self.summary()))

    def _tell(self, action: Callable[[Writer], None]) -> None:
        """Let every writer act. A spare one that fails is left out for the rest of the run."""
        for writer in list(self.writers):
            try:
                action(writer)
            except Exception as error:
                if not writer.spare:
                    raise
                self.writers.remove(writer)
                warn_left_out(writer.spare, error)
