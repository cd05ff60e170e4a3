"""The parts of the main job before and around the training."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sample_checkpoints import CONFIG, write_checkpoint
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import CppCompileError, InductorError

from torchtitan_lite import train
from torchtitan_lite.config import (
    CheckpointConfig,
    CommConfig,
    Config,
    JobConfig,
    MetricsConfig,
    ModelConfig,
)
from torchtitan_lite.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    RankLostError,
    RunError,
    StorageError,
)
from torchtitan_lite.run_folder import RunFolder
from torchtitan_lite.train import (
    explain,
    join_and_train,
    open_folder,
    run_entries,
    start_facts,
)

ROOT = Path(__file__).parents[2]


def test_the_entries_of_a_run_are_the_folders_that_its_config_names() -> None:
    entries = run_entries(Config(metrics=MetricsConfig(save_tb_folder="curves")))
    files = ["metrics.jsonl", "validation.jsonl", "numerics.jsonl", "samples.jsonl"]
    folders = ["checkpoint", "curves", "profile_traces", "memory_snapshot", "comm_traces"]
    assert entries == [*files, "peaks.json", "wandb", *folders]


@pytest.mark.parametrize("given", [None, "/elsewhere/rank_"])
def test_the_flight_recorder_writes_into_the_run_folder_or_where_the_environment_says(
    given: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", given or "")
    if given is None:
        monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE")
    monkeypatch.chdir(tmp_path)
    for name in ("read_rank", "connect_store", "check_started_alike", "start_facts"):
        monkeypatch.setattr(train, name, lambda *args, **kwargs: (0, 1))
    monkeypatch.setattr(train, "init_distributed", lambda comm: torch.device("cuda"))
    monkeypatch.setattr(train, "open_folder", lambda config, folder: None)
    monkeypatch.setattr(train, "prepare_job", lambda config, device: 1 / 0)
    comm = CommConfig(save_traces_folder="nccl/traces", save_traces_file_prefix="of_")
    with pytest.raises(ZeroDivisionError):
        join_and_train(Config(comm=comm), Watchdog(), RunFolder(Path("run")))
    expected = given or str(tmp_path / "run/nccl/traces/of_")
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == expected
    assert (tmp_path / "run/nccl/traces").is_dir()


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, "float32"),
        ({"export_dtype": "bfloat16"}, "bfloat16"),
        ({"export_dtype": "bfloat16", "last_save_model_only": True}, "keep"),  # it has the type
    ],
)
def test_the_last_checkpoint_is_exported_in_its_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], dtype: str
) -> None:
    exports: list[tuple[Path, Path, str]] = []
    monkeypatch.setattr(train, "export_hf", lambda *paths, dtype: exports.append((*paths, dtype)))
    saved, exported = tmp_path / "step-00000020", tmp_path / "step-00000020-hf"
    trainer: Any = SimpleNamespace(
        checkpointer=SimpleNamespace(last_saved=saved),
        config=Config(checkpoint=CheckpointConfig(enable=True, last_save_in_hf=True, **keys)),
        first_step=1,
        last_step=20,
    )
    train.export_last(trainer)
    assert exports == [(saved, exported, dtype)]

    # Started again, the run exports what is missing only.
    trainer.first_step = 21
    train.export_last(trainer)
    exported.mkdir()
    train.export_last(trainer)
    assert exports == [(saved, exported, dtype)] * 2


def test_a_run_that_saved_nothing_exports_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It goes on from another run's checkpoint, which is of its last step already."""
    trainer: Any = SimpleNamespace(
        checkpointer=SimpleNamespace(last_saved=None),
        config=Config(checkpoint=CheckpointConfig(enable=True, last_save_in_hf=True)),
    )
    train.export_last(trainer)
    assert "no step was trained and saved" in caplog.text


@pytest.fixture
def world() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def opened_step(path: Path, tokenizer_path: str = "", **checkpoint: Any) -> int:
    """The step that a run in `path` with checkpoints goes on from."""
    config = Config(
        job=JobConfig(dump_folder=str(path)),
        model=ModelConfig(tokenizer_path=tokenizer_path),
        checkpoint=CheckpointConfig(enable=True, **checkpoint),
    )
    folder = RunFolder(path)
    try:
        resume = open_folder(config, folder)
    finally:
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
    with pytest.raises(ConfigError, match=r"tokenizer_path = .* is in \[job\] dump_folder = "):
        opened_step(tmp_path, tokenizer_path=f"{initial}-hf", load_step=0)
    assert initial.is_dir()
    assert (
        opened_step(tmp_path, initial_load_path=str(initial)) == 10
    )  # a run that resumes does not use it


