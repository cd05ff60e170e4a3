"""Samples of a run; tests/distributed/test_samples_runs.py has those of real runs."""

from types import SimpleNamespace
from typing import Any

from torchtitan_lite.base.errors import NumericError
from torchtitan_lite.config import Config, ValidationConfig
from torchtitan_lite.training import samples


def test_samples_with_logits_that_are_no_numbers_do_not_end_a_run(monkeypatch, notices):
    def fail(*_: Any) -> None:
        raise NumericError("not finite")

    monkeypatch.setattr(samples, "continue_prompts", fail)
    job = SimpleNamespace(config=Config(validation=ValidationConfig(prompts=("a",))))
    some: Any = SimpleNamespace(_tokenizer=None, _job=job)
    assert samples.Samples._generate(some, object()) == []
    assert "no samples: not finite" in notices.text
