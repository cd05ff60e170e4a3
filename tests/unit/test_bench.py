"""The benchmark without its runs: what it makes of their records, its budget, its file, its checks.
Runs as they are: tests/distributed/test_bench_runs.py."""

import json
import os
import re
import runpy
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_docs import key_paths

from torchtitan_lite import bench
from torchtitan_lite.bench import Benchmark, Options, make_plan, read_baseline, tolerance_of
from torchtitan_lite.benchmarks import child as bench_child
from torchtitan_lite.benchmarks.child import Outcome, Stop, run_child
from torchtitan_lite.benchmarks.kernels import break_down
from torchtitan_lite.benchmarks.report import (
    add_ratios,
    check_comparable,
    find_regressions,
    format_plan,
    format_report,
    measure,
)
from torchtitan_lite.benchmarks.rows import Device, planned_device
from torchtitan_lite.config import Config
from torchtitan_lite.errors import ConfigError, RunError, StorageError
from torchtitan_lite.planner.plan import resolve_device

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/performance.md").read_text()
CPU = {
    "name": "CPU: test",
    "memory_gib": None,
    "float8": False,
    "ceilings": {"bf16": 0.4, "fp32": 0.1},
}
SPEEDS = {"bf16": 100.0, "tensorwise": 120.0, "rowwise": 115.0, "rowwise_with_gw_hp": 110.0}


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def record(step: int, **figures: Any) -> dict[str, Any]:
    figures = {
        "tps": 100.0,
        "tflops": 1.0,
        "mfu": 50.0,
        "memory_gib": 1.0,
        "step_time_s": 1.0,
        "loss": 7.0,
    } | figures
    return {"step": step} | figures


def result(
    recipe: str = "bf16", *, compiled: bool = True, status: str = "done", **figures: Any
) -> dict[str, Any]:
    name = f"debug 4L seq128 b1 none {'compiled' if compiled else 'eager'} {recipe}"
    row = {
        "name": name,
        "shape": "debug",
        "layers": 4,
        "all_layers": 4,
        "seq_len": 128,
        "local_batch_size": 1,
    }
    row |= {
        "activation_checkpoint": "none",
        "compile": compiled,
        "recipe": recipe,
        "status": status,
        "reason": "",
    }
    return row | ({"tps": SPEEDS[recipe]} if status == "done" else {}) | figures


class FakeRuns:
    """In place of `run_child`: what each run comes to, without one."""

    def __init__(
        self,
        outcomes: dict[str, Outcome] | None = None,
        *,
        seconds: float = 0.0,
        device: dict[str, Any] = CPU,
    ) -> None:
        """`outcomes` of runs by recipe, the seconds that each is said to have taken, and on
        what."""
        self.outcomes, self.seconds, self.device = outcomes or {}, seconds, device
        self.timeouts: list[float] = []
        self.now = time.monotonic()

    def __call__(
        self, task: Any, *arguments: Any, folder: Path, timeout_s: float, **options: Any
    ) -> Outcome:
        if task is bench_child.probe:
            return Outcome("done", value=self.device)
        config: Config = arguments[0]
        self.timeouts.append(timeout_s)
        self.now += self.seconds
        recipe = config.float8.recipe_name if config.float8.enable_float8_linear else "bf16"
        steps = range(1, config.training.steps + 1)
        lines = [
            json.dumps(record(step, tps=SPEEDS[recipe], step_time_s=1.0 + step % 2))
            for step in steps
        ]
        (folder / "metrics.jsonl").write_text("\n".join(lines))
        if config.profiling.enable_profiling:
            for step in (3, 6, 9):
                trace = folder / f"profile_traces/step-{step}/rank0_trace.json"
                trace.parent.mkdir(parents=True)
                events = [
                    {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "ts": 0, "dur": 5, "tid": 1}
                ]
                trace.write_text(json.dumps({"traceEvents": events}))
        return self.outcomes.get(recipe, Outcome("done"))


