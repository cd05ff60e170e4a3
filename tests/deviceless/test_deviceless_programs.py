"""Checkpoints from pinned memory, the quick benchmark, and the kernels of a GPU day."""

import json
from pathlib import Path

import pytest
from kernel_rates import PREDICTED
from kernel_times import COMPARED
from running import PROGRAM, run, train
from test_deviceless_training import SMALL

from torchtitan_lite.planner.measured import add_measured
from torchtitan_lite.planner.plan import find_device

pytestmark = [pytest.mark.deviceless, pytest.mark.timeout(900)]


def test_a_run_resumes_from_what_was_saved_from_pinned_memory(tmp_path: Path) -> None:
    saves = (
        *SMALL,
        "--checkpoint.enable",
        "--checkpoint.async_mode=async_with_pinned_mem",
        "--checkpoint.interval=1",
    )
    first = train(tmp_path / "first", *saves, gpus=2)
    assert [record["step"] for record in first.records] == [1, 2, 3]
    train(
        tmp_path / "second",
        *saves,
        "--training.steps=5",
        f"--job.dump_folder={first.folder}",
        gpus=2,
    )
    assert [record["step"] for record in first.records] == [1, 2, 3, 4, 5]


def test_the_quick_benchmark_measures_all_of_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    words = ["bench", "--quick", "--budget", "580", "--out", str(out)]
    run(tmp_path, str(PROGRAM), *words, timeout=600)
    report = json.loads(out.read_text())
    assert [(row["status"], row.get("reason")) for row in report["rows"]] == [("done", "")] * 4
    assert report["skipped"] == []


def test_a_gpu_day_times_every_kernel_and_keeps_results_that_plans_read(tmp_path: Path) -> None:
    out = tmp_path / "day"
    words = ["gpu_day", "run", "--out", str(out), "--only", "kernels", "--budget", "600"]
    done = run(tmp_path, str(PROGRAM), *words, timeout=600, env={"RANK": "0"})
    results = json.loads((out / "results.json").read_text())
    kernels = results["parts"]["kernels"]
    assert (results["ended_by"], kernels["status"]) == ("done", "done")

    # Times mean nothing here, but all of them are taken, except for cuDNN's attention.
    failed = [each["kind"] for each in kernels["measurements"] if "error" in each]
    assert failed == ["attention_cudnn"]
    kinds = {each["kind"] for each in kernels["measurements"]}
    assert kinds == {*PREDICTED, *COMPARED}
    assert results["rates"].keys() | results["implausible"].keys() <= kinds - set(failed)
    add_measured(find_device("H100 SXM"), out / "results.json")

    # Which scales ran: tensors' in three kinds of matmuls, and rows' in two.
    by_scales = {name.partition("scales: ")[2]: n for name, n in done.float8_matmuls.items()}
    assert by_scales.keys() == {"tensor, tensor", "row, row"}
    assert by_scales["tensor, tensor"] == pytest.approx(1.5 * by_scales["row, row"], rel=0.05)
