"""The parts of the main job before and around the training."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from sample_checkpoints import CONFIG, write_checkpoint

from torchtitan_lite.config import CheckpointConfig, Config, JobConfig, MetricsConfig
from torchtitan_lite.errors import CheckpointError, ConfigError
from torchtitan_lite.train import open_folder, run_entries


def test_the_entries_of_a_run_are_the_folders_that_its_config_names() -> None:
    entries = run_entries(Config(metrics=MetricsConfig(save_tb_folder="curves")))
    files = ["metrics.jsonl", "numerics.jsonl", "peaks.json", "wandb"]
    assert entries == [*files, "checkpoint", "curves", "profile_traces", "memory_snapshot"]


@pytest.fixture
def world() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def opened_step(path: Path, **checkpoint: Any) -> int:
    """The step that a run in `path` with checkpoints goes on from."""
    config = Config(
        job=JobConfig(dump_folder=str(path)), checkpoint=CheckpointConfig(enable=True, **checkpoint)
    )
    folder, resume = open_folder(config)
    assert folder is not None
    folder.close()
    return 0 if resume is None else resume.progress.step


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def test_the_first_run_in_a_folder_that_holds_something_else_leaves_it_alone(
    world: None, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds config\.toml, but no status\.json of a run"):
        opened_step(tmp_path)
    with pytest.raises(CheckpointError, match=r"load_step = 7: .* has no checkpoint of that step"):
        opened_step(tmp_path, load_step=7)
    assert names(tmp_path) == [".lock", "config.toml"]


def test_a_copied_checkpoint_with_its_config_is_resumed(world: None, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", 10)
    (tmp_path / "config.toml").write_text(CONFIG)
    assert opened_step(tmp_path) == 10


def test_weights_to_begin_with_are_not_moved_away(world: None, tmp_path: Path) -> None:
    initial = write_checkpoint(tmp_path / "checkpoint", 10)
    with pytest.raises(
        ConfigError, match=r"initial_load_path = .* is in \[job\] dump_folder = .* name another"
    ):
        opened_step(tmp_path, load_step=0, initial_load_path=str(initial))
    assert initial.is_dir()
    assert (
        opened_step(tmp_path, initial_load_path=str(initial)) == 10
    )  # a run that resumes does not use it


def test_a_linked_folder_of_checkpoints_stays_linked(world: None, tmp_path: Path) -> None:
    path, disk = tmp_path / "run", tmp_path / "disk"
    path.mkdir()
    disk.mkdir()
    (path / "checkpoint").symlink_to(disk)
    assert opened_step(path) == 0
    write_checkpoint(disk, 10).rename(
        disk / ".tmp-step-00000010"
    )  # what a kill in the first save leaves
    assert opened_step(path) == 0
    write_checkpoint(disk, 10)
    assert opened_step(path) == 10
    with pytest.raises(
        ConfigError, match=r"holds checkpoint, a link to .*/disk, which is not empty"
    ):
        opened_step(path, load_step=0)
    assert names(disk) == ["step-00000010"] and (path / "checkpoint").is_symlink()
