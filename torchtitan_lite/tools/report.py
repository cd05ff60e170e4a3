"""Write a comparison of runs as one HTML page without scripts, from the template report.html."""

import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import StrictUndefined, Template
from pydantic import ValidationError

from torchtitan_lite.base.errors import ConfigError, RunError, kind_of
from torchtitan_lite.base.files import replace_file, storage_fix
from torchtitan_lite.base.terminal import clean
from torchtitan_lite.catalog.devices import lookup_device
from torchtitan_lite.catalog.recipes import RECIPES
from torchtitan_lite.config import load_config
from torchtitan_lite.metrics.figures import FIGURES
from torchtitan_lite.metrics.records import Line, read_records
from torchtitan_lite.planner.plan import find_device, plan
from torchtitan_lite.run.run_folder import Status, read_status

from .comparison import COLUMNS, SPEEDS, Run, Runs, compare, group_seeds, notes, setting_rows
from .curves import Array, draw_chart
from .runs import describe

CHARTS = ("loss", "validation_loss", "grad_norm", "tps", "mfu", "memory_gib")


class ShownLine(Line):
    """The fields of a line of numerics.jsonl or samples.jsonl that the page shows."""

    kinds: dict[str, dict[str, dict[str, float | None]]] = {}
    prompt: str = ""
    text: str = ""


def write_report(path: Path, runs: Runs, *, last: int) -> None:
    """Write the page, in place of an earlier one. Raises ConfigError or StorageError."""
    if path.suffix != ".html":  # a slip must not replace a run's file
        raise ConfigError(f"--html {path} must end in .html")

    # Read the states, and draw the curves.
    groups, now = group_seeds(runs), time.time()
    status = {name: read_status(run.folder) for name, run in runs.items()}
    charts = {}
    for key in CHARTS:
        charts[key] = draw_chart([[find_curve(runs[n], key) for n in names] for names in groups])

    # Every text of a run is escaped by the template, and its control characters by `clean`.
    text = Path(__file__).with_name("report.html").read_text()
    page = Template(text, autoescape=True, trim_blocks=True, undefined=StrictUndefined).render(
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now)),
        runs=runs,
        groups=groups,
        notes=notes(runs, last=last),
        charts=charts,
        figures=FIGURES,
        columns=COLUMNS,
        rows=compare(runs, last=last),
        states={n: describe(runs[n].folder, s, now=now) if s else {} for n, s in status.items()},
        settings=setting_rows(runs),
        plans={name: plan_run(run, status[name]) for name, run in runs.items()},
        numerics={name: last_lines(run.folder / "numerics.jsonl", 1) for name, run in runs.items()},
        samples={name: last_lines(run.folder / "samples.jsonl", 4) for name, run in runs.items()},
    )
    try:
        replace_file(path, clean(page))
    except OSError as error:
        problem = f"--html {path} cannot be written: {error.strerror}; {storage_fix(error)}"
        raise kind_of(error)(f"{problem}, or name another file.") from error


def find_curve(run: Run, key: str) -> Array:
    """Return a curve [2, N]: millions of tokens, and the figure `key`; speeds without step 1."""
    figures = run.validations if key == "validation_loss" else run.figures
    first = 1 if key in SPEEDS else 0
    return np.stack([figures["tokens"] / 1e6, figures[key]])[:, first:]


def plan_run(run: Run, status: Status | None) -> dict[str, Any]:
    """Return the rates and the memory (GiB) planned for a run on its device, or why there are none,
    as `problem`."""
    if status is None or status.world_size is None or not lookup_device(status.device or ""):
        return {"problem": "no data sheet of the device"}
    # A page loads no code that a run's config names.
    if run.settings.get("[float8] recipe_name") not in RECIPES:
        return {"problem": "no config.toml with a [float8] recipe_name of this package"}
    try:
        words = [f"--job.config_file={run.folder / 'config.toml'}"]
        config = load_config(words, world_size=status.world_size)
        device = find_device(status.device, config.metrics)
        found = plan(config, world_size=status.world_size, device=device)
    except RunError as error:
        return {"problem": str(error)}
    return found["schedule"] | {"memory_gib": found["memory"]["reserved"] / 2**30}


def last_lines(file: Path, count: int) -> list[ShownLine]:
    """Return the last `count` lines of a file of records, without any that do not parse."""
    lines = []
    for content, _ in deque(read_records(file), maxlen=count):
        with suppress(ValidationError):
            lines.append(ShownLine.model_validate_json(content))
    return lines
