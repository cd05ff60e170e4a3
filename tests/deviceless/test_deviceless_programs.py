"""Checkpoints from pinned memory, rows of the benchmark, and the kernels of a GPU day."""

import json
from pathlib import Path

import pytest
from kernel_rates import PREDICTED
from running import PROGRAM, SMALL, float8_matmuls, run, train

from torchtitan_lite.planner.measured import add_measured
from torchtitan_lite.planner.plan import find_device
from torchtitan_lite.run.run_folder import read_status

pytestmark = [pytest.mark.deviceless, pytest.mark.timeout(900)]


# ----- async_mode -----
def test_async_with_pinned_mem_saves_what_a_run_resumes_from(tmp_path: Path) -> None:
    mode = "--checkpoint.async_mode=async_with_pinned_mem"
    saves = (*SMALL, "--checkpoint.enable", "--checkpoint.interval=1", mode)
    first = train(tmp_path / "first", *saves, "--training.steps=2", gpus=2)
    assert [record["step"] for record in first.records] == [1, 2]
    same = f"--job.dump_folder={first.folder}"
    train(tmp_path / "second", *saves, "--training.steps=4", same, gpus=2)
    assert [record["step"] for record in first.records] == [1, 2, 3, 4]


# ----- bench -----
def test_bench_trains_its_rows(tmp_path: Path) -> None:
    rows = ["bf16_compiled", "tensorwise_compiled", "bf16", "tensorwise"]
    run(tmp_path, str(PROGRAM), "bench", *rows, "--out", str(tmp_path / "out"), timeout=870)
    states = [read_status(tmp_path / "out" / row).state for row in rows]
    assert states == ["done"] * 4


# ----- gpu_day, kernel_times, add_measured -----
def test_gpu_day_times_every_kernel_and_keeps_results_that_plans_read(tmp_path: Path) -> None:
    out = tmp_path / "day"
    words = ["gpu_day", "run", "--out", str(out), "--only", "kernels", "--budget", "840"]
    done = run(tmp_path, str(PROGRAM), *words, timeout=870, env={"RANK": "0"})
    results = json.loads((out / "results.json").read_text())
    kernels = results["parts"]["kernels"]
    assert (results["ended_by"], kernels["status"]) == ("done", "done")

    # Times mean nothing here, but all of them are taken, except for cuDNN's attention.
    failed = [each["kind"] for each in kernels["measurements"] if "error" in each]
    assert failed == ["attention_cudnn"]
    kinds = {each["kind"] for each in kernels["measurements"]}
    assert kinds == set(PREDICTED)
    assert results["rates"].keys() | results["implausible"].keys() <= kinds - set(failed)
    add_measured(find_device("H100 SXM"), out / "results.json")

    # Which scales ran: tensors' in two kinds of matmuls, and rows' in one.
    matmuls = float8_matmuls(done.calls)
    by_scales = {name.partition("scales: ")[2]: n for name, n in matmuls.items()}
    assert by_scales.keys() == {"tensor, tensor", "row, row"}
    assert by_scales["tensor, tensor"] == pytest.approx(2 * by_scales["row, row"], rel=0.05)
