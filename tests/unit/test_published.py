"""The planner against published runs, none of which set a constant."""

import pytest
from published_plans import RATE_LIMIT, RATIO_LIMIT, Planned, plan_run
from published_runs import PUBLISHED_RUNS

from torchtitan_lite.planner.step import RESOLUTION

PLANNED = [plan_run(run) for run in PUBLISHED_RUNS]
for p in PLANNED:
    r = p.ratios
    print(
        f"{p.run.name:36} {p.run.tps:8.0f} {p.tps:8.0f} ({p.band[0]:6.0f}-{p.band[1]:6.0f}) {p.error:+4.0f}% {'*' if p.unknown else ''}"
        + (f" {r[0]:.2f} {r[1]:.2f} {p.ratio_error:+.0f}%" if r else "")
    )
