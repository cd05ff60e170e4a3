"""A step's rates, and the clock and the book-keeping around them.

Nothing here waits for the device only to log. What a step leaves is copied to the host behind the
step's own work, and becomes a record once the copy has arrived, which is later than the call that
asked for it: one step, as a rule."""

import math
import statistics
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchtitan_lite.logger import logger

from .clock import Clock, build_clock
from .flops import FlopsLedger, Precision
from .hardware import Peaks, peak_memory_gib
from .records import Numerics, Record, Summary, Writer, format_mfu


@dataclass(frozen=True)
class Rates:
    """How fast each device trained; the utilisations in percent, None where a peak that one needs
    is unknown."""

    tps: float
    """Tokens per second per device."""
    tflops: float
    """TFLOPS per device."""
    mfu: float | None
    """Ideal seconds, every matmul at its own precision's peak, over the real seconds."""
    mfu_bf16_peak: float | None
    """All FLOPs over the bf16 peak: torchtitan's figure. Under float8 it can pass 100."""
    mfu_fp8_peak: float | None
    """All FLOPs over the fp8 peak, a lower bound; None under emulation, which never touches that
    peak."""
    mfu_achievable: float | None
    """As mfu, of the rates that matmuls reached on this device; None where they were not
    measured."""
    hfu: float | None
    """As mfu, with the matmuls that are computed again; None where the compiler decides which."""


_UTILISATIONS = ("mfu", "mfu_bf16_peak", "mfu_fp8_peak", "mfu_achievable", "hfu")


def ideal_seconds(
    flops: Mapping[Precision, int], tflops: Mapping[Precision, float]
) -> float | None:
    """Seconds for `flops`, each precision at its own peak of `tflops`; None where one that is in
    use has no known peak. The times add up, not the speeds."""
    used = {precision: count for precision, count in flops.items() if count}
    if not used.keys() <= tflops.keys():
        return None
    return sum(count / tflops[precision] for precision, count in used.items()) / 1e12


def effective_peak(
    flops: Mapping[Precision, int], tflops: Mapping[Precision, float]
) -> float | None:
    """The peak of a mix of precisions, TFLOPS: the harmonic mean of `tflops` weighted by `flops`;
    None where one that is in use has no known peak."""
    ideal = ideal_seconds(flops, tflops)
    return None if ideal is None else sum(flops.values()) / ideal / 1e12


def compute_rates(
    *, tokens: float, seconds: float, n_devices: int, ledger: FlopsLedger, peaks: Peaks
) -> Rates:
    """The rates of `n_devices` devices that trained on `tokens` tokens between them in
    `seconds`."""
    tps = tokens / seconds / n_devices

    def utilisation(ideal: float | None) -> float | None:
        return None if ideal is None else 100 * tps * ideal

    known, flops = peaks.tflops, ledger.by_precision
    with_recompute = {
        precision: count + ledger.recompute[precision] for precision, count in flops.items()
    }
    return Rates(
        tps=tps,
        tflops=ledger.total * tps / 1e12,
        mfu=utilisation(ideal_seconds(flops, known)),
        mfu_bf16_peak=utilisation(ideal_seconds({"bf16": ledger.total}, known)),
        mfu_fp8_peak=None
        if ledger.emulated
        else utilisation(ideal_seconds({"fp8": ledger.total}, known)),
        mfu_achievable=utilisation(ideal_seconds(flops, peaks.measured)),
        hfu=utilisation(ideal_seconds(with_recompute, known))
        if ledger.recompute_is_known
        else None,
    )


@dataclass(frozen=True)
class StepValues:
    """What a step produced. The tensors are float32 scalars on one device, already reduced over the
    ranks."""

    tokens: int
    """Trained on by all ranks since step 1."""
    epochs: Mapping[str, float]
    """How often each store of the training data was passed, by its name."""
    loss: Tensor
    """Mean over all ranks' tokens, nat."""
    loss_max: Tensor
    """The largest of the ranks' own losses, nat."""
    grad_norm: Tensor
    """Before clipping."""
    skipped_steps: Tensor
    """Steps of the run that had no update."""
    consecutive_skips: Tensor
    """Those since the last step that had one."""
    lr: float


Spans = list[tuple[Any, Any]]
"""Pairs of moments of the clock."""


@dataclass
class _Interval:
    """The steps since the last record, and the time that is theirs."""

    steps: int = 0
    spans: Spans = field(default_factory=list)
    data: Spans = field(default_factory=list)
    """Waits for data, within the spans."""
    compile: Spans = field(default_factory=list)
    """Compilation, within the spans."""

    def with_step(self, span: tuple[Any, Any]) -> "_Interval":
        """A copy that ends with one more step, at the end of `span`."""
        return _Interval(self.steps + 1, [*self.spans, span], list(self.data), list(self.compile))