def test_a_run_that_goes_on_from_another_run_moves_an_earlier_one_aside(
    world: None, tmp_path: Path
) -> None:
    initial = write_checkpoint(tmp_path / "other", 10)
    run = tmp_path / "run"
    write_checkpoint(run / "checkpoint", 20)
    (run / "config.toml").write_text(CONFIG)
    assert opened_step(run) == 20
    settings: Any = {"initial_load_path": str(initial), "initial_load_model_only": False}
    assert opened_step(run, **settings) == 20
    assert opened_step(run, load_step=0, **settings) == 10
    (earlier,) = (run / "previous").iterdir()
    assert names(earlier / "checkpoint") == ["step-00000020"]
    moved = str(earlier / "checkpoint/step-00000020")
    assert opened_step(run, **settings | {"initial_load_path": moved}) == 20
    assert (earlier / "checkpoint/step-00000020").is_dir()


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


def test_numbers_of_nodes_and_processes_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert start_facts(Config()).items() >= {"NNODES": "3", "NGPU": "8"}.items()


class Watchdog:
    def explain(self, error: BaseException) -> RankLostError:
        return RankLostError(f"rank 1 has ended; {error}")


@pytest.fixture
def arguments() -> dict[str, Any]:
    return {"folder": Path("/runs/a"), "watchdog": Watchdog()}


def test_a_failing_disk_is_told_from_other_failures(arguments: dict[str, Any]) -> None:
    full = explain(OSError(errno.ENOSPC, "No space left on device"), **arguments)
    assert isinstance(full, StorageError) and full.exit_code == 7
    assert str(full).startswith(
        '[job] dump_folder = "/runs/a": [Errno 28] No space left on device; make room'
    )
    unmounted = FileNotFoundError(errno.ENOENT, "No such file or directory", b"/runs/a/tb/events")
    assert isinstance(explain(unmounted, **arguments), StorageError)
    elsewhere = FileNotFoundError(errno.ENOENT, "No such file or directory", "/runs/b")
    assert explain(elsewhere, **arguments) is None


def test_a_collective_that_failed_is_a_lost_rank(arguments: dict[str, Any]) -> None:
    lost = explain(
        RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer"), **arguments
    )
    assert isinstance(lost, RankLostError) and lost.exit_code == 6
    assert str(lost).startswith("rank 1 has ended; ")


def test_an_error_for_users_is_what_it_is_and_others_are_none(arguments: dict[str, Any]) -> None:
    error = DataError("no text")
    assert explain(error, **arguments) is error
    for other in (
        OSError(errno.ECONNRESET, "reset"),
        ValueError("no"),
        RuntimeError("shapes differ"),
    ):
        assert explain(other, **arguments) is None


@pytest.mark.parametrize(
    ("inner", "told"),
    [
        (
            ImportError("/cache/ab/cab.main.so: file too short"),
            "ImportError: /cache/ab/cab.main.so: file too short",
        ),
        (
            CppCompileError(["g++", "/cache/ab/cab.main.cpp"], "no at::vec"),
            "CppCompileError: C++ compile error",
        ),
        (
            AttributeError(
                "module 'torch._inductor.runtime.compile_tasks.cab' has no attribute 'call'"
            ),
            "AttributeError",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "/cache/ab"),
            "OSError: [Errno 28] No space left on device",
        ),
    ],
)
def test_a_broken_file_of_the_compilers_cache_is_told_with_its_folder(
    inner: Exception, told: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/cache")
    for error in (
        inner,
        InductorError(inner, None),
        BackendCompilerFailed("inductor", InductorError(inner, None), None),
    ):
        explained = explain(error, **arguments)
        assert isinstance(explained, RunError) and explained.exit_code == 1
        assert "remove the folder /cache and start again, or set TORCHINDUCTOR_CACHE_DIR" in str(
            explained
        )
        assert f"It said: {told}" in str(explained)


def test_other_failures_of_the_compiler_are_none(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = InductorError(NotImplementedError("no such operator"), None)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert explain(failed, **arguments) is None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/cache")
    assert explain(failed, **arguments) is None


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

@partial(torch.compile, backend="aot_eager")
def block(x):
    return checkpoint(lambda x: (x.sin() @ x).cos(), x, use_reentrant=False, context_fn=saved)

block(torch.ones(4, 4, requires_grad=True)).sum().backward()
"""


def test_torch_warns_of_nothing_that_no_user_can_act_on() -> None:
    command = [sys.executable, "-W", "ignore", "-c", NOISE]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stderr == ""
