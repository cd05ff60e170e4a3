"""What the unit tests share."""

import logging

import pytest
from hypothesis import settings

from torchtitan_lite.logger import logger

# No test is timed: a busy machine is not a fault.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture
def notices(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """What the package logs at info level and above."""
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, logger=logger.name)
    return caplog
