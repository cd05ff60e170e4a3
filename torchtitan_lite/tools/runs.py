"""Report the state of runs from what they leave in their run folders, without torch."""

import re
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.tables import format_columns
from torchtitan_lite.run.status import Status, read_status

SILENT_SECONDS, SILENT_STEPS = 120.0, 20
"""A running run that reports nothing for this long, and for so many steps, may be dead."""
LOG_BYTES, LOG_LINES = 8192, 10
SKEW_SECONDS = 60.0
"""How far the clocks of hosts and disks may differ."""
JOB = re.compile(r"process (\d+) on (.+)")
COLUMNS = ("run", "state", "step", "loss", "tps", "mfu", "time left", "updated")


def find_runs(folder: Path) -> dict[Path, Status]:
    """Return the run in `folder`, or the runs in the folders in it, the last to report first.
    Raises ConfigError if there is none."""
    if (status := read_status(folder)) is not None:
        return {folder: status}
    try:
        inside = [path for path in folder.iterdir() if path.is_dir()]
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; name a run folder.") from error
    found = {path: status for path in inside if (status := read_status(path)) is not None}
    if not found:
        raise ConfigError(f"{folder} has no valid status.json, nor has a folder in it; name a run.")
    return dict(sorted(found.items(), key=lambda item: -item[1].time))


def seconds_left(status: Status, *, now: float) -> float | None:
    """Return the seconds to the end of a running run, by its moving average of step times."""
    if status.state != "running" or status.eta_s is None:
        return None
    return max(0.0, status.eta_s - max(0.0, now - status.time))


def reason_to_doubt(status: Status, *, now: float) -> str:
    """Return why a run that is marked as running may not be; empty if nothing says so."""
    if status.state != "running":
        return ""
    job = JOB.fullmatch(status.job or "")
    if job and job[2] == socket.gethostname() and not Path(f"/proc/{job[1]}").exists():
        return f"process {job[1]}, which started it on this host, is gone"
    left = (status.total_steps or 0) - status.step
    step_s = status.eta_s / left if status.eta_s and left > 0 else 0.0
    if now - status.time > max(SILENT_SECONDS, SILENT_STEPS * step_s):
        return f"no report for {_span(now - status.time)}: it may hang, or be dead"
    return ""


def as_json(folder: Path, status: Status, *, now: float) -> dict[str, Any]:
    """Return the fields of status.json, and what follows from them."""
    left = seconds_left(status, now=now)
    doubt = reason_to_doubt(status, now=now)
    own = {"folder": str(folder), "age_s": now - status.time, "doubt": doubt}
    return asdict(status) | own | {"eta_s": left}


def format_table(runs: dict[Path, Status], *, now: float) -> str:
    """Return a line for each run."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for folder, status in runs.items():
        state = f"{status.state}?" if reason_to_doubt(status, now=now) else status.state
        rows.append((_one_line(folder.name), state, *_figures(status, now=now)))
    return format_columns(rows, right=range(2, len(COLUMNS)))


def format_run(folder: Path, status: Status, *, now: float) -> str:
    """Return the state of a run in lines; of a failed one also the end of its log."""
    step, loss, tps, mfu, left, updated = _figures(status, now=now)
    if status.total_steps:
        step += f" ({100 * status.step / status.total_steps:.1f} %)"
    facts = {
        "state": status.state,
        "cause": _one_line(status.cause or ""),
        "exit code": "" if status.exit_code is None else str(status.exit_code),
        "rank": "" if status.rank is None else str(status.rank),
        "step": step,
        "loss": loss,
        "tps": f"{tps} per device",
        "mfu": mfu,
        "running for" if status.state == "running" else "ran for": _span(
            (now if status.state == "running" else status.time) - status.started
        ),
        "time left": left,
        "last checkpoint": _one_line(status.last_checkpoint or "none"),
        "updated": updated,
        "doubt": reason_to_doubt(status, now=now),
    }

    # Only what is known, and of a failed run the end of its log.
    shown = {name: fact for name, fact in facts.items() if fact and not fact.startswith("-")}
    width = max(map(len, shown))
    lines = [str(folder), *(f"  {name:<{width}}  {fact}" for name, fact in shown.items())]
    if status.state == "failed":
        lines += [f"  {line}" for line in log_end(folder, status)]
    return "\n".join(lines)


def log_end(folder: Path, status: Status) -> list[str]:
    """Return the last lines that the rank at fault logged since the run started, or if it logged
    none, any rank, under the name of their file."""
    # LAUNCH/RUN/attempt_K/LOCAL_RANK/{stdout,stderr}.log; the launcher's own is torchrun.log.
    logs = list((folder / "logs").glob("*/*/attempt_*/*/std*.log"))
    found = [(path, path.stat()) for path in logs if path.is_file()]
    since = status.started - SKEW_SECONDS
    written = [path for path, stat in found if stat.st_size and stat.st_mtime > since]
    own = [path for path in written if path.parent.name == str(status.rank)] or written
    if not own:
        return []
    last = max(own, key=lambda path: path.stat().st_mtime)
    with last.open("rb") as file:
        file.seek(max(0, last.stat().st_size - LOG_BYTES))
        text = file.read(LOG_BYTES).decode(errors="replace")
    return [f"{last}:", *(f"  {line}" for line in text.splitlines()[-LOG_LINES:])]


def _figures(status: Status, *, now: float) -> Iterator[str]:
    """Yield the texts of COLUMNS after the first two, - for what is not known."""
    total = "?" if status.total_steps is None else f"{status.total_steps:,}"
    yield f"{status.step:,}/{total}"
    yield "-" if status.loss is None else f"{status.loss:.4f}"
    yield "-" if status.tps is None else f"{status.tps:,.0f}"
    yield "-" if status.mfu is None else f"{status.mfu:.1f}%"
    left = seconds_left(status, now=now)
    yield "-" if left is None else _span(left)
    yield f"{_span(now - status.time)} ago"


def _span(seconds: float) -> str:
    """Return a time in the form 1 day, 2:03:04; 0:00:00 if the clocks of two hosts differ."""
    return str(timedelta(seconds=round(max(0.0, min(seconds, 1e10)))))


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def watch_code(runs: dict[Path, Status]) -> int | None:
    """Return the exit code of a single run that has ended; None while it, or one of many, runs."""
    if any(status.state == "running" for status in runs.values()):
        return None
    (first, *others) = runs.values()
    return 0 if others else first.exit_code or 0


def watch(folder: Path, *, interval_s: float, clear: bool) -> int:
    """Print the state of `folder` every `interval_s` until its runs have ended. Return the exit
    code of the run. `clear` redraws a terminal in place."""
    while True:
        runs = find_runs(folder)
        print(end="\033[H\033[J" if clear else "", file=sys.__stdout__)
        print(format_runs(runs, now=time.time()), flush=True)
        if (code := watch_code(runs)) is not None:
            return code
        time.sleep(interval_s)


def format_runs(runs: dict[Path, Status], *, now: float) -> str:
    """Return one run in lines, or several as a table."""
    if len(runs) > 1:
        return format_table(runs, now=now)
    ((folder, status),) = runs.items()
    return format_run(folder, status, now=now)
