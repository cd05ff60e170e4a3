"""What a run writes to Weights & Biases, and what it does without it."""

import importlib
import sys
from pathlib import Path

import pytest
from fake_wandb import Error, FakeWandb
from sample_records import NUMERICS, RECORD, SUMMARY, written_run

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.config import MetricsConfig
from torchtitan_lite.metrics.wandb_writer import WandbWriter
from torchtitan_lite.metrics.writers import check_writers_installed


@pytest.fixture
def wandb(monkeypatch) -> FakeWandb:
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)
    return FakeWandb(monkeypatch)


def open_writer(folder: Path) -> WandbWriter:
    return WandbWriter(written_run(folder), own="")


# ----- WandbWriter -----


def test_rows_and_options_of_a_run(tmp_path, wandb):
    writer = open_writer(tmp_path)
    writer.write(RECORD)
    writer.write_scalars(12, {"validation_loss": 5.5})
    writer.close(SUMMARY)
    (run,) = wandb.runs
    known = {name: value for name, value in RECORD.to_json().items() if value is not None}
    known["epochs/pystdlib"] = 0.75
    del known["step"], known["epochs"]
    assert run.rows == [(12, known), (12, {"validation_loss": 5.5})]
    assert run.finished
    assert run.options == {
        "project": "torchtitan_lite",
        "name": tmp_path.name,
        "group": tmp_path.parent.name,
        "dir": str(tmp_path),
        "id": None,
        "resume": "allow",
        "config": {"training": {"seq_len": 64}},
        "settings": {"finish_timeout": 60.0},
    }


def test_write_numerics_has_figures_of_casts_without_layers(tmp_path, wandb):
    open_writer(tmp_path).write_numerics(12, NUMERICS)
    ((step, figures),) = wandb.runs[0].rows
    assert (step, len(figures)) == (12, 3 * 4)
    assert figures["underflow/grad_output/feed_forward.w2"] == 0.125
    assert figures["sqnr_db/weight/output"] == 31.5


def test_project_name_and_group_are_the_users(tmp_path, wandb, monkeypatch):
    for name in ("project", "name", "run_group"):
        monkeypatch.setenv(f"WANDB_{name.upper()}", f"own {name}")
    open_writer(tmp_path)
    chosen = {"project": "own project", "name": "own name", "group": "own run_group"}
    assert wandb.runs[0].options.items() >= chosen.items()


def test_run_id_of_a_resumed_run_is_the_same(tmp_path, wandb):
    for _ in range(3):
        open_writer(tmp_path).close(None)
    assert [run.options["id"] for run in wandb.runs] == [None, "new-id", "new-id"]


def test_a_run_that_cannot_start(tmp_path, wandb, monkeypatch):
    def refuse(**_):
        raise Error("No API key configured.\nConsider something else.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError, match=r"enable_wandb = true: .*\(No API key .*\.\); .*offline"):
        open_writer(tmp_path)


def test_check_writers_installed(monkeypatch, tmp_path):
    # Modules are looked for in one folder only.
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    wanted = MetricsConfig(enable_wandb=True)
    check_writers_installed(MetricsConfig())
    with pytest.raises(ConfigError, match=r'enable_wandb = true .* install ".*\[wandb\]"'):
        check_writers_installed(wanted)

    # wandb itself leaves a folder of its name.
    (tmp_path / "wandb").mkdir()
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match="is not installed"):
        check_writers_installed(wanted)
    (tmp_path / "wandb/__init__.py").touch()
    importlib.invalidate_caches()
    check_writers_installed(wanted)
