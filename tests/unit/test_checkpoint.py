"""Which checkpoint a run resumes from. Saving and loading are tested with real processes."""

from pathlib import Path

import pytest

from torchtitan_lite.checkpoint import (
    NEW_RUN,
    Progress,
    committed_steps,
    find_resume_step,
    read_progress,
    step_folder,
)
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


def test_the_progress_of_a_checkpoint(folder: Path) -> None:
    text = '{"step": 10, "samples": 80, "tokens": 5120, "data": {"seed": 0}}'
    (step_folder(folder, 10) / "progress.json").write_text(text)
    assert read_progress(folder, 10) == Progress(step=10, samples=80, tokens=5120, data={"seed": 0})
    assert read_progress(folder, 0) == NEW_RUN


def test_a_progress_of_an_earlier_version_is_told_of(folder: Path) -> None:
    (step_folder(folder, 10) / "progress.json").write_text('{"step": 10, "tokens": 5120}')
    with pytest.raises(CheckpointError, match="progress.json is of an earlier version, which did not record samples"):
        read_progress(folder, 10)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
        ("[]", "'list' object has no attribute 'keys'"),
        ('{"samples": 1, "data": {}}', "missing 2 required positional arguments: 'step' and 'tokens'"),
    ],
)
def test_a_damaged_progress_is_refused(text: str | None, reason: str, folder: Path) -> None:
    if text is not None:
        (step_folder(folder, 10) / "progress.json").write_text(text)
    with pytest.raises(
        CheckpointError, match=rf"step-00000010/progress.json cannot be loaded: .*{reason}.*; it may be"
    ):
        read_progress(folder, 10)