def run(
    folder: Path, runs: FakeRuns, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> dict[str, Any]:
    """The report of a benchmark of `runs`, a quick one if `options` do not say otherwise."""
    monkeypatch.setattr(bench, "run_child", runs)
    monkeypatch.setattr(bench.time, "monotonic", lambda: runs.now)
    monkeypatch.setitem(bench.BUDGET_S, "quick CPU", 80.0)
    work = folder / "work"
    work.mkdir()
    benchmark = Benchmark(
        Options(**{"quick": True} | options), stop=Stop(), folder=work, began=runs.now
    )
    benchmark.run()
    return benchmark.report


def test_a_rows_figures_are_medians_without_the_warm_up() -> None:
    records = [
        record(step, tps=tps, step_time_s=tps / 10)
        for step, tps in enumerate([1, 2, 40, 10, 30, 20, 50], 1)
    ]
    records[-1] |= {"memory_gib": 3.5, "loss": 5.0}
    figures = measure(records, warmup_steps=2)
    assert figures["measured_steps"] == 5 and figures["tps"] == 30 and figures["step_time_s"] == 3
    assert figures["spread_pct"] == pytest.approx(
        100 * (4 - 2) / 3
    )  # the middle half is from 2 to 4
    assert figures["memory_gib"] == 3.5 and figures["loss"] == 5.0
    assert measure([record(step, mfu=None) for step in range(1, 5)], warmup_steps=1)["mfu"] is None


def test_ratios_are_to_the_bf16_row_and_to_the_eager_row_of_the_same_run() -> None:
    rows = [
        result(),
        result("tensorwise"),
        result(compiled=False, tps=80.0),
        result("tensorwise", compiled=False, tps=40.0),
        result("tensorwise", status="failed") | {"layers": 2},
    ]
    add_ratios(rows)
    assert [row["bf16_ratio"] for row in rows] == [None, 1.2, None, 0.5, None]
    assert [row["compile_ratio"] for row in rows] == [1.25, 3.0, None, None, None]


def report_of(*rows: dict[str, Any], device: str = "H200") -> dict[str, Any]:
    add_ratios(rows)
    return {"device": device, "rows": list(rows)}


def test_a_ratio_that_fell_by_more_than_the_tolerance_is_a_regression() -> None:
    baseline = report_of(result(), result("tensorwise", tps=120.0))
    slower_device = report_of(result(tps=50.0), result("tensorwise", tps=60.0))
    assert find_regressions(slower_device, baseline, tolerance_pct=5.0) == []
    worse = report_of(result(), result("tensorwise", tps=110.0))
    assert find_regressions(worse, baseline, tolerance_pct=10.0) == []
    (found,) = find_regressions(worse, baseline, tolerance_pct=5.0)
    below = "tps over the bf16 row's is 1.100, 8.3 % below the baseline's 1.200"
    assert found == f"debug 4L seq128 b1 none compiled tensorwise: {below}"


def test_compilation_that_gains_less_and_a_row_that_fails_are_regressions() -> None:
    baseline = report_of(result(), result(compiled=False, tps=50.0), result("tensorwise"))
    now = report_of(
        result(), result(compiled=False, tps=100.0), result("tensorwise", status="out of memory")
    )
    first, second = find_regressions(now, baseline, tolerance_pct=5.0)
    assert first.endswith("tps over the eager row's is 1.000, 50.0 % below the baseline's 2.000")
    assert second.startswith(
        "debug 4L seq128 b1 none compiled tensorwise: out of memory, and done in the baseline"
    )


def test_a_baseline_that_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match='--check old.json is of device "H100", and this is "H200"'
    ):
        check_comparable("H200", report_of(device="H100"), path="old.json")
    with pytest.raises(ConfigError, match="no ratio is known both now and in the baseline"):
        find_regressions(report_of(result()), report_of(result(compiled=False)), tolerance_pct=5.0)
    path = tmp_path / "old.json"
    with pytest.raises(ConfigError, match="cannot be read: .*No such file"):
        read_baseline(path)
    for text, message in (("{", "cannot be read"), ("[]", "is no report of a benchmark")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_baseline(path)


def test_a_regression_is_printed_and_ends_the_command_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = tmp_path / "baseline.json"
    baseline.write_text(json.dumps(run(tmp_path, FakeRuns(), monkeypatch, only="eager")))
    script = runpy.run_path(str(ROOT / "scripts/bench.py"))["main"]
    words = ["--quick", "--only", "eager", "--check", str(baseline), "--tolerance"]
    monkeypatch.setitem(SPEEDS, "tensorwise", 90.0)  # before: 120
    script([*words, "30"])
    assert f"against {baseline}, within 30 %: 0 regressions" in capsys.readouterr().out
    with pytest.raises(
        RunError, match="eager tensorwise: tps over the bf16 row's is 0.900, 25.0 % below"
    ) as caught:
        script([*words, "20"])
    assert caught.value.exit_code == 1 and "within 20 %: 1 regressions" in capsys.readouterr().out
    monkeypatch.setattr(
        bench, "run_child", FakeRuns(dict.fromkeys(SPEEDS, Outcome("failed", "for a reason")))
    )
    with pytest.raises(RunError, match="no row is done"):
        script(["--quick"])
    assert "compiled tensorwise: failed: for a reason" in capsys.readouterr().out


def test_the_tolerance_is_wider_on_cpu() -> None:
    assert tolerance_of("CPU: test", None) == 50.0 and tolerance_of("NVIDIA H200", None) == 5.0
    assert tolerance_of("NVIDIA H200", 12.5) == 12.5
    with pytest.raises(ConfigError, match="--tolerance 100.0 must be from 0 to below 100"):
        tolerance_of("NVIDIA H200", 100.0)


def test_the_report_is_on_file_and_every_key_of_it_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report.json"
    found = run(
        tmp_path,
        FakeRuns(),
        monkeypatch,
        out=out,
        profile=True,
        command="python scripts/bench.py --quick",
    )
    assert json.loads(out.read_text()) == found == read_baseline(out)
    assert found["ended_by"] == "done" and [row["status"] for row in found["rows"]] == ["done"] * 4
    assert [profile["recipe"] for profile in found["profiles"]] == ["bf16", "tensorwise"]
    assert found["profiles"][0]["share_pct"]["GEMM bf16"] == 100
    # 100 tokens/s of bf16 matmuls alone, of which the ceiling allows 0.4e12 / FLOPs.
    flops = found["rows"][0]["flops_per_token"]["bf16"]
    assert found["rows"][0]["mfu_achievable"] == pytest.approx(100 * 100 * flops / 0.4e12)
    reference = PAGE.partition("### JSON\n")[2]
    explained = set(re.findall(r"^\| `([^`]+)` \|", reference, flags=re.MULTILINE))
    known = {
        re.sub(r"(share_pct|ceilings_tflops|flops_per_token|versions)\..*", r"\1", path)
        for path in key_paths(found)
    }
    assert explained == known | {"rows[].log_tail", "skipped[].name", "skipped[].reason"}


def test_what_does_not_fit_the_budget_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = FakeRuns(seconds=30.0)  # of 80; the first two are taken to need less
    began = runs.now
    found = run(tmp_path, runs, monkeypatch)
    assert [row["name"].split(" ", 5)[-1] for row in found["rows"]] == [
        "eager bf16",
        "eager tensorwise",
    ]
    assert {row["reason"] for row in found["skipped"]} == {"no time was left"} and len(
        found["skipped"]
    ) == 2
    assert found["ended_by"] == "the budget"
    assert runs.now - began < 80 and max(runs.timeouts) <= 80
    assert "debug 4L seq128 b1 none compiled bf16, tensorwise: no time was left" in format_report(
        found
    )


def test_the_first_row_is_run_whatever_is_expected_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        CPU, "ceilings", {"bf16": 2e-3, "fp32": 2e-3}
    )  # measured while the machine was busy
    runs = FakeRuns(seconds=10.0)
    found = run(tmp_path, runs, monkeypatch, only="eager", profile=True)
    assert [row["recipe"] for row in found["rows"]] == ["bf16", "tensorwise"]
    assert len(found["profiles"]) == 2


