"""Samples of a run; tests/distributed/test_samples_runs.py has those of real runs."""

from types import SimpleNamespace
from typing import Any

from torchtitan_lite.base.errors import NumericError
from torchtitan_lite.config import ValidationConfig
from torchtitan_lite.training import samples


def test_samples_with_logits_that_are_no_numbers_do_not_end_a_run(monkeypatch, notices):
    def fail(*_: Any) -> None:
        raise NumericError("not finite")

    monkeypatch.setattr(samples, "continue_prompts", fail)
    validation = ValidationConfig(prompts=("a",))
    some: Any = SimpleNamespace(_tokenizer=None, _validation=validation, _copy=object())
    assert samples.Samples._generate(some) == []
    assert "no samples: not finite" in notices.text
