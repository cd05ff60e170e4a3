"""The parts of the main job before and around the training."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from sample_checkpoints import write_checkpoint

from torchtitan_lite import train
from torchtitan_lite.base.errors import (
    CheckpointError,
    ConfigError,
    RunError,
)
from torchtitan_lite.checkpoint import hf_export
from torchtitan_lite.config import (
    CheckpointConfig,
    CommConfig,
    CompileConfig,
    Config,
    JobConfig,
    own_names,
)
from torchtitan_lite.run.run_folder import RunFolder, Status, write_status
from torchtitan_lite.train import join_and_train, open_folder, start_facts

ROOT = Path(__file__).parents[2]


def test_start_facts_has_the_numbers_of_nodes_and_processes(monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert start_facts(Config()).items() >= {"NNODES": "3", "NGPU": "8"}.items()


@pytest.mark.parametrize("given", [None, "/elsewhere/rank_"])
def test_join_and_train_lets_nccl_write_traces_into_the_run_folder_by_default(
    given, monkeypatch, tmp_path, world
):
    name = "TORCH_FR_DUMP_TEMP_FILE"
    monkeypatch.setenv(name, given) if given else monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    for each in ("check_started_alike", "start_facts"):
        monkeypatch.setattr(train, each, lambda facts: None)
    monkeypatch.setattr(train, "init_distributed", lambda comm: torch.device("cuda"))
    monkeypatch.setattr(train, "open_folder", lambda config, folder: None)
    monkeypatch.setattr(train, "prepare_job", lambda config, **_: (Mock(config=config), None))
    failing = Mock(train=lambda: 1 / 0)
    monkeypatch.setattr(train, "Trainer", lambda *_, **__: failing)
    comm = CommConfig(save_traces_folder="nccl/traces", save_traces_file_prefix="of_")
    dog: Any = None
    with pytest.raises(ZeroDivisionError):
        join_and_train(Config(comm=comm), dog, RunFolder(Path("run")))
    assert os.environ[name] == (given or str(tmp_path / "run/nccl/traces/of_"))
    assert (tmp_path / "run/nccl/traces").is_dir()


def test_main_refuses_a_compiler_that_cannot_work(monkeypatch):
    words = ["--job.config_file", "debug_model", "--compile.enable"]
    monkeypatch.setattr(sys, "argv", ["train", *words])
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(train, "end_process", sys.exit)
    with pytest.raises(SystemExit) as ended:
        train.main()
    assert ended.value.code == ConfigError.exit_code


# ----- run -----


@pytest.mark.parametrize(("backend", "said"), [
    ("nowhere", "Invalid backend: 'nowhere', see "),
    ("broken", "it cannot compile this"),
    ("inductor", None),
])  # fmt: skip
def test_a_backend_that_cannot_compile_is_named(backend, said, monkeypatch, tmp_path):
    def broken(graph: Any, inputs: Any) -> Any:
        raise ImportError("it cannot compile this")

    def join_and_train(*_: Any) -> None:
        torch.compile(torch.sin, backend=backend if backend == "nowhere" else broken)(torch.ones(2))

    dog = SimpleNamespace(step=0, explain=lambda error: RunError("why"), fail=lambda cause: None)
    monkeypatch.setattr(train, "Watchdog", lambda report: dog)
    monkeypatch.setattr(train, "join_and_train", join_and_train)
    job = JobConfig(dump_folder=str(tmp_path))
    config = Config(job=job, compile=CompileConfig(enable=True, backend=backend))
    error = ConfigError if said else torch._dynamo.exc.BackendCompilerFailed
    with pytest.raises(error, match=said and rf'^\[compile] backend = "{backend}": {said}.*; use'):
        train.run_training(config)


# ----- export_last -----


def ended_run(saved: Path | None, first_step: int, **keys: Any) -> Any:
    """A trainer whose last step is 20, and whose last checkpoint is in `saved`."""
    checkpoint = CheckpointConfig(enable=True, last_save_in_hf=True, **keys)
    return SimpleNamespace(
        checkpointer=SimpleNamespace(last_saved=saved),
        config=Config(checkpoint=checkpoint),
        first_step=first_step,
        last_step=20,
        hf_export=hf_export,
    )


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, "float32"),
        ({"export_dtype": "bfloat16"}, "bfloat16"),
        ({"export_dtype": "bfloat16", "last_save_model_only": True}, "keep"),  # it has the type
    ],
)
def test_the_last_checkpoint_is_exported_in_its_type_unless_it_was_before(
    tmp_path, monkeypatch, keys, dtype
):
    exports: list[tuple[Path, Path, str]] = []
    export = Mock(side_effect=lambda *paths, dtype: exports.append((*paths, dtype)))
    monkeypatch.setattr(hf_export, "export_hf", export)
    saved, exported = tmp_path / "step-00000020", tmp_path / "step-00000020-hf"
    exported.mkdir()  # of an export that was killed, in a bucket
    for first_step, exists, count in ((1, False, 1), (21, False, 2), (21, True, 2), (1, True, 3)):
        (exported / "config.json").touch() if exists else None
        train.export_last(ended_run(saved, first_step, **keys))
        assert exports == [(saved, exported, dtype)] * count


def test_a_run_that_saved_nothing_exports_nothing(notices):
    """It goes on from another run's checkpoint, which is of its last step already."""
    train.export_last(ended_run(None, 21))
    assert "no step was trained and saved" in notices.text


