"""Rates of a device, the times and records of a run, and its summary."""

import math
import re
from collections import Counter
from dataclasses import asdict, replace
from unittest.mock import Mock

import pytest
import torch
from sample_records import RECORD, SUMMARY

from torchtitan_lite.catalog.devices import lookup_device
from torchtitan_lite.metrics.base_writer import Writer
from torchtitan_lite.metrics.figures import StepRecord
from torchtitan_lite.metrics.flops import FlopsLedger, compute_rates
from torchtitan_lite.metrics.hardware import Peaks, published_peaks
from torchtitan_lite.metrics.processor import MetricsProcessor, StepValues
from torchtitan_lite.metrics.stage_times import StageTimes
from torchtitan_lite.metrics.summary import Summary, summary_lines

H100 = Peaks("H100 SXM", published_peaks(lookup_device("H100 SXM")))
A100 = Peaks("A100", {"bf16": 312})
CPU = Peaks("CPU", measured={"bf16": 2.0, "fp32": 0.5})
UNKNOWN = Peaks("Tesla T4")

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
    return FlopsLedger(flops, recompute, ATTENTION, fp8_runs_in=fp8_runs_in)


# ----- compute_rates, Peaks.utilisation -----


@pytest.mark.parametrize(
    ("tps", "precision", "peaks", "expected"),
    [
        (6297, "bf16", H100, [364.68, 36.87, 36.87, 18.43]),
        (7773, "fp8", H100, [450.16, 29.05, 45.52, 22.75]),
        (6297, "bf16", UNKNOWN, [364.68, None, None, None]),
        (1000, "bf16", A100, [57.91, 18.56, 18.56, None]),
        (1000, "fp8", A100, [57.91, None, 18.56, None]),
    ],
)
def test_rates_of_8b(tps, precision, peaks, expected):
    rates = compute_rates(tps, ledger=ledger_8b(precision), peaks=peaks)
    found = [rates[name] for name in ("tflops", "mfu", "mfu_bf16_peak", "mfu_fp8_peak")]
    assert rates["tps"] == tps and found == pytest.approx(expected, abs=0.005)
    assert (rates["hfu"] is None) == (rates["mfu"] is None)


REST = OUTPUT + ATTENTION


@pytest.mark.parametrize(
    ("figure", "peaks", "emulated", "share", "ideal_ps"),
    [
        ("mfu", H100, False, None, BLOCKS / 1979 + REST / 989),
        ("hfu", H100, False, None, 4 / 3 * BLOCKS / 1979 + (OUTPUT + 4 / 3 * ATTENTION) / 989),
        ("mfu_documents", H100, False, 0.25, BLOCKS / 1979 + (OUTPUT + ATTENTION / 4) / 989),
        ("mfu_documents", UNKNOWN, False, 0.25, None),
        # The table has no fp32 peak of the H100, and its fp8 peak is of no use.
        ("mfu", CPU, True, None, BLOCKS / 0.5 + REST / 2),
        ("mfu", H100, True, None, None),
        ("mfu_fp8_peak", H100, True, None, None),
    ],
)
def test_rates_of_8b_in_float8(figure, peaks, emulated, share, ideal_ps):
    ledger = ledger_8b("fp8", emulated=emulated)
    rates = compute_rates(7, ledger=ledger, peaks=peaks, attention_share=share)
    expected = None if ideal_ps is None else pytest.approx(100 * 7 * ideal_ps * 1e-12)
    assert rates[figure] == expected
    plain = compute_rates(7, ledger=ledger, peaks=peaks)
    assert plain == rates | {"mfu_documents": None}
    unknown = compute_rates(7, ledger=replace(ledger, recompute_is_known=False), peaks=peaks)
    assert unknown == plain | {"hfu": None}


def test_mfu_documents_with_attention_in_float32():
    flops = {"fp8": 0, "bf16": BLOCKS + OUTPUT, "fp32": ATTENTION}
    ledger = replace(ledger_8b("bf16"), by_precision=flops, attention_runs_in="fp32")
    rates = compute_rates(1, ledger=ledger, peaks=CPU, attention_share=0.25)
    ideal_s = (BLOCKS + OUTPUT) / 2e12 + ATTENTION / 4 / 0.5e12
    assert rates["mfu_documents"] == pytest.approx(100 * ideal_s)


