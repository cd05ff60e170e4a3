import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_lite.metrics.flops import FlopsLedger, LinearFlops
from torchtitan_lite.metrics.hardware import Peaks, lookup_peaks
from torchtitan_lite.metrics.metrics import (
    MetricsProcessor,
    Rates,
    StepValues,
    Summary,
    compute_rates,
    effective_peak,
    summary_lines,
)
from torchtitan_lite.metrics.records import Record

H100 = lookup_peaks("NVIDIA H100 80GB HBM3")
CPU = torch.device("cpu")

# Llama3-8B at seq_len 8192: 41.876 G of the block linears, 3.152 G of `output`, 12.885 G of attention.
BLOCKS, OUTPUT, ATTENTION = 41_875_931_136, 3_152_019_456, 12_884_901_888


def ledger_8b(precision: str, *, emulated: bool = False) -> FlopsLedger:
    blocks = LinearFlops("layers", BLOCKS // 6, 1, precision, precision, precision)
    output = LinearFlops("output", OUTPUT // 6, 1, "bf16", "bf16", "bf16")
    return FlopsLedger((blocks, output), attention=ATTENTION, high_precision="bf16", emulated=emulated)


def rates_8b(tps: int, precision: str, *, peaks: Peaks = H100, emulated: bool = False) -> Rates:
    ledger = ledger_8b(precision, emulated=emulated)
    return compute_rates(tokens=tps * 8 * 2, seconds=2.0, n_devices=8, ledger=ledger, peaks=peaks)


def percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


def test_8b_in_bf16():
    rates = rates_8b(6297, "bf16")
    assert rates.tps == 6297
    assert f"{rates.tflops:.2f}" == "364.68"
    assert percent(rates.mfu) == percent(rates.mfu_bf16_peak) == "36.87"


def test_8b_in_float8():
    rates = rates_8b(7773, "fp8")
    assert f"{rates.tflops:.2f}" == "450.16"
    assert (percent(rates.mfu), percent(rates.mfu_bf16_peak), percent(rates.mfu_fp8_peak)) == (
        "29.05",
        "45.52",
        "22.75",
    )


def test_8b_effective_peak_is_the_harmonic_mean():
    assert round(effective_peak(ledger_8b("fp8").by_precision, H100), 1) == 1549.5
    assert effective_peak(ledger_8b("bf16").by_precision, H100) == pytest.approx(989)


def test_unknown_peaks_give_no_utilisation():
    rates = rates_8b(6297, "bf16", peaks=lookup_peaks("Tesla T4"))
    assert (rates.mfu, rates.mfu_bf16_peak, rates.mfu_fp8_peak) == (None, None, None)
    assert f"{rates.tflops:.2f}" == "364.68"


def test_only_the_precisions_in_use_need_a_peak():
    a100 = lookup_peaks("NVIDIA A100-SXM4-80GB")
    bf16, fp8 = rates_8b(1000, "bf16", peaks=a100), rates_8b(1000, "fp8", peaks=a100)
    assert (percent(bf16.mfu), bf16.mfu_fp8_peak) == ("18.56", None)
    assert (fp8.mfu, percent(fp8.mfu_bf16_peak)) == (None, "18.56")


def test_emulated_fp8_is_measured_against_the_fp32_peak():
    cpu = Peaks("CPU", "measured", {"bf16": 2.0, "fp32": 0.5})
    rates = rates_8b(1, "fp8", peaks=cpu, emulated=True)
    ideal_s = BLOCKS / 0.5e12 + (OUTPUT + ATTENTION) / 2e12
    assert rates.mfu == pytest.approx(100 * ideal_s)
    assert rates_8b(1, "fp8", emulated=True).mfu is None  # the table knows no fp32 peak of a GPU
    assert rates_8b(1, "fp8", emulated=True).mfu_fp8_peak is None  # though it knows the fp8 peak


@given(
    fp8=st.integers(0, 10**12),
    bf16=st.integers(1, 10**12),
    peak=st.floats(1, 1e4),
    speedup=st.floats(1, 4),
)
def test_effective_peak_lies_between_the_peaks_and_below_the_arithmetic_mean(fp8, bf16, peak, speedup):
    peaks = Peaks("GPU", "published", {"bf16": peak, "fp8": speedup * peak})
    mixed = effective_peak({"fp8": fp8, "bf16": bf16, "fp32": 0}, peaks)
    arithmetic = (fp8 * speedup + bf16) / (fp8 + bf16) * peak
    assert peak * (1 - 1e-9) <= mixed <= arithmetic * (1 + 1e-9)


class Clock:
    """A clock that stands still until it is told to move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """A writer that keeps what it gets."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.scalars: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def write(self, record):
        self.records.append(record)

    def write_scalars(self, step, scalars):
        self.scalars.append((step, scalars))

    def close(self):
        self.closed = True


class Run:
    """A run on a clock of its own, 1,000 tokens a step."""

    def __init__(self, *, log_freq: int = 1, start_step: int = 0, peaks: Peaks = H100) -> None:
        self.clock, self.recorder, self.step = Clock(), Recorder(), start_step
        self.metrics = MetricsProcessor(
            log_freq=log_freq,
            ledger=ledger_8b("bf16"),
            peaks=peaks,
            device=CPU,
            n_devices=2,
            writers=[self.recorder],
            start_tokens=1000 * start_step,
            clock=self.clock,
        )

    def train_step(self, seconds: float, *, data_s: float = 0.0, last: bool = False) -> Record | None:
        with self.metrics.data_wait():
            self.clock.now += data_s
        self.clock.now += seconds - data_s
        self.step += 1
        loss = torch.tensor(10.0 - self.step)
        values = StepValues(1000 * self.step, loss=loss, loss_max=loss + 0.5, grad_norm=loss / 2, lr=0.1 * self.step)
        return self.metrics.end_step(self.step, values, last=last)


def test_record():
    run = Run()
    run.train_step(9.0)
    record = run.train_step(2.0, data_s=0.5)
    rates = compute_rates(tokens=1000, seconds=2.0, n_devices=2, ledger=ledger_8b("bf16"), peaks=H100)
    assert record == Record(
        step=2,
        tokens=2000,
        loss=8.0,
        loss_max=8.5,
        grad_norm=4.0,
        lr=0.2,
        tps=250.0,
        tflops=rates.tflops,
        mfu=rates.mfu,
        mfu_bf16_peak=rates.mfu_bf16_peak,
        mfu_fp8_peak=rates.mfu_fp8_peak,
        step_time_s=2.0,
        data_time_s=0.5,
        memory_gib=record.memory_gib,
        time=record.time,
    )
    assert record.memory_gib > 0.01
    assert record.time > 1.7e9
    assert run.recorder.records[-1] is record


def test_log_freq_averages_over_the_steps_since_the_last_record():
    run = Run(log_freq=3)
    logged = [run.train_step(float(step), data_s=0.1 * step, last=step == 7) for step in range(1, 8)]
    assert [record.step for record in logged if record] == [1, 3, 6, 7]
    assert run.recorder.records == [record for record in logged if record]
    assert [record.step_time_s for record in run.recorder.records] == pytest.approx([1.0, 2.5, 5.0, 7.0])
    assert [record.data_time_s for record in run.recorder.records] == pytest.approx([0.1, 0.25, 0.5, 0.7])
    assert [record.tps for record in run.recorder.records] == pytest.approx([500, 200, 100, 500 / 7])


def test_first_step_after_a_resume_is_logged_alone():
    run = Run(log_freq=5, start_step=7)
    logged = [run.train_step(2.0) for _ in range(4)]
    assert [record.step for record in logged if record] == [8, 10]
    assert [record.tps for record in logged if record] == [250.0, 250.0]
    assert logged[0].tokens == 8000


def test_time_outside_steps_is_a_series_of_its_own():
    run = Run(log_freq=2)
    run.train_step(1.0)
    with run.metrics.outside_step("validation", step=1):
        run.clock.now += 30.0
        run.metrics.log_validation(1, 6.5)
    with run.metrics.outside_step("checkpoint", step=1):
        run.clock.now += 50.0
    assert run.train_step(2.0, data_s=0.5).step_time_s == pytest.approx(2.0)
    run.train_step(2.0)
    assert run.train_step(4.0).step_time_s == pytest.approx(3.0)  # what was outside counts once
    assert run.recorder.scalars == [
        (1, {"validation_loss": 6.5}),
        (1, {"validation_s": 30.0}),
        (1, {"checkpoint_s": 50.0}),
    ]


def test_time_outside_steps_starts_when_a_gpu_is_done(monkeypatch):
    run = Run()
    run.metrics._device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: setattr(run.clock, "now", run.clock.now + 3.0))
    with run.metrics.outside_step("checkpoint", step=0):
        run.clock.now += 1.0
    run.metrics._device = CPU
    assert run.recorder.scalars == [(0, {"checkpoint_s": 1.0})]
    assert run.train_step(2.0).step_time_s == 5.0


def test_values_are_read_before_the_clock():
    """The transfer is what waits for the device: a clock read before it would time the queueing of the work."""
    run = Run()
    order = []

    class Loss(torch.Tensor):
        def tolist(self):
            order.append("values")
            return super().tolist()

    run.metrics._clock = lambda: order.append("clock") or 200.0
    value = torch.tensor(1.0).as_subclass(Loss)
    run.metrics.end_step(1, StepValues(1000, loss=value, loss_max=value, grad_norm=value, lr=0.1), last=False)
    assert order == ["values", "clock"]


def test_summary_leaves_the_first_step_out_of_the_medians():
    run = Run()
    for seconds in (50.0, 1.0, 2.0, 4.0):
        last = run.train_step(seconds)
    summary = run.metrics.summary()
    median = run.recorder.records[2]
    assert summary == Summary(step=4, tokens=4000, loss=6.0, tps=median.tps, mfu=median.mfu, memory_gib=last.memory_gib)
    assert summary.tps == 250.0


def test_summary_of_one_step_has_no_medians():
    run = Run()
    run.train_step(1.0)
    summary = run.metrics.summary()
    assert (summary.step, summary.tps, summary.mfu) == (1, None, None)


def test_summary_without_a_known_peak_or_a_step():
    run = Run(peaks=lookup_peaks("Tesla T4"))
    assert run.metrics.summary() is None
    run.train_step(1.0)
    run.train_step(2.0)
    assert (run.metrics.summary().tps, run.metrics.summary().mfu) == (250.0, None)


def test_close_closes_the_writers():
    run = Run()
    run.metrics.close()
    assert run.recorder.closed


def test_summary_lines():
    summary = Summary(step=30, tokens=122880, loss=5.41, tps=2345.4, mfu=41.24, memory_gib=0.93)
    assert summary_lines(summary, unigram_entropy=6.27) == [
        "30 steps, 122,880 tokens",
        "final loss 5.41 nat, 0.86 below the unigram entropy 6.27 of the training tokens",
        "median tps 2,345 per device, median mfu 41.2%, without the first step",
        "peak memory 0.9GiB per device",
    ]


def test_summary_lines_of_a_run_that_learned_nothing():
    summary = Summary(step=1, tokens=4096, loss=7.0, tps=None, mfu=None, memory_gib=0.93)
    assert summary_lines(summary, unigram_entropy=6.27)[1:3] == [
        "final loss 7.00 nat, 0.73 above the unigram entropy 6.27 of the training tokens",
        "median tps n/a per device, median mfu n/a, without the first step",
    ]
    assert "nan nat" in summary_lines(replace(summary, loss=math.nan), unigram_entropy=6.27)[1]
