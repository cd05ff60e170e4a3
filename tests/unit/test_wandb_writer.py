import importlib
import sys
from pathlib import Path

import pytest
from fake_wandb import Error, FakeWandb
from sample_records import NUMERICS, RECORD, SUMMARY

from torchtitan_lite.config import MetricsConfig
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.metrics.wandb_writer import WandbWriter, check_wandb_installed

WANTED = MetricsConfig(enable_wandb=True)


@pytest.fixture
def wandb(monkeypatch) -> FakeWandb:
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)
    return FakeWandb(monkeypatch)


@pytest.fixture
def without_wandb(monkeypatch, tmp_path) -> Path:
    """An empty folder, the only one that modules are looked for in."""
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    return tmp_path


def open_writer(folder: Path) -> WandbWriter:
    return WandbWriter(
        folder,
        "",
        config_toml="[training]\nseq_len = 64\n",
        hparams={"float8": True, "dp_shard": 8},
    )


def test_a_run_of_records(tmp_path, wandb):
    writer = open_writer(tmp_path)
    writer.write(RECORD)
    writer.write_scalars(12, {"validation_loss": 5.5})
    writer.close(SUMMARY)
    (run,) = wandb.runs
    record = RECORD.to_json()
    known = {
        name: record[name] for name in record if name not in {"step", "mfu_fp8_peak", "epochs"}
    }
    known["epochs/pystdlib"] = 0.75
    assert run.rows == [(12, known), (12, {"validation_loss": 5.5})]
    assert run.summary == {
        "final/loss": 5.25,
        "final/validation_loss": 5.75,
        "final/median_tps": 2340.5,
        "final/median_mfu": 41.0,
    }
    assert run.finished
    assert run.options == {
        "project": "torchtitan_lite",
        "name": tmp_path.name,
        "group": tmp_path.parent.name,
        "dir": str(tmp_path),
        "id": None,
        "resume": "allow",
        "config": {"training": {"seq_len": 64}, "hparams": {"float8": True, "dp_shard": 8}},
        "settings": {"finish_timeout": 60.0},
    }


def test_what_casts_lost(tmp_path, wandb):
    open_writer(tmp_path).write_numerics(12, NUMERICS)
    ((step, figures),) = wandb.runs[0].rows
    assert (
        step,
        figures["underflow/grad_output/feed_forward.w2"],
        figures["sqnr_db/weight/output"],
    ) == (
        12,
        0.125,
        31.5,
    )
    assert len(figures) == 3 * 4  # and no number of a layer


def test_the_users_project_name_and_group(tmp_path, wandb, monkeypatch):
    chosen = {"project": "fp8", "name": "first", "group": "sweep"}
    for option, name in zip(
        chosen, ("WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_GROUP"), strict=True
    ):
        monkeypatch.setenv(name, chosen[option])
    open_writer(tmp_path)
    assert wandb.runs[0].options.items() >= chosen.items()


def test_a_resumed_run_is_the_same_one(tmp_path, wandb):
    for _ in range(3):
        open_writer(tmp_path).close(None)
    assert [run.options["id"] for run in wandb.runs] == [None, "new-id", "new-id"]
    assert [run.summary for run in wandb.runs] == [{}, {}, {}]


def test_a_run_that_cannot_start(tmp_path, wandb):
    wandb.refusal = Error("No API key configured.\nConsider something else.")
    with pytest.raises(
        ConfigError, match=r"enable_wandb = true: wandb cannot start \(No API key .*\.\); .*offline"
    ):
        open_writer(tmp_path)


def test_wandb_is_needed_only_where_it_is_asked_for(without_wandb):
    check_wandb_installed(MetricsConfig())
    with pytest.raises(
        ConfigError, match=r'enable_wandb = true .* pip install "torchtitan-lite\[wandb\]"'
    ):
        check_wandb_installed(WANTED)


def test_a_folder_that_wandb_left_is_not_wandb(without_wandb):
    (without_wandb / "wandb").mkdir()
    with pytest.raises(ConfigError, match="is not installed"):
        check_wandb_installed(WANTED)


def test_wandb_is_found(without_wandb):
    (without_wandb / "wandb").mkdir()
    (without_wandb / "wandb" / "__init__.py").touch()
    check_wandb_installed(WANTED)