def test_a_small_model_that_waits_for_the_host_costs_the_large_ones_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = {
        "name": "NVIDIA H200",
        "memory_gib": 139.0,
        "float8": True,
        "ceilings": {"bf16": 800.0, "fp8": 1500.0},
    }
    found = run(tmp_path, FakeRuns(seconds=15.0, device=gpu), monkeypatch, quick=False)
    shapes = [row["shape"] for row in found["rows"]]
    assert "8B" in shapes[shapes.index("debug") :] and found["seconds"] > 480  # of 525


def test_a_recipe_that_has_not_run_yet_has_time_to_compile_whatever_bf16_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = {
        "name": "NVIDIA H200",
        "memory_gib": 139.0,
        "float8": True,
        "ceilings": {"bf16": 800.0, "fp8": 1500.0},
    }
    runs = FakeRuns(seconds=5.0, device=gpu)
    found = run(tmp_path, runs, monkeypatch, quick=False, only="8B op compiled b1")
    assert [row["recipe"] for row in found["rows"]] == [
        "bf16",
        "tensorwise",
        "rowwise",
        "rowwise_with_gw_hp",
    ]
    left = [525.0 - 3.0 - 5.0 * number for number in range(4)]
    assert runs.timeouts == pytest.approx([seconds / 2 for seconds in left])
    again = FakeRuns(seconds=5.0, device=gpu)
    (tmp_path / "again").mkdir()
    found = run(tmp_path / "again", again, monkeypatch, quick=False, only="8B compiled tensorwise")
    assert (
        again.timeouts[0] > 200 > max(again.timeouts[1:])
    )  # what compiling takes is known from the first on


