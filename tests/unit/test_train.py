"""The parts of the trainer that need no process group."""

import errno
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan_lite.config import Config, DebugConfig, MetricsConfig
from torchtitan_lite.errors import NumericError, StorageError
from torchtitan_lite.train import check_finite, explain_disk_failure, run_entries, set_determinism


def test_steps_without_an_update_end_the_run() -> None:
    check_finite(None)
    record: Any = SimpleNamespace(step=7, skipped_steps=2, loss=math.nan, grad_norm=1.0)
    with pytest.raises(NumericError, match=r"2 of the steps up to 7 had .*; step 7: loss = nan, grad_norm = 1.0\."):
        check_finite(record)


def test_the_entries_of_a_run_are_the_folders_that_its_config_names() -> None:
    entries = run_entries(Config(metrics=MetricsConfig(save_tb_folder="curves")))
    assert entries == ["metrics.jsonl", "wandb", "checkpoint", "curves", "profile_traces", "memory_snapshot"]


def test_deterministic_algorithms_are_used_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        set_determinism(DebugConfig(seed=3))
        first = torch.rand(1)
        assert not torch.are_deterministic_algorithms_enabled()
        set_determinism(DebugConfig(seed=3, deterministic=True))
        assert torch.equal(torch.rand(1), first)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


def test_a_failing_disk_is_told_from_other_failures() -> None:
    full = explain_disk_failure(OSError(errno.ENOSPC, "No space left on device"), "/runs/a")
    assert isinstance(full, StorageError) and full.exit_code == 7
    assert str(full).startswith('[job] dump_folder = "/runs/a": [Errno 28] No space left on device; make room')
    for other in (OSError(errno.ECONNRESET, "reset"), ValueError("no")):
        assert explain_disk_failure(other, "/runs/a") is other
