"""The runs behind docs/float8_parity.md, and the page that float8_parity.py writes of them."""

import json
import runpy
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from sample_records import RECORD

pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).parents[2] / "scripts/float8_parity.py")


def test_float8_parity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, names = runpy.run_path(SCRIPT), []

    def launch(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        (option,) = (word for word in command if word.startswith("--job.dump_folder="))
        folder = Path(option.partition("=")[2])
        names.append(folder.name)
        folder.mkdir()
        loss = 4.02 if folder.name.startswith("rowwise-") else 4.0
        lines = (json.dumps(asdict(replace(RECORD, step=n, tokens=n, loss=loss))) for n in (1, 2))
        (folder / "metrics.jsonl").write_text("\n".join(lines))
        (folder / "status.json").write_text(json.dumps({"state": "done", "started": 0, "time": 0}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", launch)
    page = tmp_path / "page.md"
    script["main"](["--out", str(tmp_path / "runs"), "--page", str(page), "--jobs", "3"])
    assert sorted(names) == sorted(script["list_runs"]()) and len(names) == 7 * 3 + 2 * 3
    row = f"| rowwise               {'| 4.0200 (+0.50 %) ' * 3}|"
    assert row in page.read_text()
