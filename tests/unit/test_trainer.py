"""The parts of the trainer that need no process group."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan_lite.checkpoint.checkpointer import Checkpointer
from torchtitan_lite.config import CheckpointConfig, DebugConfig
from torchtitan_lite.metrics.processor import Skips
from torchtitan_lite.parallel.distributed import set_determinism


def test_too_many_steps_in_a_row_without_an_update_end_the_run() -> None:
    assert Skips().error(1) is None
    skips = Skips(consecutive=3, step=7, loss=math.nan, grad_norm=1.0)
    assert skips.error(4) is None
    error = skips.error(3)
    assert error is not None and error.exit_code == 5
    assert str(error).startswith(
        "[training] max_consecutive_skips = 3: the 3 steps up to 7 had no update"
    )
    assert "step 7: loss = nan, grad_norm = 1.0. Lower [optimizer] lr" in str(error)


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


@pytest.mark.parametrize("enabled", [True, False])
def test_a_request_to_save_is_answered(
    enabled: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer: Any = SimpleNamespace(saves=enabled, _settings=CheckpointConfig())
    assert Checkpointer.save_requested(checkpointer, tmp_path) is False
    (tmp_path / "SAVE").touch()
    with caplog.at_level("INFO"):
        assert Checkpointer.save_requested(checkpointer, tmp_path) is enabled
    assert not (tmp_path / "SAVE").exists()
    assert (
        "SAVE: not saved: [checkpoint] enable = false or load_only = true" in caplog.text
    ) is not enabled
