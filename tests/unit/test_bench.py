"""The benchmark without its runs; they are in tests/distributed/test_bench_runs.py."""

import dataclasses
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_docs import key_paths

from torchtitan_lite.base.errors import ConfigError, RunError, StorageError
from torchtitan_lite.catalog.devices import DeviceSpec
from torchtitan_lite.cli import run_command
from torchtitan_lite.config import check_config
from torchtitan_lite.planner.plan import find_device, make_plan
from torchtitan_lite.tools import bench, bench_rows
from torchtitan_lite.tools.bench import (
    DONE,
    ROWS,
    Row,
    add_ratios,
    plan_row,
    run_benchmark,
    run_row,
)

PAGE = (Path(__file__).parents[2] / "docs/performance.md").read_text()
EAGER = Row("debugmodel_gqa", 6, 256, 2, "none", False, "bf16")
FIGURES = {"tps": 100.0, "tflops": 1.0, "mfu": 50.0, "mfu_achievable": 60.0, "memory_gib": 1.0}
FIGURES |= {"step_time_s": 1.0, "spread_pct": 1.0, "loss": 7.0}


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Undo what run_benchmark sets."""
    kept = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, kept)


def script(*words: object) -> None:
    run_command(["bench", *map(str, words)])


def result(recipe: str = "bf16", *, status: str = DONE, compile: bool = True, tps: float = 100.0):
    row = dataclasses.replace(EAGER, recipe=recipe, compile=compile)
    described = dataclasses.asdict(row) | {"name": row.name, "seconds": 1.0}
    figures = FIGURES | {"tps": tps} if status == DONE else {}
    return described | {"status": status, "reason": ""} | figures


def ratios_of(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    add_ratios(rows)
    return list(rows)


# ----- measure, add_ratios -----


def test_measure_takes_medians_without_the_warmup_steps() -> None:
    tps = [1, 2, 40, 10, 30, 20, 50]
    steps = [{"step": step, "tps": x, "step_time_s": x / 10} for step, x in enumerate(tps, 1)]
    records = [FIGURES | step for step in steps]
    records[-1] |= {"memory_gib": 3.5, "loss": 5.0}
    figures = bench.measure(records)
    assert (figures["tps"], figures["step_time_s"], figures["mfu"]) == (30, 3, 50)
    assert figures["spread_pct"] == pytest.approx(100 * (4 - 2) / 3)  # the middle half is 2 to 4
    assert (figures["memory_gib"], figures["loss"]) == (3.5, 5.0)
    assert bench.measure([record | {"mfu": None} for record in records])["mfu"] is None


def test_ratios_are_over_the_bf16_row_and_the_eager_row() -> None:
    eager = [result(compile=False, tps=80.0), result("tensorwise", compile=False, tps=40.0)]
    failed = result("rowwise", status="failed")
    rows = ratios_of(result(), result("tensorwise", tps=120.0), *eager, failed)
    assert [row["bf16_ratio"] for row in rows] == [None, 1.2, None, 0.5, None]
    assert [row["compile_ratio"] for row in rows] == [1.25, 3.0, None, None, None]


# ----- find_regressions, read_earlier -----


def test_regression_is_a_ratio_that_fell_by_more_than_the_tolerance() -> None:
    earlier = ratios_of(result(), result("tensorwise", tps=120.0))
    slower_clock = ratios_of(result(tps=50.0), result("tensorwise", tps=60.0))
    assert bench.find_regressions(slower_clock, earlier, tolerance_pct=5.0) == []
    worse = ratios_of(result(), result("tensorwise", tps=110.0))
    assert bench.find_regressions(worse, earlier, tolerance_pct=10.0) == []
    (found,) = bench.find_regressions(worse, earlier, tolerance_pct=5.0)
    assert re.search(r"compiled tensorwise: .* bf16 row's is 1\.100, 8\.3 % below", found)

    # Of the gain of compilation, and a row that fails.
    earlier = ratios_of(result(), result(compile=False, tps=50.0), result("tensorwise"))
    failed = result("tensorwise", status="failed")
    now = ratios_of(result(), result(compile=False, tps=100.0), failed)
    first, second = bench.find_regressions(now, earlier, tolerance_pct=5.0)
    assert re.search(r"eager row's is 1\.000, 50\.0 % below .* 2\.000", first)
    assert "compiled tensorwise: failed" in second
    eager = ratios_of(result(compile=False))
    with pytest.raises(ConfigError, match="no ratio is in both"):
        bench.find_regressions(ratios_of(result()), eager, tolerance_pct=5.0)


def test_an_earlier_result_that_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    rows = ("3", "[3]", '[{"name": "x"}]', '[{"name": 3, "status": "done"}]')
    zero = '[{"name": "x", "status": "done", "bf16_ratio": 0}]'
    reports = ('{"device": "H200", "rows": %s}' % each for each in (*rows, zero))  # noqa: UP031
    for text in (None, "{", "[]", "{}", *reports):
        if text:
            path.write_text(text)
        with pytest.raises(ConfigError, match="--check .*name a file"):
            bench.read_earlier(path, device="H200")
    path.write_text('{"device": "H100", "rows": []}')
    with pytest.raises(ConfigError, match='device "H100", and this is "H200"'):
        bench.read_earlier(path, device="H200")
    assert bench.read_earlier(path, device="H100") == []


# ----- ROWS, choose_rows, plan_row -----


def test_rows_have_names_and_valid_configs_and_follow_what_they_are_compared_with() -> None:
    for kind, rows in ROWS.items():
        assert len({row.name for row in rows}) == len(rows), kind
        for number, row in enumerate(rows):
            assert dataclasses.replace(row, recipe="bf16") in rows[: number + 1], row.name
            assert check_config(row.config, world_size=1) == [], row.name
            assert row.config.training.local_batch_size == row.batch
            assert row.config.float8.enable_float8_linear is (row.recipe != "bf16")
    assert {row.recipe for row in ROWS["GPU"]} == set(bench.RECIPES)


def test_plan_row_has_as_many_layers_as_fit_the_gpu() -> None:
    device = find_device("H100 SXM")
    planned = [plan_row(row, device) for row in ROWS["GPU"][:2]]
    assert max(each["predicted_memory_gib"] for _, each in planned) <= device.memory_gib
    (fitting,) = {row.layers for row, _ in planned}
    # The estimate is at most two layers too careful.
    more = dataclasses.replace(ROWS["GPU"][0], layers=fitting + 3, compile=False)
    plan = make_plan(more.config, world_size=1, device=device)
    assert plan["memory"]["reserved"] / 2**30 > device.memory_gib


def test_plan_row_predicts_no_rate_of_a_gpu_without_a_data_sheet() -> None:
    first, h200 = ROWS["GPU"][0], find_device("H200")
    row, known = plan_row(first, h200)
    assert row == first and known["predicted_tps"] > 0  # all layers fit
    _, unknown = plan_row(first, dataclasses.replace(h200, name="Some GPU"))
    assert unknown == known | {"predicted_tps": None}


def test_plan_row_refuses_what_the_device_cannot_run() -> None:
    float8 = ROWS["quick GPU"][3]
    with pytest.raises(ConfigError, match="the A100 SXM 80GB has no float8 matrix units"):
        plan_row(float8, find_device("A100 SXM 80GB"))
    with pytest.raises(ConfigError, match="not one layer fits tiny's 0 GiB"):
        plan_row(float8, DeviceSpec("tiny", 100, 200, 0.01, 1))


def test_choose_rows_by_the_words_of_their_names() -> None:
    assert [row.recipe for row in bench.choose_rows("quick CPU", "eager bf16")] == ["bf16"]


# ----- run_row, run_benchmark -----


@pytest.fixture
def write_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Have rows run a program, which finds its run folder in `folder`."""
    program = tmp_path / "program.py"
    head = "import json, os, pathlib, subprocess, sys\nfolder = pathlib.Path(sys.argv[-1])\n"
    monkeypatch.setattr(bench, "TRAIN", (str(program),))
    return lambda source: program.write_text(f"{head}folder.mkdir()\n{source}\n")


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What rows end with at once, by recipe; an exception is raised."""
    found: dict[str, Any] = {}

    def run(row: Row, folder: Path, *, timeout_s: float) -> dict[str, Any]:
        if isinstance(found[row.recipe], BaseException):
            raise found[row.recipe]
        return found[row.recipe]

    monkeypatch.setattr(bench, "run_row", run)
    return found


LINES = "\n".join(json.dumps(FIGURES | {"step": step}) for step in range(1, 13))


def test_run_row_has_the_cause_and_log_of_a_failure(tmp_path: Path, write_program) -> None:
    status = {"state": "failed", "started": 0.0, "time": 0.0, "cause": "out of memory\nat ..."}
    text = json.dumps(status)
    write_program(f"(folder / 'status.json').write_text({text!r}); print('why'); exit(1)")
    found = run_row(EAGER, tmp_path / "row", timeout_s=30)
    assert (found["status"], found["reason"]) == ("failed", "out of memory")
    assert found["log_tail"] == "why" and found["name"] == EAGER.name
    write_program("os.kill(os.getpid(), 9)")
    assert run_row(EAGER, tmp_path / "killed", timeout_s=30)["reason"] == "exit code -9"


def test_a_row_that_takes_too_long_is_ended_with_all_it_has_started(tmp_path, write_program):
    # The row's child holds the pipe open, and writes to it if it lives on.
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    child = "import os, sys, time; time.sleep(20); os.write(int(sys.argv[1]), b'alive')"
    write_program(
        f"pipe = os.open({str(tmp_path / 'pipe')!r}, os.O_WRONLY)\n"
        f"subprocess.run([sys.executable, '-c', {child!r}, str(pipe)], pass_fds=[pipe])"
    )
    report = run_benchmark([EAGER], None, budget_s=1.0, out=None)
    skipped = [{"name": EAGER.name, "reason": "no time was left"}]
    assert (report["rows"], report["skipped"]) == ([], skipped)
    os.set_blocking(reader, True)
    assert os.read(reader, 10) == b""  # once every writer has ended
    os.close(reader)


@pytest.mark.parametrize(("budget_s", "done"), [(500.0, 2), (350.0, 1)])
def test_no_row_is_started_that_should_not_fit_the_budget(results, budget_s, done) -> None:
    results["bf16"] = results["tensorwise"] = result() | {"seconds": 400.0}
    rows = [EAGER, dataclasses.replace(EAGER, recipe="tensorwise")]
    report = run_benchmark(rows, None, budget_s=budget_s, out=None)
    assert len(report["rows"]) == done and report["ended_by"] == DONE
    assert [row["reason"] for row in report["skipped"]] == ["no time was left"] * (2 - done)


def test_the_report_is_on_file_and_every_key_is_documented(tmp_path: Path, write_program) -> None:
    write_program(f"(folder / 'metrics.jsonl').write_text({LINES!r})")
    out = tmp_path / "report.json"
    found = run_benchmark(bench.choose_rows("quick CPU", ""), None, budget_s=60.0, out=out)
    assert json.loads(out.read_text()) == found
    assert found["ended_by"] == DONE and [row["status"] for row in found["rows"]] == [DONE] * 4
    reference = PAGE.partition("## The JSON file\n")[2]
    documented = set(re.findall(r"^\| `([^`]+)` \|", reference, flags=re.MULTILINE))
    keys = {re.sub(r"versions\..*", "versions", path) for path in key_paths(found)}
    assert documented == keys | {"rows[].log_tail", "skipped[].name", "skipped[].reason"}
    with pytest.raises(StorageError, match="--out .*Is a directory"):
        run_benchmark([EAGER], None, budget_s=60.0, out=tmp_path)


def test_ctrl_c_keeps_what_is_done_and_names_what_is_left(results) -> None:
    results |= {"bf16": result(compile=False), "tensorwise": KeyboardInterrupt()}
    rows = bench.choose_rows("quick CPU", "")
    report = run_benchmark(rows, None, budget_s=60.0, out=None)
    assert [row["name"] for row in report["rows"]] == [rows[0].name]
    text = bench_rows.format_report(report)
    assert "\nstopped by a signal after" in text and "debugmodel_gqa       6 " in text
    assert all(f"{row.name}: not run: stopped by a signal" in text for row in rows[1:])


# ----- bench, the command -----


def test_a_regression_ends_the_command_with_1(tmp_path, capsys, results) -> None:
    for recipe, tps in (("bf16", 100.0), ("tensorwise", 120.0)):
        results[recipe] = result(recipe, compile=False, tps=tps)
    earlier = tmp_path / "earlier.json"
    script("--quick", "--only", "eager", "--out", earlier)
    results["tensorwise"] |= {"tps": 90.0}
    check = ("--quick", "--only", "eager", "--check", earlier, "--tolerance")
    script(*check, "30")
    assert "0 regressions of more than 30 %" in capsys.readouterr().out
    with pytest.raises(RunError, match=r"0\.900, 25\.0 % below .* 1\.200") as caught:
        script(*check, "20")
    assert caught.value.exit_code == 1
    assert "1 regressions of more than 20 %" in capsys.readouterr().out
    results["bf16"] = result(status="failed")
    with pytest.raises(RunError, match="no row is done"):
        script("--quick", "--only", "eager bf16")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "H200"], '--device "H200" is for --dry-run'),
        (["--tolerance", "3"], "--tolerance 3 needs --check"),
        (["--budget", "nan"], "--budget nan must be a number of seconds above 0"),
        (["--check", "x", "--tolerance", "100"], "--tolerance 100 .* at least 0 and below 100"),
        (["--dry-run", "--out", "x"], "--out and --check need rows that run"),
        (["--out", "/no/such/folder/x"], "there is no folder /no/such/folder"),
        (["--dry-run", "--device", "H1"], '--device "H1" is not known'),
        (["--quick", "--only", "no_such"], '--only "no_such": no row'),
    ],
)
def test_options_that_contradict_each_other_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        script(*words)


def test_dry_run_lists_rows_with_predictions_and_refused_rows_with_the_reason(capsys) -> None:
    script("--dry-run", "--device", "H100 SXM", "--only", "op compiled b1")
    head, _, *lines, last = capsys.readouterr().out.splitlines()
    assert head == "plan for H100 SXM"
    assert last.startswith("predicted_tps: modelled by the planner")
    assert [line.split()[:1] for line in lines[1:5]] == [["8B"]] * 4
    assert re.search("mxfp8: not run: .* the H100", "\n".join(lines))
