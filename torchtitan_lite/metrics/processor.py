"""Measure each step's time and throughput without synchronizing the device.

The host runs ahead of the device. So the tensors of a step are copied to the host behind the step's
own work, and times are between events that are recorded there too. A later call makes the record,
once the device has passed the end of the step: usually the call of the next step.
"""

import math
import statistics
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchtitan_lite.base.errors import NumericError

from .base_writer import Writer
from .clock import HostEvent, record_cuda_event
from .figures import BETWEEN_STEPS, CastErrors, StepRecord
from .flops import FlopsLedger, compute_rates
from .hardware import Peaks, peak_memory_gib, total_memory_gib
from .stage_times import StageFigures, StageTimes
from .summary import FINAL_STEPS, Summary
from .values import StepValues
from .writers import warn_left_out

STEP_TIME_WEIGHT = 0.1
"""Weight of the newest record in the moving average of step times."""
AVERAGED = ("attention_share", "attention_imbalance")
"""Values of a step that a record has as averages."""
Span = tuple[str, Any, Any]
"""Name and the events of begin and end: of a `step`, of its waits for `data` and `compile`, and
with pipelines of the `pipeline` and of each computation of a `stage N` in it."""


@dataclass(frozen=True)
class _EndedStep:
    """A step whose values are on their way to the host."""

    step: int
    time: float
    spans: list[Span]
    computed: StepValues
    copy: Tensor
    """Those on the device, copied to the host; complete after the event `arrives`."""
    arrives: Any

    def values(self) -> StepValues:
        """Return the step's values as numbers, once they have arrived."""
        numbers = zip(self.computed.on_device(), self.copy.tolist(), strict=True)
        return replace(self.computed, **dict(numbers))


@dataclass(frozen=True)
class Skips:
    """Consecutive steps without an update, and the figures of the last of them."""

    consecutive: int = 0
    step: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0

    def error(self, limit: int) -> NumericError | None:
        """Return the error that ends a run after `limit` steps, max_consecutive_skips."""
        if self.consecutive < limit:
            return None
        return NumericError(
            f"[training] max_consecutive_skips = {limit}: the {self.consecutive} steps up to "
            f"{self.step} had no update, as the loss or gradient of a rank was not finite, or the "
            f"loss a spike; step {self.step}: loss = {self.loss}, grad_norm = {self.grad_norm}. "
            "Lower [optimizer] lr, lengthen [lr_scheduler] warmup_steps, or look at the data."
        )


