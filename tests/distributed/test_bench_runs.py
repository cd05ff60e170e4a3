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

BENCH = ["-m", "torchtitan_lite", "bench", "bf16", "tensorwise", "--out"]

pytestmark = pytest.mark.timeout(240)


def rows_of(table: str) -> dict[str, list[str]]:
    """The cells of each row of a Markdown table."""
    lines = [line.split("|")[1:-1] for line in table.splitlines() if line[:1] == "|"]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


# ----- bench -----


def test_rows_are_trained_and_compared(tmp_path: Path) -> None:
    result = warm.python([*BENCH, str(tmp_path)], cwd=ROOT, env=ENV, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = rows_of(result.stdout)
    assert list(rows) == ["run", "-" * (len("tensorwise") + 2), "bf16", "tensorwise"]
    for name in ("bf16", "tensorwise"):
        steps, loss, *_ = rows[name]
        assert steps == "12" and 6 < float(loss) < 9  # after some steps of warm-up: it was trained
        line = (tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1]
        assert json.loads(line)["mfu"] > 0
    assert float(rows["bf16"][4]) == 1.0 and float(rows["tensorwise"][4]) > 0
    assert "emulated" in result.stdout


def test_sigterm_keeps_what_is_done(tmp_path: Path) -> None:
    command = [sys.executable, *BENCH, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, text=True)
    try:
        while not (tmp_path / "tensorwise.log").exists():
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        stdout, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75
    rows = rows_of(stdout)
    assert "bf16" in rows and "tensorwise" not in rows