# ----- open_folder -----


@pytest.fixture
def world():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def opened_step(path: Path, **checkpoint: Any) -> int:
    """The step that a run in `path` with checkpoints goes on from."""
    config = Config(
        job=JobConfig(dump_folder=str(path)),
        checkpoint=CheckpointConfig(enable=True, **checkpoint),
    )
    folder = RunFolder(path, own_names(config).values())
    resume = open_folder(config, folder)
    resumes = resume is not None and resume.path.parent == path / "checkpoint"
    folder.begin(resumes=resumes, config="")
    folder.close()
    return 0 if resume is None else resume.manifest.progress.step


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def test_a_folder_that_no_run_wrote_is_left_alone(world, tmp_path):
    (tmp_path / "config.toml").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds config\.toml, and no valid status\.json"):
        opened_step(tmp_path)
    assert names(tmp_path) == [".lock", "config.toml"]


def test_a_refused_start_moves_no_earlier_run(world, tmp_path):
    write_checkpoint(tmp_path / "checkpoint", 20)
    write_status(tmp_path, Status("done", 1.0, 2.0))
    with pytest.raises(CheckpointError, match="load_step = 7: .* no checkpoint of that step"):
        opened_step(tmp_path, load_step=7)
    assert names(tmp_path) == [".lock", "checkpoint", "status.json"]


def test_a_run_that_goes_on_from_another_run_moves_an_earlier_one_aside(world, tmp_path):
    initial = write_checkpoint(tmp_path / "other", 10)
    run = tmp_path / "run"
    write_checkpoint(run / "checkpoint", 20)
    write_status(run, Status("done", 1.0, 2.0))
    assert opened_step(run) == 20
    settings: Any = {"initial_load_path": str(initial), "initial_load_model_only": False}
    assert opened_step(run, **settings) == 20
    assert opened_step(run, load_step=0, **settings) == 10
    (earlier,) = (run / "previous").iterdir()
    assert names(earlier / "checkpoint") == ["step-00000020"]
    moved = str(earlier / "checkpoint/step-00000020")
    assert opened_step(run, **settings | {"initial_load_path": moved}) == 20
    assert (earlier / "checkpoint/step-00000020").is_dir()


def test_a_linked_folder_of_checkpoints_stays_linked(world, tmp_path):
    path, disk = tmp_path / "run", tmp_path / "disk"
    path.mkdir()
    disk.mkdir()
    (path / "checkpoint").symlink_to(disk)
    assert opened_step(path) == 0
    # A kill in the first save leaves a draft.
    write_checkpoint(disk, 10).rename(disk / ".tmp-step-00000010")
    assert opened_step(path) == 0
    write_checkpoint(disk, 10)
    assert opened_step(path) == 10
    with pytest.raises(ConfigError, match="holds checkpoint, and files behind a link cannot"):
        opened_step(path, load_step=0)
    assert "step-00000010" in names(disk) and (path / "checkpoint").is_symlink()


# ----- torchtitan_lite: __init__ -----


NOISE = """
import torchtitan_lite
from functools import partial
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

saved = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
mesh = init_device_mesh("cpu", (2, 2))
DTensor.from_local(torch.ones(1), mesh, [Partial(), Partial()]).full_tensor()

@partial(torch.compile, backend="eager")
def block(x):
    return checkpoint(lambda x: (x.sin() @ x).cos(), x, use_reentrant=False, context_fn=saved)

block(torch.ones(4, 4, requires_grad=True)).sum().backward()
"""


def test_torch_logs_nothing_that_no_user_can_act_on():
    command = [sys.executable, "-W", "ignore", "-c", NOISE]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stderr == ""
