"""What the unit tests share."""

import logging
from collections.abc import Iterator

import pytest
import torch._functorch.config
from hypothesis import settings

from torchtitan_lite.logger import logger

# No test is timed: a busy machine is not a fault.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def keep_compiler_settings() -> Iterator[None]:
    """Undo what a test sets in the compiler: the job sets it for the process."""
    with (
        torch._functorch.config.patch(
            activation_memory_budget=1.0, unsafe_treat_script_objects_as_zero_size=False
        ),
        torch._dynamo.config.patch(run_gc_after_compile=True),
        torch._inductor.config.patch(bucket_all_reduces_fx="none", _micro_pipeline_tp=False),
    ):
        yield


@pytest.fixture(autouse=True)
def keep_log_level() -> Iterator[None]:
    """Undo what a command sets in the logger: it runs once in a process, but tests run many."""
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def notices(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """What the package logs at info level and above."""
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, logger=logger.name)
    return caplog
