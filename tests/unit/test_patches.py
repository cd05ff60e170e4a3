"""Changes to torch at run time: what they do, and when they can go."""

import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch.distributed.launcher.api import LaunchConfig

from torchtitan_lite import patches
from torchtitan_lite.agent import build_config
from torchtitan_lite.launch import read_launch

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


class OldContext:
    """Workers as torch 2.11 closes them."""

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> int:
        return timeout


class OldConfig:
    """A launch config without a time-out for the end of the workers."""

    __dataclass_fields__: Mapping[str, object] = {}


def test_a_stopped_run_may_save_for_as_long_as_the_variable_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "torch>=2.11," in PYPROJECT.read_text(), "remove allow_long_saves when torch 2.11 goes"
    monkeypatch.setattr(patches, "PContext", OldContext)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "45")
    if "shutdown_timeout" in LaunchConfig.__dataclass_fields__:
        monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank${rank}] ")
        elastic = read_launch({}, []).elastic_config()
        assert build_config(elastic, log_dir=str(tmp_path)).shutdown_timeout == 45
        patches.allow_long_saves()
        assert OldContext().close() == 30

    monkeypatch.setattr(patches, "LaunchConfig", OldConfig)
    patches.allow_long_saves()
    assert OldContext().close() == 45
