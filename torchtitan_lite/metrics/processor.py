"""Measure each step's time and throughput without synchronizing the device.

The host runs ahead of the device. So the tensors of a step are copied to the host behind the step's
own work, and times are differences of a `Clock`'s moments. A later call makes the record, once the
device has passed the end of the step: usually the call of the next step.
"""

import statistics
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchtitan_lite.logger import logger

from .clock import Clock, build_clock
from .figures import BETWEEN_STEPS, CastErrors, StepRecord
from .flops import FlopsLedger
from .hardware import Peaks, peak_memory_gib, total_memory_gib
from .rates import Rates, compute_rates, effective_peak
from .records import Summary, Writer

StepValues = dict[str, Any]
"""Figures that a step computed, by their names in StepRecord, and `consecutive_skips`: the steps
without an update since the last one that had one. A figure is a number, or a float32 scalar on the
device, already reduced over the ranks."""

Spans = defaultdict[str, list[tuple[Any, Any]]]
"""Moments of begin and end: of a step, and within it of its waits for `data` and of `compile`."""


@dataclass(frozen=True)
class _EndedStep:
    """A step whose values are on their way to the host."""

    step: int
    logged: bool
    time: float
    spans: Spans
    computed: StepValues
    copy: Tensor
    """The tensors in `computed`, on the host."""
    arrives: Any
    """The moment at which the copy is complete."""

    def values(self) -> StepValues:
        """Return the step's values as numbers, once they have arrived."""
        numbers = iter(self.copy.tolist())
        return {
            name: next(numbers) if isinstance(value, Tensor) else value
            for name, value in self.computed.items()
        }


