"""Report the state of runs from what they leave in their run folders, without torch."""

import os
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.tables import format_columns
from torchtitan_lite.run.run_folder import STATUS_FILE, Status, read_status

SILENT_SECONDS, SILENT_STEPS = 120.0, 20
"""A running run that reports nothing for this long, and for so many steps, may be dead."""
COLUMNS = ("run", "state", "step", "loss", "tps", "mfu", "time left", "updated")


def find_runs(folder: Path) -> dict[Path, Status]:
    """Return the run in `folder`, or the runs up to three levels below, without earlier ones in
    previous/, the last to report first; of paths to one run, the shortest. Raises ConfigError if
    there is none, and OSError for a folder that cannot be listed."""
    if (status := read_status(folder)) is not None:
        return {folder: status}
    patterns = ("*/" * level + STATUS_FILE for level in (1, 2, 3))
    below = [file.parent for pattern in patterns for file in folder.glob(pattern)]
    own = [path for path in below if "previous" not in path.relative_to(folder).parts]
    once = {os.path.realpath(path): path for path in reversed(own)}.values()
    found = {path: status for path in once if (status := read_status(path)) is not None}
    if not found:
        problem = "has no run in it" if folder.is_dir() else "is no folder"
        if folder.is_dir():
            os.scandir(f"{folder}/.").close()  # glob finds nothing in a folder it may not read
        raise ConfigError(f"{folder} {problem}; name a run's, which has a valid status.json.")
    return dict(sorted(found.items(), key=lambda item: -item[1].time))


def as_json(folder: Path, status: Status, *, now: float) -> dict[str, Any]:
    """Return the fields of status.json, and for a running run the seconds to its end and why it may
    be dead, if it may."""
    age_s, eta_s, doubt = now - status.time, None, ""
    if status.state == "running":
        left, step_s = (status.total_steps or 0) - status.step, 0.0
        if status.eta_s is not None:
            eta_s = max(0.0, status.eta_s - max(0.0, age_s))
            step_s = status.eta_s / max(left, 1)
        if age_s > max(SILENT_SECONDS, SILENT_STEPS * step_s):
            doubt = f"no report for {_span(age_s)}: it may hang, or be dead"
    own = {"folder": str(folder), "age_s": age_s, "eta_s": eta_s, "doubt": doubt}
    return asdict(status) | own


def describe(folder: Path, status: Status, *, now: float) -> dict[str, str]:
    """Return the state of a run in words; empty ones where nothing is known."""
    found, total = as_json(folder, status, now=now), status.total_steps
    running, share = status.state == "running", status.step / total if total else 0.0
    facts = {
        "run": folder.name,
        "state": f"{status.state}?" if found["doubt"] else status.state,
        "cause": status.cause or "",
        "device": f"{status.world_size} x {status.device}" if status.device else "",
        "exit code": _text(status.exit_code, "d"),
        "rank": _text(status.rank, "d"),
        "step": f"{status.step:,}/{total:,} ({share:.1%})" if total else f"{status.step:,}",
        "loss": _text(status.loss, ".4f"),
        "tps": _text(status.tps, ",.0f"),
        "mfu": _text(status.mfu, ".1f"),
        "run time": _span((now if running else status.time) - status.started),
        "time left": "" if found["eta_s"] is None else _span(found["eta_s"]),
        "last checkpoint": status.last_checkpoint or "",
        "updated": f"{_span(found['age_s'])} ago",
        "doubt": found["doubt"],
        "logs": str(folder / "logs") if status.state == "failed" else "",
    }
    return {name: " ".join(fact.split()) for name, fact in facts.items()}


def format_runs(runs: dict[Path, Status], *, now: float) -> str:
    """Return several runs as a table, or all of one."""
    described = [describe(folder, status, now=now) for folder, status in runs.items()]
    if len(runs) > 1:
        parent = os.path.commonpath([folder.parent for folder in runs])
        for folder, facts in zip(runs, described, strict=True):
            facts["run"] = os.path.relpath(folder, parent)
        rows = [[facts[name] or "-" for name in COLUMNS] for facts in described]
        return format_columns([COLUMNS, *rows], right=range(2, len(COLUMNS)))
    return format_columns([(name, fact) for name, fact in described[0].items() if fact])


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _span(seconds: float) -> str:
    """Return a time in the form 1 day, 2:03:04; 0:00:00 if the clocks of two hosts differ."""
    return str(timedelta(seconds=round(max(0.0, min(seconds, 1e10)))))