def test_no_time_is_kept_for_the_profile_of_a_row_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Benchmark, "expected_s", lambda benchmark, row: 18.0)  # of 80
    kept = run(tmp_path, FakeRuns(seconds=14.0), monkeypatch, profile=True)
    assert len(kept["rows"]) == len(kept["skipped"]) == len(kept["profiles"]) == 2
    failures = FakeRuns(dict.fromkeys(SPEEDS, Outcome("failed", "for a reason")), seconds=14.0)
    (tmp_path / "other").mkdir()
    assert len(run(tmp_path / "other", failures, monkeypatch, profile=True)["rows"]) == 4


def test_a_profile_that_shows_nothing_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "break_down", lambda trace, on_cpu: break_down(trace, on_cpu=False))
    found = run(tmp_path, FakeRuns(), monkeypatch, only="eager bf16", profile=True)
    assert found["profiles"] == [] and found["ended_by"] == "done"
    (skipped,) = found["skipped"]
    assert (
        skipped["name"].startswith("profile of debug")
        and "saw no events of the kind kernel" in skipped["reason"]
    )


def test_a_row_that_the_budget_cut_off_counts_as_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = FakeRuns({"tensorwise": Outcome("timed out", "it was still running")}, seconds=70.0)
    found = run(tmp_path, runs, monkeypatch, only="eager")
    assert [row["recipe"] for row in found["rows"]] == ["bf16"]
    runs = FakeRuns({"bf16": Outcome("timed out", "it was still running")})  # long before its end
    (tmp_path / "other").mkdir()
    found = run(tmp_path / "other", runs, monkeypatch, only="eager")
    assert [row["status"] for row in found["rows"]] == ["timed out", "done"]


def test_a_row_that_fails_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = Outcome("out of memory", "OutOfMemoryError: CUDA out of memory.", log="Traceback")
    found = run(tmp_path, FakeRuns({"bf16": failure}), monkeypatch, only="eager")
    assert [row["status"] for row in found["rows"]] == ["out of memory", "done"]
    assert found["rows"][0]["log_tail"] == "Traceback" and found["rows"][1]["bf16_ratio"] is None
    table = format_report(found)
    assert "none eager bf16: out of memory: OutOfMemoryError: CUDA out of memory." in table
    assert re.search(
        r"^debug +4/4 +128 +1 +none +off +tensorwise +120 +- +- ", table, flags=re.MULTILINE
    )


