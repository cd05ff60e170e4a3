"""The benchmark's own runs, on CPU: scripts/bench.py as a user starts it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import warm
from launching import ENV, ROOT

SCRIPT = "scripts/bench.py"
QUICK = [SCRIPT, "--quick", "--only", "eager"]

pytestmark = pytest.mark.timeout(240)


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return warm.python(words, cwd=ROOT, env=ENV, timeout=200)


def figures(row: dict[str, Any]) -> list[Any]:
    return [
        row[name]
        for name in ("tps", "tflops", "mfu", "mfu_achievable", "memory_gib", "step_time_s")
    ]


def test_quick_rows_are_trained_measured_and_taken_apart(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    result = bench(*QUICK, "--profile", "--out", str(out))
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(out.read_text())
    assert [(row["recipe"], row["status"]) for row in report["rows"]] == [
        ("bf16", "done"),
        ("tensorwise", "done"),
    ]
    for row in report["rows"]:
        assert all(figure > 0 for figure in figures(row)) and row["measured_steps"] == 20
        assert 6 < row["loss"] < 9  # of 20 steps of warm-up: it was trained
    ratio = report["rows"][1]["tps"] / report["rows"][0]["tps"]
    assert report["rows"][1]["bf16_ratio"] == pytest.approx(ratio)
    assert (
        report["ended_by"] == "done"
        and report["emulated"]
        and "float8 is emulated" in result.stdout
    )
    bf16, float8 = (profile["share_pct"] for profile in report["profiles"])
    assert float8["GEMM fp8"] > 1 > bf16["GEMM fp8"] and bf16["GEMM bf16"] > 1
    assert bf16["loss"] > 0
    assert sum(float8.values()) == pytest.approx(100, abs=2)
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


def test_a_baseline_of_another_device_is_refused_before_any_row(tmp_path: Path) -> None:
    baseline = tmp_path / "old.json"
    baseline.write_text(json.dumps({"device": "NVIDIA H200", "rows": []}))
    result = bench(*QUICK, "--check", str(baseline))
    assert result.returncode == 2
    assert f'--check {baseline} is of device "NVIDIA H200", and this is "CPU' in result.stderr
    assert "tps" not in result.stdout


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
    assert report["ended_by"] == "SIGTERM" and report["rows"][0]["status"] == "done"
    assert "SIGTERM after" in stdout


def test_the_plan_needs_no_gpu() -> None:
    result = bench(SCRIPT, "--dry-run", "--device", "H100 SXM")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("plan for H100 SXM\n")
    for words, message in (
        (["--device", "H200"], '--device "H200" is for --dry-run'),
        (["--tolerance", "3"], "--tolerance 3.0 is for --check"),
        (
            ["--dry-run", "--out", "x", "--profile"],
            "--out, --profile: --dry-run runs and writes nothing",
        ),
    ):
        refused = bench(SCRIPT, *words)
        assert refused.returncode == 2 and message in refused.stderr