@dataclass(frozen=True)
class Skips:
    """Steps in a row that had no update, and what the last of them came to."""

    consecutive: int = 0
    step: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0


@dataclass(frozen=True)
class _Ended:
    """A step whose values are on their way to the host."""

    step: int
    values: StepValues
    copy: Tensor
    interval: _Interval
    """The steps since the last record, up to this one."""
    time: float
    logged: bool

    @property
    def arrives(self) -> Any:
        """The moment from which on everything here is known."""
        return self.interval.spans[-1][1]


class MetricsProcessor:
    """Keeps a run's clock, makes a record of each logged step, and hands it to the writers.

    The clock starts with the processor. A step lasts from the end of the step before to its own
    end, less the time spent under `outside_step`. Rates are of the training alone: waits for data
    and compilation are not in them."""

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
        """`start_tokens` were trained on before, in the run that this one resumes; 0 in a new run.
        Ranks other than the main one have no writers."""
        self.log_freq = log_freq
        self._ledger = ledger
        self.peaks = peaks
        self._device = device
        self._n_devices = n_devices
        self._writers = writers
        self._clock = clock or build_clock(device)
        self._pending: deque[_Ended] = deque()
        self._last_ended: _Ended | None = None
        self._last_record: Record | None = None
        self.skips = Skips()
        """The longest run of steps without an update, as far as the host knows."""
        self._steady_tps, self._steady_mfu = (
            array("d"),
            array("d"),
        )  # of each record, for the run's medians: 16 bytes
        self._times: dict[str, float] = {"training": 0.0, "data": 0.0, "compile": 0.0}
        self._tokens = start_tokens
        self._interval = _Interval()
        self._outside = False
        self._doubted = False
        self._began = self._compile_began = self._clock.now()

    def _end_span(self) -> None:
        self._interval.spans.append((self._began, self._clock.now()))

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Time under it is the step's wait for data; within `outside_step` it counts there."""
        began = self._clock.now()
        yield
        if not self._outside:
            self._interval.data.append((began, self._clock.now()))

    def compile_began(self) -> None:
        """Until `compile_ended`, time is torch.compile's; within `outside_step` it counts there."""
        self._compile_began = self._clock.now()

    def compile_ended(self) -> None:
        """See `compile_began`."""
        if not self._outside:
            self._interval.compile.append((self._compile_began, self._clock.now()))

    @contextmanager
    def outside_step(self, name: str, *, step: int) -> Iterator[None]:
        """Time under it, after `step`, is in no step's time; the writers get it as `<name>_s`."""
        self._end_span()
        began = self._clock.now()
        self._clock.wait(began)  # what the steps have queued is their time
        self._take_arrived()
        self._outside = True
        yield
        self._outside = False
        self._began = self._clock.now()
        self._clock.wait(self._began)
        self._write_time(step, name, self._clock.seconds(began, self._began))

    def log_validation(self, step: int, loss: float) -> None:
        """Hand the writers the validation loss after `step`."""
        self._write_scalars(step, {"validation_loss": loss})

    def log_numerics(self, step: int, numerics: Numerics) -> None:
        """Hand the writers what the casts of `step`, the last that ended, lost. Waits for the
        device: the records up to that step come first."""
        assert self._last_ended is not None, "a step has ended"
        self._clock.wait(self._last_ended.arrives)
        self._take_arrived()
        for writer in self._writers:
            writer.write_numerics(step, numerics)

    def end_step(self, step: int, values: StepValues) -> bool:
        """Take what `step` produced; whether new records were made, of this step or earlier ones.

        Logged are this process's first step, alone, since it holds compilation and warm-up, and
        each multiple of log_freq."""
        logged = self._last_ended is None or step % self.log_freq == 0
        on_device = (
            values.loss,
            values.loss_max,
            values.grad_norm,
            values.skipped_steps,
            values.consecutive_skips,
        )
        copy = torch.stack(on_device).to("cpu", non_blocking=True)
        interval = self._interval.with_step((self._began, self._clock.now()))
        ended = self._last_ended = _Ended(step, values, copy, interval, time.time(), logged)
        self._pending.append(ended)
        if logged:
            self._begin_interval(ended)
        else:
            self._interval.steps += 1
        return self._take_arrived()

    def settle(self) -> None:
        """Make the records of all steps that have ended, of the last one in any case, and have them
        on disk. Waits for the device; for a step's end, before what comes between steps."""
        if (last := self._last_ended) is None:
            return
        self._clock.wait(last.arrives)
        self._take_arrived()
        if self._last_record is None or self._last_record.step < last.step:
            self._write(last)
            self._begin_interval(last)
        for writer in self._writers:
            writer.flush()

    def _begin_interval(self, ended: _Ended) -> None:
        """Count the time from the end of a step on for the next record."""
        self._interval = _Interval()
        self._began = ended.arrives

    def _take_arrived(self) -> bool:
        """Take the values of the steps that the device has done, in order; whether there were
        records among them."""
        before = self._last_record
        while self._pending and self._clock.passed(self._pending[0].arrives):
            ended = self._pending.popleft()
            loss, _, grad_norm, _, consecutive = ended.copy.tolist()
            if consecutive > self.skips.consecutive:
                self.skips = Skips(int(consecutive), ended.step, loss, grad_norm)
            if ended.logged:
                self._write(ended)
        return self._last_record is not before

    def _write(self, ended: _Ended) -> None:
        interval, values = ended.interval, ended.values
        loss, loss_max, grad_norm, skipped_steps, _ = ended.copy.tolist()
        span_s, data_s, compile_s = (
            sum(self._clock.seconds(*span) for span in spans)
            for spans in (interval.spans, interval.data, interval.compile)
        )
        training_s = span_s - data_s - compile_s
        rates = compute_rates(
            tokens=values.tokens - self._tokens,
            seconds=training_s,
            n_devices=self._n_devices,
            ledger=self._ledger,
            peaks=self.peaks,
        )
        record = Record(
            step=ended.step,
            tokens=values.tokens,
            epochs=values.epochs,
            loss=loss,
            loss_max=loss_max,
            grad_norm=grad_norm,
            lr=values.lr,
            skipped_steps=int(skipped_steps),
            **(
                asdict(rates)
                | {name: self._credible(getattr(rates, name)) for name in _UTILISATIONS}
            ),
            step_time_s=(training_s + data_s) / interval.steps,
            data_time_s=data_s / interval.steps,
            memory_gib=peak_memory_gib(self._device),
            time=ended.time,
        )
        if rates.mfu is not None and record.mfu is None and not self._doubted:
            self._doubted = True
            logger.info(
                f"step {ended.step}: mfu came out as {rates.mfu:.0f}%, so the CPU's measured peak is too low; a "
                "utilisation above 100% is n/a"
            )
        if self._last_record is not None:
            self._steady_tps.append(rates.tps)
            self._steady_mfu.append(math.nan if rates.mfu is None else rates.mfu)
        self._last_record, self._tokens = record, values.tokens
        self._times["training"] += training_s
        self._times["data"] += data_s
        for writer in self._writers:
            writer.write(record)
        if compile_s:
            self._write_time(ended.step, "compile", compile_s)

    def _credible(self, percent: float | None) -> float | None:
        """`percent` of an approximate peak, or None above 100."""
        return None if percent is not None and percent > 100 and self.peaks.approximate else percent

    def summary(self) -> Summary | None:
        """The outcome so far; None if no step was trained."""
        if (record := self._last_record) is None:
            return None
        return Summary(
            step=record.step,
            tokens=record.tokens,
            loss=record.loss,
            tps=_median(self._steady_tps),
            mfu=self._credible(_median(self._steady_mfu)),
            memory_gib=record.memory_gib,
            times_s=dict(self._times),
            approximate_mfu=self.peaks.approximate,
        )

    def close(self) -> None:
        """Close the writers."""
        for writer in self._writers:
            writer.close(self.summary())

    def _write_time(self, step: int, name: str, seconds: float) -> None:
        self._times[name] = self._times.get(name, 0.0) + seconds
        self._write_scalars(step, {f"{name}_s": seconds})

    def _write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.write_scalars(step, scalars)