def test_a_signal_ends_the_benchmark_and_what_is_done_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopping(FakeRuns):
        def __call__(self, task: Any, *arguments: Any, **options: Any) -> Outcome:
            outcome = super().__call__(task, *arguments, **options)
            if len(self.timeouts) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                return Outcome("stopped", "stopped by SIGTERM")
            return outcome

    out = tmp_path / "report.json"
    found = run(tmp_path, Stopping(), monkeypatch, out=out, profile=True)
    assert [row["status"] for row in found["rows"]] == ["done", "stopped"]
    assert [row["reason"] for row in found["skipped"]] == ["stopped by SIGTERM"] * 2
    assert json.loads(out.read_text())["ended_by"] == "SIGTERM" and found["profiles"] == []


def test_a_file_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="--out .*: there is no folder"):
        run(tmp_path, FakeRuns(), monkeypatch, out=tmp_path / "none/report.json")
    (tmp_path / "work").rmdir()
    with pytest.raises(StorageError, match="--out .*: Is a directory; name another file"):
        run(tmp_path, FakeRuns(), monkeypatch, out=tmp_path)


def test_a_device_that_cannot_be_measured_ends_it_after_a_second_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = []

    def fail(task: Any, *, method: str, **options: Any) -> Outcome:
        methods.append(method)
        return Outcome("failed", "no device", log="Traceback")

    monkeypatch.setattr(bench, "run_child", fail)
    with pytest.raises(RunError, match="the device cannot be measured: no device\nTraceback"):
        Benchmark(Options(), stop=Stop(), folder=tmp_path, began=0.0)
    assert methods == ["forkserver", "spawn"]


def test_the_plan_of_a_gpu_fits_the_budget_and_needs_none() -> None:
    plan = make_plan(planned_device(resolve_device("H200")), quick=False)
    assert (
        len(plan["rows"]) > 10
        and sum(row["expected_s"] for row in plan["rows"]) <= plan["budget_s"] < 9 * 60
    )
    assert len(plan["rows"]) + len(plan["skipped"]) == 52
    table = format_plan(plan)
    assert table.startswith("plan for H200\nlayers: the most with which bf16")
    assert re.search(
        r"^8B +\d+/32 +8192 +1 +op +on +tensorwise +[\d,]+ +\d+\.\d +\d+$",
        table,
        flags=re.MULTILINE,
    )
    quick = make_plan(Device("CPU: test", None, False, {"bf16": 4.0, "fp32": 1.0}), quick=True)
    assert len(quick["rows"]) == 4 and "  -  " in format_plan(quick)


def square(number: int) -> int:
    return number**2


def refuse() -> None:
    raise ConfigError("not like this\nsecond line")


def run_out() -> None:
    raise RuntimeError("CUDA error: out of memory")


def hang() -> None:
    time.sleep(60)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("task", "status", "reason"),
    [
        (refuse, "failed", "ConfigError: not like this"),
        (run_out, "out of memory", "RuntimeError: CUDA error: out of memory"),
        (hang, "timed out", "it was still running after 1 s"),
        (die, "failed", "its process was killed by SIGKILL"),
    ],
)
def test_how_a_child_ends(task: Any, status: str, reason: str, tmp_path: Path) -> None:
    stop = Stop()
    outcome = run_child(task, folder=tmp_path, timeout_s=1.0 if task is hang else 30.0, stop=stop)
    assert (outcome.status, outcome.reason) == (status, reason)
    assert ("Traceback" in outcome.log) is (task in (refuse, run_out))


def test_a_child_hands_its_value_back(tmp_path: Path) -> None:
    assert run_child(square, 7, folder=tmp_path, timeout_s=30.0, stop=Stop()).value == 49


def linger() -> str:
    threading.Thread(target=time.sleep, args=(60,)).start()
    return "done"


def test_a_child_that_cannot_end_is_ended_once_it_has_left_its_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_child, "GRACE_S", 0.5)
    began = time.monotonic()
    assert run_child(linger, folder=tmp_path, timeout_s=30.0, stop=Stop()).value == "done"
    assert time.monotonic() - began < 30


def test_a_signal_ends_the_child_that_runs(tmp_path: Path) -> None:
    stop = Stop()
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    kept = signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGINT))
    try:
        outcome = run_child(hang, folder=tmp_path, timeout_s=30.0, stop=stop)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, kept)
    assert (outcome.status, outcome.reason) == ("stopped", "stopped by SIGINT")
