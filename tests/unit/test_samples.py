"""Samples of a run; tests/distributed/test_samples.py has those of real runs."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lite import samples
from torchtitan_lite.config import ValidationConfig
from torchtitan_lite.errors import NumericError
from torchtitan_lite.logger import logger


def test_logits_that_are_no_numbers_do_not_end_a_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise NumericError("not finite")

    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(samples, "Generator", lambda *_: SimpleNamespace(run=fail))
    some: Any = object.__new__(samples.Samples)
    some._tokenizer, some._validation = None, ValidationConfig()
    with caplog.at_level(logging.WARNING):
        assert some._generate([None]) == []
    assert "no samples: not finite" in caplog.text
