"""The state of runs, as `torchtitan-lite status` reports it from their folders."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.cli import run_command
from torchtitan_lite.run.run_folder import Status, write_status
from torchtitan_lite.tools.runs import as_json, find_runs, format_runs

NOW = 1_800_000_000.0
RUNNING = Status(
    "running", started=NOW - 3600, time=NOW - 10, step=1200, total_steps=10_000, loss=3.21,
    tps=12_810.4, mfu=41.25, eta_s=7200.0, last_checkpoint="r/checkpoint/step-00001000",
    job="process 999999999 on elsewhere", device="NVIDIA H200", world_size=8,
)  # fmt: skip
CAUSE = "rank 1 was \nkilled"
FAILED = replace(RUNNING, state="failed", cause=CAUSE, exit_code=6, rank=1, eta_s=None)


def make_run(folder: Path, status: Status) -> Path:
    folder.mkdir(parents=True)
    write_status(folder, status)
    return folder


# ----- format_runs -----


def test_a_running_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", RUNNING)
    assert format_runs(find_runs(run), now=NOW).splitlines() == [
        "run              r",
        "state            running",
        "device           8 x NVIDIA H200",
        "step             1,200/10,000 (12.0%)",
        "loss             3.2100",
        "tps              12,810",
        "mfu              41.2",
        "run time         1:00:00",
        "time left        1:59:50",
        "last checkpoint  r/checkpoint/step-00001000",
        "updated          0:00:10 ago",
    ]


def test_a_failed_run_comes_with_its_cause_and_the_folder_of_its_logs(tmp_path: Path) -> None:
    lines = format_runs({tmp_path: FAILED}, now=NOW).splitlines()
    known = {"cause            rank 1 was killed", "exit code        6", "rank             1"}
    assert known | {f"logs             {tmp_path}/logs"} <= set(lines)


def test_several_runs_are_a_table_the_last_to_report_first(tmp_path: Path) -> None:
    make_run(tmp_path / "old", replace(FAILED, time=NOW - 86_400))
    make_run(tmp_path / "new", RUNNING)
    make_run(tmp_path / "bench/a/silent", replace(RUNNING, time=NOW - 1000))
    make_run(tmp_path / "new/previous/2026-11-20T20-53-20", FAILED)
    (tmp_path / "other").mkdir()
    lines = format_runs(find_runs(tmp_path), now=NOW).splitlines()
    found = [" ".join(line.split()[:2]) for line in lines]
    assert found == ["run state", "new running", "bench/a/silent running?", "old failed"]
    (earlier,) = find_runs(tmp_path / "new/previous")
    assert earlier.name == "2026-11-20T20-53-20"
    assert max(map(len, lines)) <= 100


# ----- as_json -----


@pytest.mark.parametrize(
    ("changes", "doubt"),
    [
        ({"time": NOW + 500}, ""),  # clocks differ
        ({"time": NOW - 120}, ""),  # a step takes 0.8 s: 7200 s for 8,800
        ({"time": NOW - 121}, "no report for 0:02:01"),
        ({"time": NOW - 121, "eta_s": None}, "no report for 0:02:01"),
        ({"time": NOW - 200, "eta_s": 88_000.0}, ""),  # 20 steps of 10 s
        ({"time": NOW - 201, "eta_s": 88_000.0}, "no report for 0:03:21"),
        ({"state": "done", "time": NOW - 9999}, ""),
    ],
)
def test_a_run_that_may_be_dead_is_doubted(changes: dict, doubt: str) -> None:
    found = as_json(Path("r"), replace(RUNNING, **changes), now=NOW)
    assert re.match(f"{doubt}:" if doubt else "$", found["doubt"])


def test_clocks_that_differ_give_no_negative_times() -> None:
    ahead = replace(RUNNING, time=NOW + 500, started=NOW + 400)
    assert as_json(Path("r"), ahead, now=NOW)["eta_s"] == 7200
    text = format_runs({Path("r"): ahead}, now=NOW)
    assert "run time         0:00:00" in text and "updated          0:00:00 ago" in text


# ----- find_runs, status -----


def test_a_folder_without_a_valid_status_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"{", b"[]", b'{"state": "running"}', b"\xff" * 99, b'{"state": 1}' * 9):
        (tmp_path / "status.json").write_bytes(content)
        with pytest.raises(ConfigError, match="has no run in it; name a run's, which has a valid"):
            find_runs(tmp_path)
    with pytest.raises(ConfigError, match="none is no folder; name a run's, "):
        find_runs(tmp_path / "none")


def test_a_folder_that_cannot_be_listed_is_an_error_of_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "scandir", Mock(side_effect=PermissionError(13, "denied")))
    with pytest.raises(PermissionError, match="denied"):
        find_runs(tmp_path)


def test_a_run_that_links_lead_to_is_found_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "loop/r", RUNNING)
    (tmp_path / "loop/again").symlink_to(".")
    (tmp_path / "loop/up").symlink_to("..")
    assert list(find_runs(tmp_path / "loop")) == [run]


def test_the_command(tmp_path, capsys) -> None:
    run = make_run(tmp_path / "r", FAILED)
    text = (run / "status.json").read_text().replace('"loss": 3.21', '"loss": NaN')
    (run / "status.json").write_text(text)  # as up to version 0.3
    run_command(["status", str(run)])
    assert "\nstate            failed\n" in capsys.readouterr().out
    run_command(["status", str(run), "--json"])
    (found,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["loss"] is None
    assert (found["state"], found["exit_code"], found["folder"]) == ("failed", 6, str(run))
