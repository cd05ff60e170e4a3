"""The benchmark's own runs, on CPU: the command as a user starts it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm
from launching import ENV, ROOT

QUICK = ["-m", "torchtitan_lite", "bench", "--quick", "--only", "eager"]
FIGURES = ("tps", "tflops", "mfu", "mfu_achievable", "memory_gib", "step_time_s")

pytestmark = pytest.mark.timeout(240)


# ----- bench -----


def test_quick_rows_are_trained_and_measured(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    result = warm.python([*QUICK, "--out", str(out)], cwd=ROOT, env=ENV, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(out.read_text())
    rows = [(row["recipe"], row["status"]) for row in report["rows"]]
    assert rows == [("bf16", "done"), ("tensorwise", "done")]
    for row in report["rows"]:
        assert all(row[figure] > 0 for figure in FIGURES)
        assert 6 < row["loss"] < 9  # after some steps of warm-up: it was trained
    ratio = report["rows"][1]["tps"] / report["rows"][0]["tps"]
    assert report["rows"][1]["bf16_ratio"] == pytest.approx(ratio)
    assert report["ended_by"] == "done" and report["emulated"]
    assert "float8 is emulated" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


def test_sigterm_keeps_what_is_done(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    command = [sys.executable, *QUICK, "--out", str(out)]
    process = subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, text=True)
    try:
        while not (out.exists() and json.loads(out.read_text())["rows"]):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        stdout, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75
    report = json.loads(out.read_text())
    assert report["ended_by"] == "stopped by a signal" and report["rows"][0]["status"] == "done"
    assert "stopped by a signal after" in stdout
