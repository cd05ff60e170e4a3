"""A step's rates, and the clock and the book-keeping around them."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from .flops import FlopsLedger, Precision
from .hardware import Peaks, peak_memory_gib
from .records import Record, Summary, Writer


@dataclass(frozen=True)
class Rates:
    """How fast each device trained; the utilisations in percent, None where a peak that one needs is unknown."""

    tps: float
    """Tokens per second per device."""
    tflops: float
    """TFLOPS per device."""
    mfu: float | None
    """Ideal seconds, every matmul at its own precision's peak, over the real seconds."""
    mfu_bf16_peak: float | None
    """All FLOPs over the bf16 peak: torchtitan's figure. Under float8 it can pass 100."""
    mfu_fp8_peak: float | None
    """All FLOPs over the fp8 peak, a lower bound; None under emulation, which never touches that peak."""


def effective_peak(flops: Mapping[Precision, int], peaks: Peaks) -> float | None:
    """The peak of a mix of precisions, TFLOPS: the mean of their peaks, weighted by `flops`. It is the harmonic mean,
    since the ideal times add up, not the speeds. None where the peak of a precision in use is unknown."""
    used = {precision: count for precision, count in flops.items() if count}
    if not used.keys() <= peaks.tflops.keys():
        return None
    return sum(used.values()) / sum(count / peaks.tflops[precision] for precision, count in used.items())


def compute_rates(*, tokens: int, seconds: float, n_devices: int, ledger: FlopsLedger, peaks: Peaks) -> Rates:
    """The rates of `n_devices` devices that trained on `tokens` tokens between them in `seconds`."""
    tps = tokens / seconds / n_devices
    tflops = ledger.total * tps / 1e12
    mixed = effective_peak(ledger.by_precision, peaks)
    bf16, fp8 = peaks.tflops.get("bf16"), None if ledger.emulated else peaks.tflops.get("fp8")
    mfu, mfu_bf16_peak, mfu_fp8_peak = (None if peak is None else 100 * tflops / peak for peak in (mixed, bf16, fp8))
    return Rates(tps, tflops, mfu, mfu_bf16_peak, mfu_fp8_peak)


@dataclass(frozen=True)
class StepValues:
    """What a step produced. The tensors are scalars on one device, already reduced over the ranks."""

    tokens: int
    """Trained on by all ranks since step 1."""
    loss: Tensor
    """Mean over all ranks' tokens, nat."""
    loss_max: Tensor
    """The largest of the ranks' own losses, nat."""
    grad_norm: Tensor
    """Before clipping."""
    lr: float


class MetricsProcessor:
    """Keeps a run's clock, makes a record of each logged step, and hands it to the writers.

    The clock starts with the processor. A step lasts from the end of the step before to its own end, less the time
    spent under `outside_step`."""

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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`start_tokens` were trained on before, in the run that this one resumes; 0 in a new run. Ranks other than
        the main one have no writers."""
        self._log_freq = log_freq
        self._ledger = ledger
        self._peaks = peaks
        self._device = device
        self._n_devices = n_devices
        self._writers = writers
        self._clock = clock
        self._last_record: Record | None = None
        self._steady: list[Rates] = []
        self._begin_interval(clock(), start_tokens)

    def _begin_interval(self, now: float, tokens: int) -> None:
        self._began = now
        self._start_tokens = tokens
        self._steps = 0
        self._data_s = 0.0
        self._outside_s = 0.0

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Time under it is the step's wait for data."""
        began = self._clock()
        yield
        self._data_s += self._clock() - began

    @contextmanager
    def outside_step(self, name: str, *, step: int) -> Iterator[None]:
        """Time under it, after `step`, is in no step's time; the writers get it as `<name>_s`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # what the steps have queued is their time
        began = self._clock()
        yield
        seconds = self._clock() - began
        self._outside_s += seconds
        self._write_scalars(step, {f"{name}_s": seconds})

    def log_validation(self, step: int, loss: float) -> None:
        """Hand the writers the validation loss after `step`."""
        self._write_scalars(step, {"validation_loss": loss})

    def end_step(self, step: int, values: StepValues, *, last: bool) -> Record | None:
        """The record of the steps since the last one, handed to the writers too; None if `step` is not logged.

        Logged are this process's first step, alone, since it holds compilation and warm-up; each multiple of log_freq;
        and the `last` step, with which the run ends."""
        self._steps += 1
        if self._last_record is not None and step % self._log_freq and not last:
            return None
        # One transfer, and it waits until the device has done the step: only then is the clock read.
        loss, loss_max, grad_norm = torch.stack((values.loss, values.loss_max, values.grad_norm)).tolist()
        now = self._clock()
        seconds = now - self._began - self._outside_s
        rates = compute_rates(
            tokens=values.tokens - self._start_tokens,
            seconds=seconds,
            n_devices=self._n_devices,
            ledger=self._ledger,
            peaks=self._peaks,
        )
        record = Record(
            step=step,
            tokens=values.tokens,
            loss=loss,
            loss_max=loss_max,
            grad_norm=grad_norm,
            lr=values.lr,
            **asdict(rates),
            step_time_s=seconds / self._steps,
            data_time_s=self._data_s / self._steps,
            memory_gib=peak_memory_gib(self._device),
            time=time.time(),
        )
        if self._last_record is not None:
            self._steady.append(rates)
        self._last_record = record
        self._begin_interval(now, values.tokens)
        for writer in self._writers:
            writer.write(record)
        return record

    def summary(self) -> Summary | None:
        """The outcome so far; None if no step was trained."""
        if (record := self._last_record) is None:
            return None
        return Summary(
            step=record.step,
            tokens=record.tokens,
            loss=record.loss,
            tps=_median(rates.tps for rates in self._steady),
            mfu=_median(rates.mfu for rates in self._steady),
            memory_gib=record.memory_gib,
        )

    def close(self) -> None:
        """Close the writers."""
        for writer in self._writers:
            writer.close()

    def _write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.write_scalars(step, scalars)


def summary_lines(summary: Summary, *, unigram_entropy: float) -> list[str]:
    """`summary` in words. `unigram_entropy` of the training tokens, nat, is the loss of a model that knows how often
    each token occurs and nothing of its context."""
    gain = unigram_entropy - summary.loss
    tps = "n/a" if summary.tps is None else f"{summary.tps:,.0f}"
    mfu = "n/a" if summary.mfu is None else f"{summary.mfu:.1f}%"
    return [
        f"{summary.step:,} steps, {summary.tokens:,} tokens",
        f"final loss {summary.loss:.2f} nat, {abs(gain):.2f} {'below' if gain >= 0 else 'above'} "
        f"the unigram entropy {unigram_entropy:.2f} of the training tokens",
        f"median tps {tps} per device, median mfu {mfu}, without the first step",
        f"peak memory {summary.memory_gib:.1f}GiB per device",
    ]


def _median(values: Iterable[float | None]) -> float | None:
    """The median of the known ones among `values`; None if there is none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
