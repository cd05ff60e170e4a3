"""Which checkpoint a run resumes from. Saving and loading are tested with real processes."""

from pathlib import Path

import pytest

from torchtitan_lite.checkpoint import committed_steps, find_resume_step, step_folder
from torchtitan_lite.config import CheckpointConfig
from torchtitan_lite.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("step-00000010", "step-00000200", ".tmp-step-00000300", "step-7", "other"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_only_complete_checkpoints_count(folder: Path) -> None:
    assert committed_steps(folder) == [10, 200]
    assert committed_steps(folder / "missing") == []
    assert step_folder(folder, 10).is_dir()


@pytest.mark.parametrize(
    ("settings", "step"),
    [({"enable": True}, 200), ({"enable": True, "load_step": 10}, 10), ({"enable": True, "load_step": 0}, 0), ({}, 0)],
)
def test_the_newest_is_resumed_from_unless_told_otherwise(settings: dict[str, int], step: int, folder: Path) -> None:
    assert find_resume_step(CheckpointConfig(**settings), folder=folder) == step


def test_with_no_checkpoint_there_is_nothing_to_resume(tmp_path: Path) -> None:
    assert find_resume_step(CheckpointConfig(enable=True), folder=tmp_path / "checkpoint") == 0


def test_a_step_without_a_checkpoint_is_refused_with_those_there_are(folder: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"load_step = 300: .* has no checkpoint of that step \(it has: 10, 200\)"
    ):
        find_resume_step(CheckpointConfig(enable=True, load_step=300), folder=folder)
