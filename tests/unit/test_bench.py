"""The benchmark without its runs; they are in tests/distributed/test_bench_runs.py."""

import dataclasses
import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_docs import key_paths

from torchtitan_lite import bench
from torchtitan_lite.bench import (
    DONE,
    ROWS,
    Row,
    add_ratios,
    choose_rows,
    find_regressions,
    measure,
    plan_row,
    read_earlier,
    run_benchmark,
    run_row,
)
from torchtitan_lite.cli import bench_rows, run_command
from torchtitan_lite.config import check_config
from torchtitan_lite.errors import ConfigError, RunError, StorageError
from torchtitan_lite.metrics.devices import DeviceSpec
from torchtitan_lite.planner.plan import find_device, make_plan

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/performance.md").read_text()
EAGER = Row("debugmodel_gqa", 6, 256, 2, "none", False, "bf16")
FIGURES = {"tps": 100.0, "tflops": 1.0, "mfu": 50.0, "mfu_achievable": 60.0, "memory_gib": 1.0}
FIGURES |= {"step_time_s": 1.0, "spread_pct": 1.0, "loss": 7.0}
ALL_ROWS = [row for rows in ROWS.values() for row in rows]


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    kept = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, kept)


@pytest.fixture
def script() -> Callable[[list[str]], None]:
    def main(words: list[str]) -> None:
        run_command(["bench", *words])

    return main


def result(recipe: str = "bf16", *, status: str = DONE, compile: bool = True, tps: float = 100.0):
    row = dataclasses.replace(EAGER, recipe=recipe, compile=compile)
    described = dataclasses.asdict(row) | {"name": row.name, "seconds": 1.0}
    figures = FIGURES | {"tps": tps} if status == DONE else {}
    return described | {"status": status, "reason": ""} | figures