class MetricsProcessor:
    """Time the steps of a run, make a record of each logged step, and pass it to the writers.

    A step lasts from the end of the previous one, at first from the processor's creation, to its
    own end, without the time under `outside_step`. Rates also leave out data waits and compilation.
    """

    def __init__(
        self,
        *,
        log_freq: int,
        ledger: FlopsLedger,
        peaks: Peaks,
        device: torch.device,
        n_devices: int,
        writers: list[Writer],
        start_tokens: int,
        earlier_losses: Sequence[float] = (),
        stage_times: StageTimes | None = None,
    ) -> None:
        """`start_tokens` is the number of tokens trained on before this process, 0 in a new run,
        `earlier_losses` the losses of the last steps that were logged then. Only ranks that write
        metrics have writers, only those of pipelines `stage_times`."""
        self.log_freq, self.ledger, self.peaks = log_freq, ledger, peaks
        self.device, self.n_devices, self.writers = device, n_devices, writers
        self.stage_times = stage_times
        self.skips = Skips()
        """The longest series of steps without an update that the host knows of."""

        # The steps that the host has not read yet, and the time of the one that runs.
        self.record_event: Any = record_cuda_event if device.type == "cuda" else HostEvent
        self._began = self._compile_began = self.record_event()
        self._spans: list[Span] = []
        self._pending: deque[_EndedStep] = deque()
        self._last_ended: _EndedStep | None = None

        # Records.
        self._last_record: StepRecord | None = None
        self._losses = deque(earlier_losses, maxlen=FINAL_STEPS)
        self._validation_loss: float | None = None
        self._tokens = start_tokens  # at the last record
        self._since_record: dict[str, float] = defaultdict(float)  # number of steps, and seconds
        self._totals: dict[str, float] = defaultdict(float)  # the same, of all steps but the first
        self._steady_tps = array("d")  # of each record but the first; 8 bytes a record
        self._times = {"training": 0.0, "data": 0.0, "compile": 0.0}
        self._mean_step_s: float | None = None  # moving average over records, without warm-up

    # ----- The clock -----

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the time as the step's span NAME, unless within `outside_step`."""
        began = self.record_event()
        yield
        self._spans.append((name, began, self.record_event()))

    def compile_began(self) -> None:
        """Count the time until `compile_ended` as compilation, unless within `outside_step`."""
        self._compile_began = self.record_event()

    def compile_ended(self) -> None:
        """End what `compile_began` began."""
        self._spans.append(("compile", self._compile_began, self.record_event()))

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
        self._write_time(step, name, began.elapsed_time(self._began) / 1000)

    # ----- Steps -----

    def end_step(self, step: int, values: StepValues) -> bool:
        """Take what `step` computed. Return whether records were made, of this or earlier steps.

        Each multiple of log_freq is logged, and this process's first step, alone, because it
        includes warm-up.
        """
        # The copy is queued behind the step's work, and the event behind the copy.
        copy = torch.stack([*values.on_device().values()]).to("cpu", non_blocking=True)
        ended = self.record_event()

        spans = [*self._spans, ("step", self._began, ended)]
        self._last_ended = _EndedStep(step, time.time(), spans, values, copy, arrives=ended)
        self._pending.append(self._last_ended)
        self._began, self._spans = ended, []
        return self._take_arrived()

    def settle(self) -> None:
        """Wait for the device, and put the records of all ended steps on disk, with one of the last
        step in any case."""
        if (last := self._last_ended) is None:
            return
        last.arrives.synchronize()
        self._take_arrived()
        if self._last_record is None or self._last_record.step < last.step:
            self._write_record(last, last.values())
        self._tell(lambda writer: writer.flush())

    def _take_arrived(self) -> bool:
        """Take the steps that the device has finished, in order. Return whether one was logged."""
        previous = self._last_record
        while self._pending and self._pending[0].arrives.query():
            ended = self._pending.popleft()
            self._since_record["steps"] += 1
            for name, began, end in ended.spans:
                seconds = began.elapsed_time(end) / 1000
                self._since_record[name] += seconds
                self._totals[name] += seconds
            self._totals["steps"] += 1

            values = ended.values()
            for name in AVERAGED:
                if (value := getattr(values, name)) is not None:
                    self._since_record[name] += value
            if (consecutive := int(values.consecutive_skips)) > self.skips.consecutive:
                loss, grad_norm = float(values.loss), float(values.grad_norm)
                self.skips = Skips(consecutive, ended.step, loss, grad_norm)
            if self._last_record is None or ended.step % self.log_freq == 0:
                self._write_record(ended, values)
        return self._last_record is not previous

    def own_times(self) -> list[float]:
        """Return what the other ranks of a pipeline are to know of this one, see `StageTimes`."""
        if self.stage_times is None:
            return []
        return self.stage_times.own(self._totals, peak_memory_gib(self.device))

    # ----- Records -----

    def _write_record(self, ended: _EndedStep, values: StepValues) -> None:
        """Make the record of the steps since the last one, of which `ended` with its `values` is
        the newest, and pass it to the writers."""
        # Only training counts for rates.
        since, self._since_record = self._since_record, defaultdict(float)
        steps, data_s, compile_s = since["steps"], since["data"], since["compile"]
        training_s = since["step"] - data_s - compile_s
        self._times["training"] += training_s
        self._times["data"] += data_s

        tokens, self._tokens = values.tokens - self._tokens, values.tokens
        tps = tokens / training_s / self.n_devices
        step_time_s, data_time_s = (training_s + data_s) / steps, data_s / steps
        if self._last_record is None:
            self._totals.clear()
        else:
            self._steady_tps.append(tps)
            before = step_time_s if self._mean_step_s is None else self._mean_step_s
            self._mean_step_s = before + STEP_TIME_WEIGHT * (step_time_s - before)

        memory_gib, total_gib = peak_memory_gib(self.device), total_memory_gib(self.device)
        share, imbalance = (since[name] / steps if name in since else None for name in AVERAGED)
        rates = compute_rates(tps, ledger=self.ledger, peaks=self.peaks, attention_share=share)
        of_stages = StageFigures()
        if self.stage_times is not None:
            of_stages = self.stage_times.figures(tokens / steps, self.peaks)
        self._last_record = StepRecord(
            step=ended.step,
            time=ended.time,
            tokens=values.tokens,
            epochs=values.epochs,
            loss=float(values.loss),
            loss_max=float(values.loss_max),
            grad_norm=float(values.grad_norm),
            lr=values.lr,
            skipped_steps=int(values.skipped_steps),
            attention_imbalance=imbalance,
            **asdict(rates),
            **asdict(of_stages),
            step_time_s=step_time_s,
            data_time_s=data_time_s,
            data_time_pct=100 * data_time_s / step_time_s,
            memory_gib=memory_gib,
            memory_pct=None if total_gib is None else 100 * memory_gib / total_gib,
            approximate_mfu=self.peaks.approximate,
        )

        record = self._last_record
        self._losses.append(record.loss)
        self._tell(lambda writer: writer.write(record))
        if compile_s:
            self._write_time(ended.step, "compile", compile_s)

    def log_numerics(self, step: int, casts: CastErrors) -> None:
        """Write the errors of the casts of `step`, the last that ended. Waits for the device."""
        assert self._last_ended is not None, "a step has ended"
        self._last_ended.arrives.synchronize()
        self._take_arrived()
        self._tell(lambda writer: writer.write_numerics(step, casts))

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write figures that belong to no step's record, such as a validation loss."""
        self._validation_loss = scalars.get("validation_loss", self._validation_loss)
        self._tell(lambda writer: writer.write_scalars(step, scalars))

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write texts that the model generated after a step, if any."""
        if samples:
            self._tell(lambda writer: writer.write_samples(step, samples))

    def _write_time(self, step: int, name: str, seconds: float) -> None:
        assert f"{name}_s" in BETWEEN_STEPS, f"{name}_s is missing in figures.BETWEEN_STEPS"
        self._times[name] = self._times.get(name, 0.0) + seconds
        self.write_scalars(step, {f"{name}_s": seconds})

    def progress(self, *, last_step: int) -> dict[str, float | None]:
        """Return loss, tps and mfu of the last record, and the seconds to `last_step`; None if
        unknown or not finite."""
        record = self._last_record
        figures: dict[str, float | None] = dict.fromkeys(("loss", "tps", "mfu", "eta_s"))
        if record is not None:
            figures |= {"loss": record.loss, "tps": record.tps, "mfu": record.mfu}
            if self._mean_step_s is not None:
                figures["eta_s"] = (last_step - record.step) * self._mean_step_s
        known = {name: x for name, x in figures.items() if x is not None and math.isfinite(x)}
        return dict.fromkeys(figures) | known

    def summary(self) -> Summary | None:
        """Return the outcome so far, or None if no step was trained."""
        if self._last_record is None:
            return None
        tps = statistics.median(self._steady_tps) if self._steady_tps else None
        mfu = None
        if tps is not None:
            mfu = compute_rates(tps, ledger=self.ledger, peaks=self.peaks).mfu
        return Summary(
            last=self._last_record,
            losses=tuple(self._losses),
            validation_loss=self._validation_loss,
            tps=tps,
            mfu=mfu,
            times_s=dict(self._times),
            bubble_pct=self.stage_times.bubble_pct() if self.stage_times else None,
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