# ----- MetricsProcessor -----


class Device:
    """A device whose clock moves only when a test says so. A late one is behind: its events pass
    only when they are waited for, or when a test sets `done`."""

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
        assert end.query(), "asked for a time that the device has not reached"
        return 1000 * (end.time - self.time)


class Recorder(Writer):
    """A writer that keeps what it gets."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.scalars, self.numerics_after, self.closed_with, self.flushed_after = [], [], [], []

    @property
    def steps(self):
        return [record.step for record in self.records]

    def write(self, record):
        self.records.append(record)

    def write_scalars(self, step, scalars):
        self.scalars += [(step, name, value) for name, value in scalars.items()]

    def write_numerics(self, step, numerics):
        assert numerics == {"attention.wq": {}}
        self.numerics_after.append((step, self.steps))

    def flush(self):
        self.flushed_after.append(len(self.records))

    def close(self, summary):
        self.closed_with.append(summary)


class Run:
    """A run on a clock of its own, with 1,000 tokens a step."""

    def __init__(
        self, *, log_freq=1, start_step=0, peaks=H100, late=False, stage_times=None
    ) -> None:
        self.recorder, self.step, self.device = Recorder(), start_step, Device(late=late)
        self.metrics = MetricsProcessor(
            log_freq=log_freq,
            ledger=ledger_8b("bf16"),
            peaks=peaks,
            device=torch.device("cpu"),
            n_devices=2,
            seq_len=100,
            writers=[self.recorder],
            start_tokens=1000 * start_step,
            stage_times=stage_times,
        )
        self.metrics.record_event = self.device.record_event
        self.metrics._began = self.device.record_event()

    def train_step(self, seconds, *, data_s=0.0, compile_s=0.0, skips=0, **more):
        """Train for `seconds`, of which some are for data and compilation. Return the step's own
        record, if there is one. `more` values are computed in float64."""
        with self.metrics.timed("data"):
            self.device.now += data_s
        if compile_s:
            self.compile(compile_s)
        self.device.now += seconds - data_s - compile_s
        self.step += 1
        loss = torch.tensor(10.0 - self.step)
        values = StepValues(
            step=self.step,
            tokens=1000 * self.step,
            epochs={"a": self.step / 2},
            lr=self.step / 10,
            loss=loss,
            loss_max=loss + 0.5,
            grad_norm=loss / 2,
            skipped_steps=torch.tensor(float(skips)),
            consecutive_skips=torch.tensor(float(skips)),
            **{name: torch.tensor(x, dtype=torch.float64) for name, x in more.items()},
        )
        before = len(self.recorder.records)
        made = self.metrics.end_step(values)
        assert made == (len(self.recorder.records) > before)
        newest = self.recorder.records[-1] if self.recorder.records else None
        return newest if newest and newest.step == self.step else None

    def train(self, *seconds: float) -> StepRecord | None:
        for each in seconds:
            record = self.train_step(each)
        return record

    def compile(self, seconds: float) -> None:
        with self.metrics.timed("compile"):
            self.device.now += seconds


def test_record():
    run = Run()
    run.train_step(9.0)
    record = run.train_step(9.5, data_s=0.5, compile_s=7.0)  # which is in no figure
    assert run.recorder.scalars == [(2, "compile_s", 7.0)]
    expected = {"step": 2, "tokens": 2000, "epochs": {"a": 1.0}, "lr": 0.2, "skipped_steps": 0}
    expected |= {"loss": 8.0, "loss_max": 8.5, "grad_norm": 4.0}
    expected |= {"sequences_per_s": 2.5}  # 10 in 2 s on two devices
    expected |= {"step_time_s": 2.5, "data_time_s": 0.5, "data_time_pct": 20.0}
    expected |= compute_rates(1000 / 2.0 / 2, ledger=ledger_8b("bf16"), peaks=H100)
    assert record.memory_gib > 0.01 and record.time > 1.7e9
    found = {name: value for name, value in asdict(record).items() if value is not None}
    found = {"mfu_documents": None} | found
    assert found.items() >= expected.items()
    assert found.keys() - expected.keys() == {"memory_gib", "time", "approximate_mfu"}
    assert run.metrics.own_times() == []  # without pipelines
    assert record.to_json().keys() == RECORD.to_json().keys()


def test_log_freq_averages_over_the_steps_since_the_last_record():
    run = Run(log_freq=3)
    for step in range(1, 8):
        documents = {"attention_share": 0.1 * step, "attention_imbalance": 1.0 + step / 2**40}
        run.train_step(float(step), data_s=0.1 * step, **documents)
    run.metrics.settle()
    records = run.recorder.records
    assert run.recorder.steps == [1, 3, 6, 7]
    assert [record.step_time_s for record in records] == pytest.approx([1.0, 2.5, 5.0, 7.0])
    assert [record.data_time_s for record in records] == pytest.approx([0.1, 0.25, 0.5, 0.7])
    # The tenth of the time that went to waiting for data is not in the rate.
    tps = [500 / 0.9, 200 / 0.9, 100 / 0.9, 500 / 7 / 0.9]
    assert [record.tps for record in records] == pytest.approx(tps)
    for record, steps in zip(records, (1, 2.5, 5, 7), strict=True):
        options = {"ledger": ledger_8b("bf16"), "peaks": H100, "attention_share": 0.1 * steps}
        rates = compute_rates(record.tps, **options)
        assert record.mfu_documents == pytest.approx(rates["mfu_documents"], rel=1e-12)
        assert record.mfu == rates["mfu"]
        assert record.attention_imbalance == 1.0 + steps / 2**40  # not rounded to float32
    assert (records[2].loss, records[2].grad_norm) == (4.0, 2.0)  # of one step


def test_totals_of_a_pipeline_exclude_the_first_step_and_time_outside_of_steps():
    stages = [(0, 2), (1, 3)]
    stage_times = StageTimes(stages, pipeline_rank=1, flops=[{"bf16": 1000}] * 4)
    run = Run(log_freq=2, stage_times=stage_times)

    def train_step(seconds: float) -> StepRecord | None:
        with run.metrics.timed("pipeline"):
            for stage in (1, 1, 3):
                with run.metrics.timed(f"stage {stage}"):
                    run.device.now += seconds
            run.device.now += 5.0
        return run.train_step(1.0)

    train_step(100.0)
    own = run.metrics.own_times()
    assert own[1:] == [1, 305.0, 200.0, 100.0]
    ranks = [[1, 1, 305, 100, 200], own]  # the baseline
    stage_times.exchanged(torch.tensor(ranks, dtype=torch.float64))
    for seconds in (3.0, 5.0, 7.0):
        train_step(seconds)
        with run.metrics.outside_step("validation", step=run.step), run.metrics.timed("stage 1"):
            run.device.now += 50.0
    memory_gib, *times = run.metrics.own_times()
    assert times == [4, 365.0, 230.0, 115.0]
    assert memory_gib > 0.01

    # What all ranks exchanged is in the next record: 3 steps of 20 s, 10 and 15 s of which compute.
    ranks = [[1, 4, 365, 115, 215], [2, *times]]
    stage_times.exchanged(torch.tensor(ranks, dtype=torch.float64))
    train_step(9.0)
    record = train_step(11.0)
    assert record.bubble_pct == pytest.approx(37.5)
    assert record.stage_time_s == {0: 5.0, 1: 10.0, 2: 5.0, 3: 5.0}
    # 1,000 tokens of 1,000 FLOPs in 5 s, at a peak of 989 TFLOPS.
    assert record.stage_mfu[0] == pytest.approx(100 * 1e6 / 5 / 989e12)
    assert (record.memory_max_gib, record.memory_max_rank) == (2.0, 1)


def test_first_step_after_a_resume_is_logged_alone():
    run = Run(log_freq=5, start_step=7)
    run.train(2.0, 2.0, 2.0, 2.0)
    assert run.recorder.steps == [8, 10]
    assert [record.tps for record in run.recorder.records] == [250.0, 250.0]
    assert run.recorder.records[0].tokens == 8000
    assert run.metrics.summary().losses == (2.0, 0.0)


def test_time_outside_step_is_a_series_of_its_own():
    run = Run(log_freq=2)
    run.train_step(1.0)
    with run.metrics.outside_step("validation", step=1):
        run.device.now += 25.0
        run.compile(5.0)  # is the validation's
        run.metrics.write_scalars(1, {"validation_loss": 6.5})
    with run.metrics.outside_step("checkpoint", step=1):
        run.device.now += 50.0
    record = run.train_step(2.0, data_s=0.5)
    assert (record.step_time_s, record.tps) == pytest.approx((2.0, 1000 / 1.5 / 2))
    assert run.train(2.0, 4.0).step_time_s == pytest.approx(3.0)  # what was outside counts once
    expected = [(1, "validation_loss", 6.5), (1, "validation_s", 30.0), (1, "checkpoint_s", 50.0)]
    assert run.recorder.scalars == expected


def test_nothing_waits_for_the_device_to_log():
    run = Run(late=True)
    run.train(2.0, 2.0, 2.0)
    assert run.recorder.records == []
    run.device.done = run.device.now - 2.0  # the device has done two of the three steps
    run.train_step(2.0)
    assert run.recorder.steps == [1, 2]
    assert run.device.waits == 0
    run.train_step(2.0)
    run.metrics.settle()
    assert run.recorder.steps == [1, 2, 3, 4, 5]
    assert [record.loss for record in run.recorder.records] == [9.0, 8.0, 7.0, 6.0, 5.0]
    assert {record.tps for record in run.recorder.records} == {250.0}
    assert run.device.waits == 1


def test_log_numerics_and_outside_step_wait_for_the_device_and_write_the_records_first():
    run = Run(log_freq=2, late=True)
    run.train(2.0, 2.0, 2.0)
    assert (run.recorder.records, run.device.waits) == ([], 0)
    run.metrics.log_numerics(3, {"attention.wq": {}})
    assert run.recorder.numerics_after == [(3, [1, 2])]
    run.train_step(2.0)
    with run.metrics.outside_step("checkpoint", step=4):
        assert run.device.done == run.device.now
        assert run.recorder.steps == [1, 2, 4]
        run.device.now += 1.0
    assert run.recorder.scalars == [(4, "checkpoint_s", 1.0)]


def test_skips_error_is_of_the_longest_series_of_steps_without_an_update():
    run = Run(log_freq=100, late=True)
    run.train_step(1.0)
    run.train_step(1.0, skips=1)
    assert run.metrics.skips_error(1) is None
    run.device.done = run.device.now
    run.train_step(1.0, skips=2)
    error = run.metrics.skips_error(1)
    assert re.search("the 1 steps up to 2 .*loss = 8.0, grad_norm = 4.0", str(error))
    run.device.done = math.inf
    for skips in (0, 1, 2):
        run.train_step(1.0, skips=skips)
    assert run.metrics.skips_error(3) is None
    error = run.metrics.skips_error(2)
    assert error is not None and error.exit_code == 5
    rule = r"max_consecutive_skips = 2: the 2 steps up to 3 .*loss = 7\.0, grad_norm = 3\.5.* lr"
    assert re.search(rule, str(error))
    assert (run.recorder.steps, run.device.waits) == ([1], 0)


def test_settle_makes_the_last_steps_record_once_and_puts_all_on_disk():
    run = Run(log_freq=3)
    run.metrics.settle()
    assert run.recorder.records == [] and run.metrics.summary() is None
    run.train(2.0, 2.0, 2.0, 2.0)
    assert run.recorder.steps == [1, 3]
    # A signal may stop the run in the middle of a step, or while it waits for data.
    with run.metrics.timed("data"):
        run.device.now += 100.0
    run.metrics.settle()
    run.metrics.settle()
    assert run.recorder.steps == [1, 3, 4]
    assert run.recorder.flushed_after == [3, 3]
    last = run.recorder.records[-1]
    assert (last.step_time_s, last.data_time_s) == (2.0, 0.0)
    assert run.train(2.0, 4.0).step_time_s == pytest.approx((100 + 2 + 4) / 2)  # the steps since


def test_progress_shows_the_last_record_and_the_time_left():
    run = Run()
    assert run.metrics.progress(last_step=6) == {}
    run.train_step(9.0)
    first = run.metrics.progress(last_step=6)
    assert first == {"loss": 9.0, "tps": 1000 / 9 / 2, "mfu": first["mfu"], "eta_s": None}
    run.train_step(2.0)  # the first is warm-up
    second = run.metrics.progress(last_step=6)
    assert second == {"loss": 8.0, "tps": 250.0, "mfu": second["mfu"], "eta_s": 8.0}
    assert second["mfu"] == pytest.approx(first["mfu"] * 4.5)


def test_summary_leaves_the_first_step_out_of_the_medians():
    run = Run()
    first = run.train_step(50.0, data_s=1.0, compile_s=4.0)
    single = run.metrics.summary()
    assert (single.last, single.tps, single.mfu) == (first, None, None)
    with run.metrics.outside_step("checkpoint", step=1):
        run.device.now += 3.0
    last = run.train(1.0, 2.0, 4.0)
    run.metrics.write_scalars(3, {"validation_loss": 5.5})
    run.metrics.write_scalars(4, {"checkpoint_s": 1.0})
    summary = Summary(
        last=last,
        losses=(9.0, 8.0, 7.0, 6.0),
        validation=(3, 5.5),
        tps=250.0,
        mfu=run.recorder.records[2].mfu,
        times_s={"training": 52.0, "data": 1.0, "compile": 4.0, "checkpoint": 3.0},
    )
    assert run.metrics.summary() == summary
    run.metrics.close()
    assert run.recorder.closed_with == [summary]


def test_approximate_mfu_above_100_is_none():
    # At 500 tokens/s 100 % is about 29 TFLOPS.
    cpu = Peaks("CPU", measured={"bf16": 20.0}, approximate=True)
    run = Run(peaks=cpu)
    fast, faster, slow = run.train_step(1.0), run.train_step(0.9), run.train_step(2.0)
    for record in (fast, faster):
        assert (record.mfu, record.mfu_bf16_peak, record.hfu) == (None,) * 3
    assert slow.mfu == pytest.approx(72.39, abs=0.005)
    summary = run.metrics.summary()
    assert summary.mfu is None and summary.last.approximate_mfu  # the median of 161 and 72 %
    exact = Run(peaks=replace(cpu, approximate=False))
    assert exact.train_step(1.0).mfu == pytest.approx(144.78, abs=0.005)


def test_only_a_spare_writer_that_fails_is_left_out_with_one_warning(notices):
    run, broken, error = Run(), Recorder(), ConnectionResetError("Connection reset by peer")
    broken.spare, broken.write = "wandb", Mock(side_effect=[None, error])
    run.metrics.writers.insert(0, broken)
    run.train(1.0, 1.0, 1.0)
    run.metrics.settle()
    run.metrics.close()
    assert (broken.write.call_count, run.recorder.steps) == (2, [1, 2, 3])
    assert (broken.flushed_after, broken.closed_with) == ([], [])
    (warning,) = notices.records
    assert warning.levelname == "WARNING"
    assert re.search("wandb failed.*ConnectionResetError: Connection", warning.getMessage())
    broken.spare, broken.write = "", Mock(side_effect=error)
    run.metrics.writers.append(broken)
    with pytest.raises(ConnectionResetError):
        run.train_step(1.0)


# ----- summary_lines -----

TIMES = {"training": 60.0, "data": 0.0, "compile": 30.0, "validation": 10.0}
PIPELINE = {"memory_max_gib": 1.25, "memory_max_rank": 3}
LITTLE = {"losses": [7.0], "validation": None, "tps": None, "mfu": None}


@pytest.mark.parametrize(
    ("record", "changes", "pattern"),
    [
        (
            {},
            {"times_s": TIMES, "tps": 2345.4, "mfu": 41.24},
            r"^12 steps, 49,152 tokens\n"
            r"final loss 5\.25 nat, .* last 2 .*\n"
            r"validation loss 5\.75 nat, at step 10\n"
            r"median tps 2,345 .* mfu 41\.2%.*\n"
            r"of 100\.0s: training 60\.0%, compile 30\.0%, validation 10\.0%\n"
            r"peak memory 0\.9GiB per device$",
        ),
        ({"approximate_mfu": True}, {}, r"mfu ~41\.0%"),
        (PIPELINE, {}, r"\n.* 1\.2GiB, on rank 3$"),
        ({}, LITTLE, r" 7\.00 nat, .* last 1 .*\n.*tps n/a .* mfu n/a"),
        ({}, {"losses": [7.0, math.nan]}, "nan nat"),
    ],
)
def test_summary_lines(record, changes, pattern):
    summary = replace(SUMMARY, last=replace(RECORD, **record), **changes)
    assert re.search(pattern, "\n".join(summary_lines(summary)))
