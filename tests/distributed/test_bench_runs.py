"""The benchmark's own runs, on CPU, as a user starts it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm
from launching import ENV, ROOT

from torchtitan_lite.tools.comparison import read_runs

BENCH = ["scripts/benchmarks/bench.py", "bf16", "tensorwise", "--out"]

pytestmark = pytest.mark.timeout(240)


def figures_of(table: str) -> dict[str, dict[str, str]]:
    """The figures of each run, by name, in a Markdown table with a column per run."""
    lines = [line.split("|")[1:-1] for line in table.splitlines() if line[:1] == "|"]
    heading, _, *rows = ([cell.strip() for cell in cells] for cells in lines)
    return {
        run: {row[0]: row[column] for row in rows} for column, run in enumerate(heading) if column
    }


# ----- bench -----


def test_rows_are_trained_and_compared(tmp_path: Path) -> None:
    result = warm.python([*BENCH, str(tmp_path)], cwd=ROOT, env=ENV, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    runs = figures_of(result.stdout)
    assert list(runs) == ["bf16", "tensorwise"]
    for name, figures in runs.items():
        # After some steps of warm-up: it was trained.
        assert figures["steps"] == "12" and 6 < float(figures["final loss"]) < 9
        line = (tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1]
        assert json.loads(line)["mfu"] > 0
    assert float(runs["bf16"]["times first"]) == 1.0
    assert float(runs["tensorwise"]["times first"]) > 0
    assert "emulated" in result.stdout


def test_sigterm_ends_the_row_and_keeps_what_is_done(tmp_path: Path) -> None:
    command = [sys.executable, *BENCH, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env=ENV)
    try:
        while not (tmp_path / "tensorwise.log").exists():
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert read_runs([tmp_path / "bf16"])
