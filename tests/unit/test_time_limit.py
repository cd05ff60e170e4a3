"""When a run stops by itself: [job] max_minutes, and the end of its Slurm job."""

import math
import signal
import time
from typing import Any

import pytest

from torchtitan_lite.run.signals import StopSignal
from torchtitan_lite.run.time_limit import TimeLimit, find_time_limit
from torchtitan_lite.run.watchdog import Watchdog

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "100000"}


@pytest.mark.parametrize(
    ("max_minutes", "started", "env", "at"),
    [
        (None, 0, {}, math.inf),
        (0.5, 1000, SLURM, 1030),  # the config decides
        (None, 0, SLURM, 99_700),
        (None, 99_000, SLURM, 99_900),  # of 1,000 s the margin takes 100
        (None, 100_000, SLURM, math.inf),  # variables of an earlier job
        (None, 0, {"SLURM_JOB_END_TIME": "UNLIMITED"}, math.inf),
        (None, 0, {"SLURM_JOB_END_TIME": "9" * 20}, math.inf),
    ],
)
def test_find_time_limit(max_minutes, started, env, at):
    assert find_time_limit(max_minutes, started=started, env=env).at == at


def test_stop_requested_prefers_a_signal_to_the_time_limit():
    dog: Any = Watchdog.__new__(Watchdog)
    dog.stop_signal = StopSignal.__new__(StopSignal)
    dog.stop_signal.received, dog.time_limit = 0, TimeLimit(time.time() + 1000, "the end")
    assert dog.stop_requested() == 0
    dog.time_limit = TimeLimit(time.time(), "the end")
    assert dog.stop_cause(dog.stop_requested()) == "the end"
    dog.stop_signal.received = int(signal.SIGINT)
    assert dog.stop_cause(dog.stop_requested()) == "SIGINT"