@dataclass(frozen=True)
class Skips:
    """Consecutive steps without an update, and the figures of the last of them."""

    consecutive: int = 0
    step: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0


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
        writers: Sequence[Writer],
        start_tokens: int,
        clock: Clock | None = None,
    ) -> None:
        """`start_tokens` is the number of tokens trained on before this process, 0 in a new run.
        Only the main rank has writers."""
        self.log_freq = log_freq
        self.peaks = peaks
        self.skips = Skips()
        """The longest series of steps without an update that the host knows of."""
        self._ledger = ledger
        self._rates = partial(compute_rates, ledger=ledger, peaks=peaks)
        self._device = device
        self._n_devices = n_devices
        self._writers = writers

        self._clock = clock or build_clock(device)
        self._began = self._compile_began = self._clock.now()
        self._outside = False
        self._spans: Spans = defaultdict(list)
        self._pending: deque[_EndedStep] = deque()
        self._last_ended: _EndedStep | None = None

        self._last_record: StepRecord | None = None
        self._tokens = start_tokens  # at the last record
        self._since_record: dict[str, float] = defaultdict(float)  # number of steps, and seconds
        self._steady_tps = array("d")  # of each record but the first; 8 bytes a record
        self._times = {"training": 0.0, "data": 0.0, "compile": 0.0}
        self._warned_of_peak = False

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Count the time as the step's wait for data, unless within `outside_step`."""
        began = self._clock.now()
        yield
        if not self._outside:
            self._spans["data"].append((began, self._clock.now()))

    def compile_began(self) -> None:
        """Count the time until `compile_ended` as compilation, unless within `outside_step`."""
        self._compile_began = self._clock.now()

    def compile_ended(self) -> None:
        """End what `compile_began` began."""
        if not self._outside:
            self._spans["compile"].append((self._compile_began, self._clock.now()))

    @contextmanager
    def outside_step(self, name: str, *, step: int) -> Iterator[None]:
        """Leave the time after `step` out of every step, and write it as the figure NAME_s."""
        # What the steps have queued on the device is their time, so wait for it.
        began = self._clock.now()
        self._spans["step"].append((self._began, began))
        self._clock.wait(began)
        self._take_arrived()

        self._outside = True
        yield
        self._outside = False

        self._began = self._clock.now()
        self._clock.wait(self._began)
        self._write_time(step, name, self._clock.seconds(began, self._began))

    def end_step(self, step: int, values: StepValues) -> bool:
        """Take what `step` computed. Return whether records were made, of this or earlier steps.

        Each multiple of log_freq is logged, and this process's first step, alone, because it
        includes warm-up.
        """
        # The copy is queued behind the step's work, and the moment behind the copy.
        on_device = [value for value in values.values() if isinstance(value, Tensor)]
        copy = torch.stack(on_device).to("cpu", non_blocking=True)
        ended_at = self._clock.now()

        self._spans["step"].append((self._began, ended_at))
        self._last_ended = _EndedStep(
            step=step,
            logged=self._last_ended is None or step % self.log_freq == 0,
            time=time.time(),
            spans=self._spans,
            computed=values,
            copy=copy,
            arrives=ended_at,
        )
        self._pending.append(self._last_ended)
        self._began, self._spans = ended_at, defaultdict(list)
        return self._take_arrived()

    def settle(self) -> None:
        """Wait for the device, and put the records of all ended steps on disk, with one of the last
        step in any case."""
        if (last := self._last_ended) is None:
            return
        self._clock.wait(last.arrives)
        self._take_arrived()
        if self._last_record is None or self._last_record.step < last.step:
            self._write_record(last, last.values())
        for writer in self._writers:
            writer.flush()

    def _take_arrived(self) -> bool:
        """Take the steps that the device has finished, in order. Return whether one was logged."""
        previous = self._last_record
        while self._pending and self._clock.passed(self._pending[0].arrives):
            ended = self._pending.popleft()
            self._since_record["steps"] += 1
            for name, spans in ended.spans.items():
                self._since_record[name] += sum(self._clock.seconds(*span) for span in spans)

            values = ended.values()
            if (consecutive := int(values["consecutive_skips"])) > self.skips.consecutive:
                self.skips = Skips(consecutive, ended.step, values["loss"], values["grad_norm"])
            if ended.logged:
                self._write_record(ended, values)
        return self._last_record is not previous

    def _write_record(self, ended: _EndedStep, values: StepValues) -> None:
        """Make the record of the steps since the last one, and pass it to the writers."""
        # Only training counts for rates.
        since, self._since_record = self._since_record, defaultdict(float)
        steps, data_s, compile_s = since["steps"], since["data"], since["compile"]
        training_s = since["step"] - data_s - compile_s
        self._times["training"] += training_s
        self._times["data"] += data_s

        tokens, self._tokens = values["tokens"] - self._tokens, values["tokens"]
        rates = self._rates(tokens=tokens, seconds=training_s, n_devices=self._n_devices)
        self._warn_of_peak(ended.step, rates)
        if self._last_record is not None:
            self._steady_tps.append(rates.tps)

        step_time_s, data_time_s = (training_s + data_s) / steps, data_s / steps
        memory_gib, total_gib = peak_memory_gib(self._device), total_memory_gib(self._device)
        computed = {name: value for name, value in values.items() if name != "consecutive_skips"}
        computed["skipped_steps"] = int(values["skipped_steps"])
        self._last_record = StepRecord(
            step=ended.step,
            **computed,
            **asdict(rates),
            step_time_s=step_time_s,
            data_time_s=data_time_s,
            data_time_pct=100 * data_time_s / step_time_s,
            memory_gib=memory_gib,
            memory_pct=None if total_gib is None else 100 * memory_gib / total_gib,
            time=ended.time,
            approximate_mfu=self.peaks.approximate,
        )

        for writer in self._writers:
            writer.write(self._last_record)
        if compile_s:
            self._write_time(ended.step, "compile", compile_s)

    def _warn_of_peak(self, step: int, rates: Rates) -> None:
        """Log once that utilisations above 100 % of an approximate peak are left out."""
        peak = effective_peak(self._ledger.by_precision, self.peaks.tflops)
        if peak and rates.mfu is None and not self._warned_of_peak:
            self._warned_of_peak = True
            logger.info(
                f"step {step}: mfu would be {rates.tflops / peak:.0%}, so the CPU's peak was "
                "measured too low; a utilisation above 100% is n/a"
            )

    def log_validation(self, step: int, loss: float) -> None:
        """Write the validation loss after `step`."""
        self._write_scalars(step, {"validation_loss": loss})

    def log_numerics(self, step: int, casts: CastErrors) -> None:
        """Write the errors of the casts of `step`, the last that ended. Waits for the device."""
        assert self._last_ended is not None, "a step has ended"
        self._clock.wait(self._last_ended.arrives)
        self._take_arrived()
        for writer in self._writers:
            writer.write_numerics(step, casts)

    def summary(self) -> Summary | None:
        """Return the outcome so far, or None if no step was trained."""
        if self._last_record is None:
            return None
        tps = statistics.median(self._steady_tps) if self._steady_tps else None
        mfu = None if tps is None else self._rates(tokens=tps, seconds=1.0, n_devices=1).mfu
        return Summary(self._last_record, tps, mfu, times_s=dict(self._times))

    def close(self) -> None:
        """Close the writers."""
        for writer in self._writers:
            writer.close(self.summary())

    def _write_time(self, step: int, name: str, seconds: float) -> None:
        assert f"{name}_s" in BETWEEN_STEPS, f"{name}_s is missing in figures.BETWEEN_STEPS"
        self._times[name] = self._times.get(name, 0.0) + seconds
        self._write_scalars(step, {f"{name}_s": seconds})

    def _write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.write_scalars(step, scalars)
