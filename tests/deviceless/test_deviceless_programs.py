"""Checkpoints from pinned memory, rows of the benchmark, and the kernels of a GPU day."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_gpu import build, environment, read_counts
from kernel_rates import PREDICTED
from running import PROGRAM, ROOT, SMALL, float8_matmuls, run, train

from torchtitan_lite.run.run_folder import read_status

pytestmark = [pytest.mark.deviceless, pytest.mark.timeout(900)]


# ----- the launcher -----
ADAPTED = """
import os, sys

def adapt():
    if torch := sys.modules.get("torch"):
        torch.backends.cuda.enable_cudnn_sdp(False)

os.register_at_fork(after_in_child=adapt)
"""
"""Switches off cuDNN in processes that are forked, and in no others: those would fail."""


@pytest.mark.parametrize("overrides", [[], ["--compile.enable"]])
def test_workers_that_the_launcher_forks_can_use_their_gpus(
    overrides: list[str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(ADAPTED)
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    env = {"NGPU": "2", "FAKE_GPU_COUNT": "2", "FAKE_GPU_COUNTS": str(tmp_path)} | paths
    words = ["--training.steps=2", f"--job.dump_folder={tmp_path}/run", *overrides]
    words += ["--training.max_consecutive_skips=2"]  # values mean nothing
    result = subprocess.run(
        [sys.executable, "-m", "torchtitan_lite", "train", *words],
        env=os.environ | environment(build()) | env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert float8_matmuls(read_counts(tmp_path, 1))


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


# ----- gpu_day, kernel_times -----
def test_gpu_day_times_every_kernel(tmp_path: Path) -> None:
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

    # Which scales ran: tensors' in two kinds of matmuls, and rows' in one. How often each is timed
    # depends on the host.
    matmuls = float8_matmuls(done.calls)
    by_scales = {name.partition("scales: ")[2]: n for name, n in matmuls.items()}
    assert by_scales.keys() == {"tensor, tensor", "row, row"}
    assert by_scales["tensor, tensor"] == pytest.approx(2 * by_scales["row, row"], rel=0.15)