def ratios_of(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    add_ratios(rows)
    return list(rows)


def test_figures_are_medians_without_the_warmup_steps() -> None:
    tps = [1, 2, 40, 10, 30, 20, 50]
    records = [
        FIGURES | {"step": step, "tps": each, "step_time_s": each / 10}
        for step, each in enumerate(tps, 1)
    ]
    records[-1] |= {"memory_gib": 3.5, "loss": 5.0}
    figures = measure(records)
    assert (figures["tps"], figures["step_time_s"], figures["mfu"]) == (30, 3, 50)
    assert figures["spread_pct"] == pytest.approx(100 * (4 - 2) / 3)  # the middle half is 2 to 4
    assert (figures["memory_gib"], figures["loss"]) == (3.5, 5.0)
    unknown = [record | {"mfu": None} for record in records]
    assert measure(unknown)["mfu"] is None


def test_ratios_are_over_the_bf16_row_and_the_eager_row() -> None:
    rows = ratios_of(
        result(),
        result("tensorwise", tps=120.0),
        result(compile=False, tps=80.0),
        result("tensorwise", compile=False, tps=40.0),
        result("rowwise", status="failed"),
    )
    assert [row["bf16_ratio"] for row in rows] == [None, 1.2, None, 0.5, None]
    assert [row["compile_ratio"] for row in rows] == [1.25, 3.0, None, None, None]


def test_a_ratio_that_fell_by_more_than_the_tolerance_is_a_regression() -> None:
    earlier = ratios_of(result(), result("tensorwise", tps=120.0))
    slower_clock = ratios_of(result(tps=50.0), result("tensorwise", tps=60.0))
    assert find_regressions(slower_clock, earlier, tolerance_pct=5.0) == []
    worse = ratios_of(result(), result("tensorwise", tps=110.0))
    assert find_regressions(worse, earlier, tolerance_pct=10.0) == []
    (found,) = find_regressions(worse, earlier, tolerance_pct=5.0)
    assert "compiled tensorwise: tps over the bf16 row's is 1.100, 8.3 % below" in found


def test_a_lower_gain_of_compilation_and_a_row_that_fails_are_regressions() -> None:
    earlier = ratios_of(result(), result(compile=False, tps=50.0), result("tensorwise"))
    failed = result("tensorwise", status="failed")
    now = ratios_of(result(), result(compile=False, tps=100.0), failed)
    first, second = find_regressions(now, earlier, tolerance_pct=5.0)
    assert "tps over the eager row's is 1.000, 50.0 % below the earlier 2.000" in first
    assert "compiled tensorwise: failed, and was done before" in second


def test_results_without_a_common_ratio_are_refused() -> None:
    with pytest.raises(ConfigError, match="no ratio is in both"):
        find_regressions(ratios_of(result()), ratios_of(result(compile=False)), tolerance_pct=5.0)


def test_an_earlier_result_that_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    with pytest.raises(ConfigError, match="--check .*No such file.*name a file that --out wrote"):
        read_earlier(path, device="H200")
    for text in ("{", "[]", "{}"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="--check .*name a file that --out wrote"):
            read_earlier(path, device="H200")
    path.write_text(json.dumps({"device": "H100", "rows": []}))
    with pytest.raises(ConfigError, match='is of device "H100", and this is "H200"'):
        read_earlier(path, device="H200")
    assert read_earlier(path, device="H100") == []


@pytest.mark.parametrize("kind", ROWS)
def test_every_row_has_its_own_name_and_follows_the_rows_it_is_compared_with(kind: str) -> None:
    rows = ROWS[kind]
    assert len({row.name for row in rows}) == len(rows)
    for number, row in enumerate(rows):
        assert dataclasses.replace(row, recipe="bf16") in rows[: number + 1]
    assert {row.recipe for row in ROWS["GPU"]} == set(bench.RECIPES)


@pytest.mark.parametrize("row", ALL_ROWS, ids=lambda row: row.name)
def test_the_config_of_every_row_is_valid(row: Row) -> None:
    config = row.config
    assert check_config(config, world_size=1) == []
    assert config.training.local_batch_size == row.batch
    assert config.float8.enable_float8_linear is (row.recipe != "bf16")


def test_rows_are_chosen_by_the_words_of_their_names() -> None:
    assert [row.recipe for row in choose_rows("quick CPU", "eager bf16")] == ["bf16"]
    with pytest.raises(ConfigError, match='--only "mxfp8": no row has all these words'):
        choose_rows("quick CPU", "mxfp8")


@pytest.mark.parametrize("name", ["H200", "H100 SXM"])
def test_rows_have_as_many_layers_as_fit_the_gpu(name: str) -> None:
    device = find_device(name)
    layers = set()
    for row in ROWS["GPU"][:2]:
        planned, predictions = plan_row(row, device)
        layers.add(planned.layers)
        assert predictions["predicted_memory_gib"] <= device.memory_gib
        assert predictions["predicted_tps"] > 0
    (fitting,) = layers
    if fitting < 32:  # the estimate is at most two layers too careful
        more = dataclasses.replace(ROWS["GPU"][0], layers=fitting + 3, compile=False)
        plan = make_plan(more.config, world_size=1, device=device)
        assert plan["memory"]["reserved"] / 2**30 > device.memory_gib


def test_a_row_that_the_device_cannot_run_is_refused_with_the_reason() -> None:
    float8 = ROWS["GPU"][1]
    with pytest.raises(ConfigError, match="the A100 SXM 80GB has no float8 matrix units"):
        plan_row(float8, find_device("A100 SXM 80GB"))
    tiny = DeviceSpec("tiny", 100, 200, 1, 1)
    with pytest.raises(ConfigError, match="not one layer fits tiny's 1 GiB"):
        plan_row(float8, tiny)


def write_program(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have rows run `source`, which finds its run folder in `folder`."""
    (folder / "program.py").write_text(
        "import json, os, pathlib, subprocess, sys, time\n"
        f"folder = pathlib.Path(sys.argv[-1]); folder.mkdir()\n{source}\n"
    )
    monkeypatch.setattr(bench, "TRAIN", (str(folder / "program.py"),))


TRAINS = f"""
lines = [json.dumps({FIGURES!r} | dict(step=step)) for step in range(1, 13)]
(folder / "metrics.jsonl").write_text("\\n".join(lines))
"""


def test_a_row_that_fails_has_its_cause_and_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = {"state": "failed", "started": 0.0, "time": 0.0, "cause": "out of memory\nat ..."}
    source = f"(folder / 'status.json').write_text({json.dumps(status)!r}); print('why'); exit(1)"
    write_program(tmp_path, source, monkeypatch)
    found = run_row(EAGER, tmp_path / "row", timeout_s=30)
    assert (found["status"], found["reason"]) == ("failed", "out of memory")
    assert found["log_tail"] == "why" and found["name"] == EAGER.name
    write_program(tmp_path, "os.kill(os.getpid(), 9)", monkeypatch)
    assert run_row(EAGER, tmp_path / "killed", timeout_s=30)["reason"] == "exit code -9"


def test_a_row_that_takes_too_long_is_ended_with_all_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = "import time, sys; time.sleep(3); open(sys.argv[1], 'w')"
    source = f"subprocess.run([sys.executable, '-c', {child!r}, {str(tmp_path / 'late')!r}])"
    write_program(tmp_path, source, monkeypatch)
    began = time.monotonic()
    report = run_benchmark([EAGER], None, budget_s=1.0, out=None)
    assert time.monotonic() - began < 3
    assert report["rows"] == []
    assert report["skipped"] == [{"name": EAGER.name, "reason": "no time was left"}]
    time.sleep(3)
    assert not (tmp_path / "late").exists()


def test_no_row_is_started_that_should_not_fit_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(tmp_path, f"time.sleep(2)\n{TRAINS}", monkeypatch)
    rows = [EAGER, dataclasses.replace(EAGER, recipe="tensorwise")]
    report = run_benchmark(rows, None, budget_s=3.5, out=None)
    assert [row["recipe"] for row in report["rows"]] == ["bf16"]
    assert [row["reason"] for row in report["skipped"]] == ["no time was left"]
    assert report["seconds"] < 3.5 and report["ended_by"] == DONE


def test_the_report_is_on_file_and_every_key_is_documented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(tmp_path, TRAINS, monkeypatch)
    out = tmp_path / "report.json"
    found = run_benchmark(choose_rows("quick CPU", ""), None, budget_s=60.0, out=out)
    assert json.loads(out.read_text()) == found
    assert found["ended_by"] == DONE and [row["status"] for row in found["rows"]] == [DONE] * 4
    reference = PAGE.partition("## The JSON file\n")[2]
    documented = set(re.findall(r"^\| `([^`]+)` \|", reference, flags=re.MULTILINE))
    keys = {re.sub(r"versions\..*", "versions", path) for path in key_paths(found)}
    assert documented == keys | {"rows[].log_tail", "skipped[].name", "skipped[].reason"}


def test_ctrl_c_keeps_what_is_done_and_names_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(row: Row, folder: Path, *, timeout_s: float) -> dict[str, Any]:
        if row.compile:
            raise KeyboardInterrupt
        return result(row.recipe, compile=False)

    monkeypatch.setattr(bench, "run_row", run)
    rows = choose_rows("quick CPU", "")
    report = run_benchmark(rows, None, budget_s=60.0, out=None)
    done = [row["name"] for row in report["rows"]]
    assert done == [row.name for row in rows if not row.compile]
    text = bench_rows.format_report(report)
    assert "\nstopped by a signal after" in text and "debugmodel_gqa       6 " in text
    for row in rows:
        assert (f"{row.name}: not run: stopped by a signal" in text) == row.compile


def test_no_rate_is_predicted_for_a_gpu_without_a_data_sheet() -> None:
    row, h100 = ROWS["GPU"][0], find_device("H100 SXM")
    (_, known), (_, unknown) = (
        plan_row(row, dataclasses.replace(h100, name=name)) for name in (h100.name, "Some GPU")
    )
    assert known["predicted_tps"] > 0 and unknown["predicted_tps"] is None
    assert known["predicted_memory_gib"] == unknown["predicted_memory_gib"]


def test_a_file_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(tmp_path, TRAINS, monkeypatch)
    with pytest.raises(StorageError, match="--out .*Is a directory"):
        run_benchmark([EAGER], None, budget_s=60.0, out=tmp_path)


def test_a_regression_ends_the_command_with_1(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: Callable[[list[str]], None],
) -> None:
    speeds = {"bf16": 100.0, "tensorwise": 120.0}

    def run(row: Row, folder: Path, *, timeout_s: float) -> dict[str, Any]:
        return result(row.recipe, compile=row.compile, tps=speeds[row.recipe])

    monkeypatch.setattr(bench, "run_row", run)
    earlier = tmp_path / "earlier.json"
    words = ["--quick", "--only", "eager"]
    script([*words, "--out", str(earlier)])
    speeds["tensorwise"] = 90.0
    script([*words, "--check", str(earlier), "--tolerance", "30"])
    assert "0 regressions of more than 30 %" in capsys.readouterr().out
    with pytest.raises(RunError, match="0.900, 25.0 % below the earlier 1.200") as caught:
        script([*words, "--check", str(earlier), "--tolerance", "20"])
    assert caught.value.exit_code == 1
    assert "1 regressions of more than 20 %" in capsys.readouterr().out


def test_a_benchmark_without_a_row_that_is_done_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Callable[[list[str]], None]
) -> None:
    write_program(tmp_path, "sys.exit(3)", monkeypatch)
    with pytest.raises(RunError, match="no row is done"):
        script(["--quick", "--only", "eager bf16"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "H200"], '--device "H200" is for --dry-run'),
        (["--tolerance", "3"], "--tolerance 3 needs --check"),
        (["--check", "x", "--tolerance", "100"], "must be at least 0 and below 100"),
        (["--dry-run", "--out", "x"], "--out and --check need rows that run"),
        (["--out", "/no/such/folder/x"], "there is no folder /no/such/folder"),
        (["--dry-run", "--device", "H1"], '--device "H1" is not known'),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    words: list[str], message: str, script: Callable[[list[str]], None]
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        script(words)


def test_the_plan_lists_rows_with_predictions_and_refused_rows_with_the_reason(
    capsys: pytest.CaptureFixture[str], script: Callable[[list[str]], None]
) -> None:
    script(["--dry-run", "--device", "H100 SXM", "--only", "op compiled b1"])
    head, _, *lines, last = capsys.readouterr().out.splitlines()
    assert head == "plan for H100 SXM"
    assert last.startswith("predicted_tps: modelled by the planner")
    assert [line.split()[:1] for line in lines[1:5]] == [["8B"]] * 4
    assert re.search(
        r"mxfp8: not run: .*torchao has no kernels of it for the H100", "\n".join(lines)
    )