def summary_lines(summary: Summary, *, unigram_entropy: float | None) -> list[str]:
    """`summary` in words. `unigram_entropy` of the training tokens, nat, is the loss of a model
    that knows how often each token occurs and nothing of its context; None if it is not known."""
    loss = f"final loss {summary.loss:.2f} nat"
    if unigram_entropy is not None:
        gain = unigram_entropy - summary.loss
        side = "below" if gain >= 0 else "above"
        loss += f", {abs(gain):.2f} {side} the unigram entropy {unigram_entropy:.2f} of the training tokens"
    tps = "n/a" if summary.tps is None else f"{summary.tps:,.0f}"
    mfu = format_mfu(summary.mfu, approximate=summary.approximate_mfu)
    total_s = sum(summary.times_s.values())
    shares = ", ".join(
        f"{name} {seconds / total_s:.1%}" for name, seconds in summary.times_s.items() if seconds
    )
    return [
        f"{summary.step:,} steps, {summary.tokens:,} tokens",
        loss,
        f"median tps {tps} per device, median mfu {mfu}, without the first step",
        f"of {total_s:,.1f}s: {shares}",
        f"peak memory {summary.memory_gib:.1f}GiB per device",
    ]


def _median(values: Iterable[float]) -> float | None:
    """The median of those among `values` that are not NaN; None if there is none."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else None
