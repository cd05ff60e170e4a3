"""Checkpoints from pinned memory, and the quick benchmark."""

import json
from pathlib import Path

import pytest
from running import PROGRAM, run, train
from test_deviceless_training import SMALL

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
