"""The table of a run's checkpoints."""

import os

import pytest
from sample_checkpoints import write_checkpoint

from torchtitan_lite.base.errors import CheckpointError
from torchtitan_lite.checkpoint.folders import find_checkpoints, naming, step_folder
from torchtitan_lite.checkpoint.manifest import read_manifest
from torchtitan_lite.cli.checkpoint import format_checkpoints


@pytest.fixture
def run(tmp_path):
    """A run folder: step 10 is of float8, step 20 of a config that has a recipe and not uses it."""
    run = tmp_path / "run"
    write_checkpoint(run / "checkpoint", 10)
    config = "[float8]\nrecipe_name = 'x'\n"
    mesh = {"dp_shard": 1, "tp": 1}
    write_checkpoint(run / "checkpoint", 20, world_size=1, mesh=mesh, config=config)
    for step in (10, 20):
        os.utime(step_folder(run / "checkpoint", step) / "manifest.json", (1.5e9, 1.5e9))
    (run / "a").mkdir()
    (run / "config.toml").touch()
    return run


# ----- find_checkpoints -----


def test_checkpoints_are_found(run):
    folder = run / "checkpoint"
    both = [step_folder(folder, 10), step_folder(folder, 20)]
    assert find_checkpoints(run) == find_checkpoints(folder) == both
    assert find_checkpoints(both[1]) == [both[1]]
    aside = both[1].rename(run / "best")
    assert find_checkpoints(aside) == [aside]


@pytest.mark.parametrize(("name", "problem"), [
    ("run/a", "a has no checkpoints; train with --checkpoint.enable, or name a run"),
    ("run/config.toml", "config.toml has no checkpoints; train with"),
    ("missing", "missing is missing; name a run folder"),
])  # fmt: skip
def test_folders_without_checkpoints_are_refused(run, name, problem):
    with pytest.raises(CheckpointError, match=problem):
        find_checkpoints(run.parent / name)


# ----- naming -----
def test_a_broken_checkpoint_is_named_with_the_fix(run):
    message = "run/a is broken: manifest.json: No such file or directory; fix"
    with pytest.raises(CheckpointError, match=message), naming(run / "a", fix="; fix"):
        read_manifest(run / "a")


# ----- format_checkpoints -----


def test_broken_checkpoints_stand_in_the_table(run, monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    folder = run / "checkpoint"
    (step_folder(folder, 20) / "__0_0.distcp").unlink()
    (folder / "step-00000030").mkdir()
    assert format_checkpoints(find_checkpoints(run)).splitlines() == [
        "step  tokens  written              GiB    ranks  mesh        float8      state",
        "10    5120    2017-07-14 02:40:00  0.000  2      dp_shard=2  tensorwise  ok",
        "20    10240   2017-07-14 02:40:00  0.000  1      -           no          "
        "broken: __0_0.distcp: No such file or directory",
        "30    -       -                    -      -      -           -           "
        "broken: manifest.json: No such file or directory",
    ]


def test_a_table_of_hostile_configs(run):
    """Values that are valid TOML and of other types than a config's."""
    config = "[float8]\nenable_float8_linear = 2020-01-01\nrecipe_name = [1, {a = 2}]\n"
    path = write_checkpoint(run / "checkpoint", 30, config=config)
    assert format_checkpoints([path]).endswith("[1, {'a': 2}]  ok")
