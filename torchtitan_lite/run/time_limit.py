"""The time limit of a run: [job] max_minutes, or the end of its Slurm job."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

MARGIN_SECONDS = 300.0
"""Time before the end of a Slurm job for the step in progress and the save; at most a tenth of what
the job has left when the run starts."""
LONGEST_SECONDS = 1e9
"""A Slurm job that would end later, in 30 years, has no limit."""


@dataclass(frozen=True)
class TimeLimit:
    """When a run saves and ends, in Unix seconds, and why then."""

    at: float = math.inf
    cause: str = "the time limit"

    def passed(self) -> bool:
        """Return whether it is time to end."""
        return time.time() >= self.at


def find_time_limit(
    max_minutes: float | None, *, started: float, env: Mapping[str, str]
) -> TimeLimit:
    """Return the time limit of a run that started at `started`, in Unix seconds.

    Without `max_minutes` it is the end of the Slurm job that `env` describes, minus a margin. An
    end before the start is ignored: the shell has kept the variables of an earlier job. So is one
    that no job has.
    """
    if max_minutes is not None:
        cause = f"the time limit ([job] max_minutes = {max_minutes:g})"
        return TimeLimit(started + 60 * max_minutes, cause)
    end = env.get("SLURM_JOB_END_TIME", "")
    if not end.isdecimal() or not started < float(end) < started + LONGEST_SECONDS:
        return TimeLimit()
    margin = min(MARGIN_SECONDS, (float(end) - started) / 10)
    job = env.get("SLURM_JOB_ID", "")
    return TimeLimit(float(end) - margin, f"the time limit (of Slurm job {job})")
