import logging
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_records import RECORD

from torchtitan_lite.metrics.devices import lookup_device
from torchtitan_lite.metrics.figures import StepRecord, Summary, Writer, summary_lines
from torchtitan_lite.metrics.flops import FlopsLedger, Rates, compute_rates, effective_peak
from torchtitan_lite.metrics.hardware import Peaks, published_peaks
from torchtitan_lite.metrics.processor import MetricsProcessor, Skips, StepValues
from torchtitan_lite.metrics.stages import StageTimes

H100 = Peaks("H100 SXM", published_peaks(lookup_device("H100 SXM")))
UNKNOWN = Peaks("Tesla T4")
CPU = torch.device("cpu")
PIPELINE_FIGURES = {
    "bubble_pct",
    "stage_time_s",
    "stage_mfu",
    "memory_max_gib",
    "memory_max_rank",
}

# Llama3-8B at seq_len 8192: 41.876 G of the block linears, 3.152 G of `output`, 12.885 G of
# attention.
BLOCKS, OUTPUT, ATTENTION = 41_875_931_136, 3_152_019_456, 12_884_901_888


def ledger_8b(precision: str, *, emulated: bool = False) -> FlopsLedger:
    fp8_runs_in = "fp32" if emulated else "fp8"
    runs_in = fp8_runs_in if precision == "fp8" else precision
    flops = Counter({"fp8": 0, "bf16": OUTPUT + ATTENTION, "fp32": 0})
    recompute = Counter({"fp8": 0, "bf16": ATTENTION // 3, "fp32": 0})
    flops[runs_in] += BLOCKS
    recompute[runs_in] += BLOCKS // 3
    return FlopsLedger(flops, recompute, OUTPUT, ATTENTION, precisions={}, fp8_runs_in=fp8_runs_in)


def rates_8b(tps: int, precision: str, *, peaks: Peaks = H100, emulated: bool = False) -> Rates:
    ledger = ledger_8b(precision, emulated=emulated)
    return compute_rates(tps, ledger=ledger, peaks=peaks)


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
    assert round(effective_peak(ledger_8b("fp8").by_precision, H100.tflops), 1) == 1549.5
    assert effective_peak(ledger_8b("bf16").by_precision, H100.tflops) == pytest.approx(989)
    assert effective_peak(ledger_8b("fp8").by_precision, {"bf16": 312}) is None


def test_hfu_adds_what_is_recomputed_at_its_own_precision():
    rates = rates_8b(7773, "fp8")
    ideal_s = BLOCKS * 4 / 3 / 1979e12 + (OUTPUT + ATTENTION * 4 / 3) / 989e12
    assert rates.hfu == pytest.approx(100 * 7773 * ideal_s)
    assert rates.mfu < rates.hfu < 4 / 3 * rates.mfu


def test_mfu_achievable_is_held_against_what_was_measured():
    peaks = Peaks("H100 SXM", H100.published, measured={"bf16": 700.0, "fp8": 1300.0})
    rates = rates_8b(7773, "fp8", peaks=peaks)
    assert rates.mfu_achievable == pytest.approx(
        100 * 7773 * (BLOCKS / 1300e12 + (OUTPUT + ATTENTION) / 700e12)
    )
    assert percent(rates.mfu) == "29.05"
    assert rates_8b(7773, "fp8").mfu_achievable is None


def test_unknown_peaks_give_no_utilisation():
    rates = rates_8b(6297, "bf16", peaks=UNKNOWN)
    assert (rates.mfu, rates.mfu_bf16_peak, rates.mfu_fp8_peak, rates.hfu) == (
        None,
        None,
        None,
        None,
    )
    assert f"{rates.tflops:.2f}" == "364.68"


def test_only_the_precisions_in_use_need_a_peak():
    a100 = Peaks("A100", {"bf16": 312})
    bf16, fp8 = rates_8b(1000, "bf16", peaks=a100), rates_8b(1000, "fp8", peaks=a100)
    assert (percent(bf16.mfu), bf16.mfu_fp8_peak) == ("18.56", None)
    assert (fp8.mfu, percent(fp8.mfu_bf16_peak)) == (None, "18.56")


def test_emulated_fp8_is_measured_against_the_fp32_peak():
    cpu = Peaks("CPU", measured={"bf16": 2.0, "fp32": 0.5})
    rates = rates_8b(1, "fp8", peaks=cpu, emulated=True)
    ideal_s = BLOCKS / 0.5e12 + (OUTPUT + ATTENTION) / 2e12
    assert rates.mfu == pytest.approx(100 * ideal_s)
    assert rates_8b(1, "fp8", emulated=True).mfu is None  # the table knows no fp32 peak of a GPU
    assert rates_8b(1, "fp8", emulated=True).mfu_fp8_peak is None  # though it knows the fp8 peak


def test_mfu_documents_has_the_share_of_attention_that_masks_leave():
    rates = [
        compute_rates(7773, ledger=ledger_8b("fp8"), peaks=H100, attention_share=share)
        for share in (None, 1.0, 0.25)
    ]
    assert [percent(rate.mfu_documents) for rate in rates] == ["n/a", "29.05", "21.46"]
    assert rates[1].mfu_documents == rates[1].mfu
    ideal_s = BLOCKS / 1979e12 + (OUTPUT + ATTENTION / 4) / 989e12
    assert rates[2].mfu_documents == pytest.approx(100 * 7773 * ideal_s)
    assert len({replace(rate, mfu_documents=None) for rate in rates}) == 1

    # On CPU attention may run in float32.
    flops = {"fp8": 0, "bf16": BLOCKS + OUTPUT, "fp32": ATTENTION}
    ledger = replace(ledger_8b("bf16"), by_precision=flops, attention_runs_in="fp32")
    cpu = Peaks("CPU", measured={"bf16": 2.0, "fp32": 0.5})
    ideal_s = (BLOCKS + OUTPUT) / 2e12 + ATTENTION / 4 / 0.5e12
    rates = compute_rates(1, ledger=ledger, peaks=cpu, attention_share=0.25)
    assert rates.mfu_documents == pytest.approx(100 * ideal_s)
    rates = compute_rates(1, ledger=ledger, peaks=UNKNOWN, attention_share=0.25)
    assert rates.mfu_documents is None


@given(
    fp8=st.integers(0, 10**12),
    bf16=st.integers(1, 10**12),
    peak=st.floats(1, 1e4),
    speedup=st.floats(1, 4),
)
def test_effective_peak_lies_between_the_peaks_and_below_the_arithmetic_mean(
    fp8, bf16, peak, speedup
):
    mixed = effective_peak(
        {"fp8": fp8, "bf16": bf16, "fp32": 0}, {"bf16": peak, "fp8": speedup * peak}
    )
    arithmetic = (fp8 * speedup + bf16) / (fp8 + bf16) * peak
    assert peak * (1 - 1e-9) <= mixed <= arithmetic * (1 + 1e-9)


@pytest.fixture
def log(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("torchtitan_lite"), "propagate", True)
    caplog.set_level(logging.INFO, logger="torchtitan_lite")
    return caplog


class Device:
    """A device with a clock that stands still until a test moves it. A late one is behind: its
    events pass only when they are waited for, or when a test sets `done`."""

    def __init__(self, *, late: bool) -> None:
        self.now, self.done, self.waits = 100.0, 0.0 if late else math.inf, 0

    def record_event(self) -> "Event":
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.time = device, device.now

    def query(self) -> bool:
        return self.time <= self.device.done

    def synchronize(self) -> None:
        self.device.waits += 1
        self.device.done = max(self.device.done, self.time)

    def elapsed_time(self, end: "Event") -> float:
        assert end.query(), "asked for a time that the device has not come to"
        return 1000 * (end.time - self.time)


class Recorder(Writer):
    """A writer that keeps what it gets."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.scalars: list[tuple[int, dict[str, float]]] = []
        self.numerics_after: list[tuple[int, list[int]]] = []
        self.closed_with: list[Summary | None] = []
        self.flushed_after: list[int] = []

    def write(self, record):
        self.records.append(record)

    def write_scalars(self, step, scalars):
        self.scalars.append((step, scalars))

    def write_numerics(self, step, numerics):
        assert numerics == {"attention.wq": {}}
        self.numerics_after.append((step, [record.step for record in self.records]))

    def flush(self):
        self.flushed_after.append(len(self.records))

    def close(self, summary):
        self.closed_with.append(summary)


class Run:
    """A run on a clock of its own, 1,000 tokens a step."""

    def __init__(
        self,
        *,
        log_freq: int = 1,
        start_step: int = 0,
        peaks: Peaks = H100,
        late_device: bool = False,
    ) -> None:
        self.recorder, self.step = Recorder(), start_step
        self.device = Device(late=late_device)
        self.metrics = MetricsProcessor(
            log_freq=log_freq,
            ledger=ledger_8b("bf16"),
            peaks=peaks,
            device=CPU,
            n_devices=2,
            writers=[self.recorder],
            start_tokens=1000 * start_step,
        )
        self.metrics.record_event = self.device.record_event
        self.metrics._began = self.device.record_event()

    def train_step(
        self,
        seconds: float,
        *,
        data_s: float = 0.0,
        compile_s: float = 0.0,
        skips: int = 0,
        settle: bool = False,
        **more: float,
    ) -> StepRecord | None:
        """Train for `seconds`, of which some are for data and compilation; the step's own record,
        if it is there. `more` values are computed in float64."""
        with self.metrics.timed("data"):
            self.device.now += data_s
        if compile_s:
            self.metrics.compile_began()
            self.device.now += compile_s
            self.metrics.compile_ended()
        self.device.now += seconds - data_s - compile_s
        self.step += 1
        loss = torch.tensor(10.0 - self.step)
        values = StepValues(
            tokens=1000 * self.step,
            epochs={"a": 0.5 * self.step},
            loss=loss,
            loss_max=loss + 0.5,
            grad_norm=loss / 2,
            skipped_steps=torch.tensor(float(skips)),
            consecutive_skips=torch.tensor(float(skips)),
            lr=0.1 * self.step,
            **{name: torch.tensor(value, dtype=torch.float64) for name, value in more.items()},
        )
        before = len(self.recorder.records)
        made = self.metrics.end_step(self.step, values)
        assert made == (len(self.recorder.records) > before)
        if settle:
            self.metrics.settle()
        newest = self.recorder.records[-1] if self.recorder.records else None
        return newest if newest and newest.step == self.step else None


def test_record():
    run = Run()
    run.train_step(9.0)
    record = run.train_step(2.5, data_s=0.5)
    rates = compute_rates(1000 / 2.0 / 2, ledger=ledger_8b("bf16"), peaks=H100)
    assert record == StepRecord(
        step=2,
        tokens=2000,
        epochs={"a": 1.0},
        loss=8.0,
        loss_max=8.5,
        grad_norm=4.0,
        lr=0.2,
        skipped_steps=0,
        tps=250.0,
        tflops=rates.tflops,
        mfu=rates.mfu,
        mfu_bf16_peak=rates.mfu_bf16_peak,
        mfu_fp8_peak=rates.mfu_fp8_peak,
        mfu_achievable=None,
        hfu=rates.hfu,
        step_time_s=2.5,
        data_time_s=0.5,
        memory_gib=record.memory_gib,
        memory_pct=None,
        data_time_pct=20.0,
        time=record.time,
    )
    assert record.memory_gib > 0.01
    assert record.time > 1.7e9
    assert run.recorder.records[-1] is record


def test_log_freq_averages_over_the_steps_since_the_last_record():
    run = Run(log_freq=3)
    logged = [
        run.train_step(float(step), data_s=0.1 * step, settle=step == 7) for step in range(1, 8)
    ]
    assert [record.step for record in logged if record] == [1, 3, 6, 7]
    assert run.recorder.records == [record for record in logged if record]
    assert [record.step_time_s for record in run.recorder.records] == pytest.approx(
        [1.0, 2.5, 5.0, 7.0]
    )
    assert [record.data_time_s for record in run.recorder.records] == pytest.approx(
        [0.1, 0.25, 0.5, 0.7]
    )
    # The tenth of the time that went to waiting for data is not in the rate.
    assert [0.9 * record.tps for record in run.recorder.records] == pytest.approx(
        [500, 200, 100, 500 / 7]
    )


def test_figures_of_documents_are_averages_over_the_steps_since_the_last_record():
    run = Run(log_freq=3)
    for step in range(1, 7):
        run.train_step(2.0, attention_share=0.1 * step, attention_imbalance=1.0 + step / 2**40)
    assert [record.step for record in run.recorder.records] == [1, 3, 6]
    for record, share, excess in zip(
        run.recorder.records, (0.1, 0.25, 0.5), (1, 2.5, 5), strict=True
    ):
        rates = compute_rates(250, ledger=ledger_8b("bf16"), peaks=H100, attention_share=share)
        assert record.mfu_documents == pytest.approx(rates.mfu_documents, rel=1e-12)
        assert record.mfu == rates.mfu
        assert record.attention_imbalance == 1.0 + excess / 2**40  # not rounded to float32
    assert (record.loss, record.grad_norm) == (4.0, 2.0)


def test_a_pipelines_totals_leave_out_the_first_step_and_what_is_outside_of_steps():
    run = Run(log_freq=2)
    run.metrics.stages = StageTimes([(0, 2), (1, 3)], pipeline_rank=1, flops=[{"bf16": 1000}] * 4)

    def train_step(seconds: float) -> StepRecord | None:
        with run.metrics.timed("pipeline"):
            for _ in range(2):
                with run.metrics.timed("stage 1"):
                    run.device.now += seconds
            with run.metrics.timed("stage 3"):
                run.device.now += seconds
            run.device.now += 5.0
        return run.train_step(1.0)

    train_step(100.0)
    assert run.metrics.own_times()[1:] == [0, 0, 0, 0]
    for seconds in (3.0, 5.0, 7.0):
        train_step(seconds)
        with run.metrics.outside_step("validation", step=run.step), run.metrics.timed("stage 1"):
            run.device.now += 50.0
    memory_gib, *times = run.metrics.own_times()
    assert times == [3, 60.0, 30.0, 15.0]
    assert memory_gib > 0.01

    # What all ranks exchanged is in the next record: 3 steps of 20 s, 10 and 15 s of which compute.
    run.metrics.stages.exchanged(
        torch.tensor([[1, 3, 60, 15, 15], [2, *times]], dtype=torch.float64)
    )
    train_step(9.0)
    record = train_step(11.0)
    assert record.bubble_pct == pytest.approx(37.5)
    assert record.stage_time_s == {0: 5.0, 1: 10.0, 2: 5.0, 3: 5.0}
    # 1,000 tokens of 1,000 FLOPs in 5 s, at a peak of 989 TFLOPS.
    assert record.stage_mfu[0] == pytest.approx(100 * 1e6 / 5 / 989e12)
    assert (record.memory_max_gib, record.memory_max_rank) == (2.0, 1)
    assert run.metrics.summary().bubble_pct == pytest.approx(37.5)


def test_without_pipelines_ranks_exchange_no_times():
    run = Run()
    run.train_step(1.0)
    assert run.metrics.own_times() == []
    assert run.train_step(1.0).to_json().keys().isdisjoint(PIPELINE_FIGURES)
    assert run.metrics.summary().bubble_pct is None


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
        run.device.now += 30.0
        run.metrics.write_scalars(1, {"validation_loss": 6.5})
    with run.metrics.outside_step("checkpoint", step=1):
        run.device.now += 50.0
    assert run.train_step(2.0, data_s=0.5).step_time_s == pytest.approx(2.0)
    run.train_step(2.0)
    assert run.train_step(4.0).step_time_s == pytest.approx(3.0)  # what was outside counts once
    assert run.recorder.scalars == [
        (1, {"validation_loss": 6.5}),
        (1, {"validation_s": 30.0}),
        (1, {"checkpoint_s": 50.0}),
    ]


def test_what_casts_lost_comes_after_the_records_up_to_their_step():
    run = Run(log_freq=2, late_device=True)
    for _ in range(3):
        run.train_step(1.0)
    assert run.recorder.records == []
    run.metrics.log_numerics(3, {"attention.wq": {}})
    assert run.recorder.numerics_after == [(3, [1, 2])]


def test_validation_and_checkpoint_between_steps_change_no_rate():
    plain, interrupted = Run(log_freq=2), Run(log_freq=2)
    for step in range(1, 7):
        for run in (plain, interrupted):
            run.train_step(1.5 + 0.1 * step, data_s=0.25)
        for name in ("validation", "checkpoint"):
            with interrupted.metrics.outside_step(name, step=step):
                interrupted.device.now += 40.0
    assert [r.tps for r in interrupted.recorder.records] == pytest.approx(
        [r.tps for r in plain.recorder.records]
    )
    assert [r.step_time_s for r in interrupted.recorder.records] == pytest.approx(
        [r.step_time_s for r in plain.recorder.records]
    )


def test_compilation_and_waits_for_data_are_in_no_rate():
    run = Run()
    run.train_step(1.0)
    record = run.train_step(10.0, data_s=1.0, compile_s=7.0)
    assert (record.tps, record.step_time_s, record.data_time_s) == (250.0, 3.0, 1.0)
    assert run.recorder.scalars == [(2, {"compile_s": 7.0})]


def test_compilation_within_a_validation_is_the_validations():
    run = Run()
    run.train_step(1.0)
    with run.metrics.outside_step("validation", step=1):
        run.metrics.compile_began()
        run.device.now += 5.0
        run.metrics.compile_ended()
    assert run.train_step(2.0).tps == 250.0
    assert run.recorder.scalars == [(1, {"validation_s": 5.0})]


def test_nothing_waits_for_the_device_to_log():
    run = Run(late_device=True)
    for _ in range(3):
        run.train_step(2.0)
    assert run.recorder.records == []
    run.device.done = run.device.now - 2.0  # the device has done two of the three steps
    run.train_step(2.0)
    assert [record.step for record in run.recorder.records] == [1, 2]
    assert run.device.waits == 0
    run.train_step(2.0, settle=True)
    assert [record.step for record in run.recorder.records] == [1, 2, 3, 4, 5]
    assert [record.loss for record in run.recorder.records] == [9.0, 8.0, 7.0, 6.0, 5.0]
    assert {record.tps for record in run.recorder.records} == {250.0}
    assert run.device.waits == 1


def test_time_outside_steps_starts_when_the_device_is_done():
    run = Run(late_device=True)
    run.train_step(2.0)
    assert run.device.waits == 0
    with run.metrics.outside_step("checkpoint", step=1):
        assert run.device.done == run.device.now
        assert [record.step for record in run.recorder.records] == [1]  # before what comes after it
        run.device.now += 1.0
    assert run.recorder.scalars == [(1, {"checkpoint_s": 1.0})]


def test_the_longest_run_of_steps_without_an_update_is_known_whether_logged_or_not():
    run = Run(log_freq=100)
    run.train_step(1.0)
    assert run.metrics.skips == Skips()
    run.train_step(1.0, skips=1)
    assert run.metrics.skips == Skips(consecutive=1, step=2, loss=8.0, grad_norm=4.0)
    run.train_step(1.0, skips=2)
    run.train_step(1.0)
    run.train_step(1.0, skips=1)
    assert run.metrics.skips == Skips(consecutive=2, step=3, loss=7.0, grad_norm=3.5)
    assert [record.step for record in run.recorder.records] == [1]


def test_skips_are_known_once_the_device_is_there():
    run = Run(late_device=True)
    run.train_step(1.0, skips=1)
    assert run.metrics.skips == Skips()
    run.device.done = run.device.now
    run.train_step(1.0)
    assert run.metrics.skips.consecutive == 1
    assert run.device.waits == 0


def test_settling_makes_the_last_steps_record_once_and_has_all_on_disk():
    run = Run(log_freq=3)
    for _ in range(4):
        run.train_step(2.0)
    assert [record.step for record in run.recorder.records] == [1, 3]
    run.metrics.settle()
    run.metrics.settle()
    assert [record.step for record in run.recorder.records] == [1, 3, 4]
    assert run.recorder.flushed_after == [3, 3]
    run.train_step(2.0, data_s=0.5)
    assert run.train_step(4.0, data_s=0.5).step_time_s == pytest.approx(3.0)  # of the steps since


def test_what_comes_after_the_last_step_is_in_no_record():
    """A signal may stop the run in the middle of a step, or while it waits for data."""
    run = Run(log_freq=3)
    run.train_step(2.0)
    run.train_step(2.0)
    with run.metrics.timed("data"):
        run.device.now += 100.0
    run.metrics.settle()
    assert [(record.step, record.step_time_s) for record in run.recorder.records] == [
        (1, 2.0),
        (2, 2.0),
    ]
    assert run.recorder.records[-1].data_time_s == 0.0


def test_nothing_is_settled_before_the_first_step():
    run = Run()
    run.metrics.settle()
    assert run.recorder.records == []


def test_progress_shows_the_last_record_and_the_time_left_at_the_average_step():
    run = Run()
    unknown = dict.fromkeys(("loss", "tps", "mfu", "eta_s"))
    assert run.metrics.progress(last_step=6) == unknown
    run.train_step(9.0)
    first = run.metrics.progress(last_step=6)
    assert first == unknown | {"loss": 9.0, "tps": 1000 / 9 / 2, "mfu": first["mfu"]}
    run.train_step(2.0)  # the first is warm-up
    second = run.metrics.progress(last_step=6)
    assert second == {"loss": 8.0, "tps": 250.0, "mfu": second["mfu"], "eta_s": 8.0}
    assert second["mfu"] == pytest.approx(first["mfu"] * 4.5)
    run.train_step(3.0)
    assert run.metrics.progress(last_step=6)["eta_s"] == pytest.approx(3 * 2.1)


def test_progress_has_no_loss_that_is_not_finite():
    run = Run()
    run.train_step(1.0)
    run.metrics._last_record = replace(run.recorder.records[0], loss=math.nan)
    assert run.metrics.progress(last_step=6)["loss"] is None


def test_summary_leaves_the_first_step_out_of_the_medians():
    run = Run()
    for seconds in (50.0, 1.0, 2.0, 4.0):
        last = run.train_step(seconds)
    run.metrics.write_scalars(4, {"validation_loss": 5.5})
    run.metrics.write_scalars(4, {"checkpoint_s": 1.0})
    summary = run.metrics.summary()
    median = run.recorder.records[2]
    times_s = {"training": 57.0, "data": 0.0, "compile": 0.0}
    assert summary == Summary(
        last=last,
        losses=tuple(record.loss for record in run.recorder.records),
        validation_loss=5.5,
        tps=median.tps,
        mfu=median.mfu,
        times_s=times_s,
    )
    assert summary.tps == 250.0


def test_an_approximate_utilisation_above_100_is_none():
    """A measured CPU peak that is too low would have a step do more than the CPU can."""
    # At 500 tokens/s 100 % is about 29 TFLOPS.
    cpu = Peaks("CPU", measured={"bf16": 20.0}, approximate=True)
    run = Run(peaks=cpu)
    fast, faster, slow = run.train_step(1.0), run.train_step(0.9), run.train_step(2.0)
    for record in (fast, faster):
        assert (record.mfu, record.mfu_bf16_peak, record.mfu_achievable, record.hfu) == (None,) * 4
    assert percent(slow.mfu) == percent(slow.mfu_achievable) == "72.39"
    summary = run.metrics.summary()
    assert summary.mfu is None and summary.last.approximate_mfu  # the median of 161 and 72 %
    exact = Run(peaks=replace(cpu, approximate=False))
    assert percent(exact.train_step(1.0).mfu) == "144.78"


def test_summary_of_one_step_has_no_medians():
    run = Run()
    run.train_step(1.0)
    summary = run.metrics.summary()
    assert (summary.last.step, summary.tps, summary.mfu) == (1, None, None)


def test_summary_without_a_known_peak_or_a_step():
    run = Run(peaks=UNKNOWN)
    assert run.metrics.summary() is None
    run.train_step(1.0)
    run.train_step(2.0)
    assert (run.metrics.summary().tps, run.metrics.summary().mfu) == (250.0, None)


class Broken(Recorder):
    """A writer that fails from its second step on."""

    def write(self, record):
        super().write(record)
        if record.step > 1:
            raise ConnectionResetError("Connection reset by peer")


def test_a_spare_writer_that_fails_is_left_out_with_one_warning(log):
    run, broken = Run(), Broken()
    broken.spare = "wandb"
    run.metrics.writers.insert(0, broken)
    for _ in range(3):
        run.train_step(1.0)
    run.metrics.settle()
    run.metrics.close()
    assert [record.step for record in broken.records] == [1, 2]
    assert [record.step for record in run.recorder.records] == [1, 2, 3]
    assert (broken.flushed_after, broken.closed_with) == ([], [])
    (message,) = log.messages
    assert message.startswith("wandb failed") and "ConnectionResetError: Connection" in message
    assert log.records[0].levelno == logging.WARNING


def test_the_run_ends_with_the_error_of_a_writer_that_it_needs():
    run = Run()
    run.metrics.writers.append(Broken())
    run.train_step(1.0)
    with pytest.raises(ConnectionResetError):
        run.train_step(1.0)


def test_close_closes_the_writers():
    run = Run()
    run.train_step(1.0)
    run.metrics.close()
    assert run.recorder.closed_with == [run.metrics.summary()]


TIMES_S = {"training": 60.0, "data": 0.0, "compile": 30.0, "validation": 10.0}


def test_times_of_the_summary():
    run = Run()
    run.train_step(10.0, data_s=1.0, compile_s=4.0)
    with run.metrics.outside_step("checkpoint", step=1):
        run.device.now += 3.0
    run.train_step(2.0)
    assert run.metrics.summary().times_s == {
        "training": 7.0,
        "data": 1.0,
        "compile": 4.0,
        "checkpoint": 3.0,
    }


def test_summary_lines():
    record = replace(RECORD, step=30, tokens=122880, loss=5.41)
    summary = Summary(
        last=record,
        losses=[5.40, 5.42],
        validation_loss=5.5,
        tps=2345.4,
        mfu=41.24,
        times_s=TIMES_S,
    )
    assert summary_lines(summary, unigram_entropy=6.27) == [
        "30 steps, 122,880 tokens",
        "final loss 5.41 nat, 0.86 below the unigram entropy 6.27 of the training tokens; "
        "mean of the last 2 logged steps",
        "validation loss 5.50 nat",
        "median tps 2,345 per device, median mfu 41.2%, without the first step",
        "of 100.0s: training 60.0%, compile 30.0%, validation 10.0%",
        "peak memory 0.9GiB per device",
    ]
    on_rank_3 = replace(record, memory_max_gib=1.25, memory_max_rank=3)
    of_pipeline = replace(summary, last=on_rank_3, bubble_pct=20.04)
    assert summary_lines(of_pipeline, unigram_entropy=6.27)[-2:] == [
        "pipeline bubble 20.0%, without the first step",
        "peak memory 1.2GiB, on rank 3",
    ]
    summary = replace(summary, last=replace(record, approximate_mfu=True))
    approximate = summary_lines(summary, unigram_entropy=6.27)
    assert "median mfu ~41.2%, without" in approximate[3]


def test_summary_lines_of_a_run_that_learned_nothing():
    record = replace(RECORD, loss=7.0)
    summary = Summary(
        last=record, losses=[7.0], validation_loss=None, tps=None, mfu=None, times_s=TIMES_S
    )
    assert summary_lines(summary, unigram_entropy=6.27)[1:3] == [
        "final loss 7.00 nat, 0.73 above the unigram entropy 6.27 of the training tokens; "
        "mean of the last 1 logged steps",
        "median tps n/a per device, median mfu n/a, without the first step",
    ]
    assert summary_lines(summary, unigram_entropy=None)[1].startswith("final loss 7.00 nat; mean")
    summary = replace(summary, losses=[7.0, math.nan])
    assert "nan nat" in summary_lines(summary, unigram_entropy=6.27)[1]
