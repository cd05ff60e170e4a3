"""Saves and resumes of a small model by one process; real processes test those of several."""

import errno
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from sample_checkpoints import differing, flip_bit, write_checkpoint
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

from torchtitan_lite.base.errors import CheckpointError, NumericError, StorageError
from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.checkpoint import folders
from torchtitan_lite.checkpoint import state as states
from torchtitan_lite.checkpoint.checkpointer import Checkpointer
from torchtitan_lite.checkpoint.folders import step_folder, steps_with_manifest
from torchtitan_lite.checkpoint.manifest import CheckpointManifest, FileEntry, TrainingProgress
from torchtitan_lite.checkpoint.reading import SafeReader, open_checkpoint
from torchtitan_lite.checkpoint.resume import Resume, find_resume, verify
from torchtitan_lite.cli.checkpoint import format_checkpoints
from torchtitan_lite.config import CheckpointConfig

CPU = torch.device("cpu")
PROGRESS = TrainingProgress(2, samples=16, tokens=128, data={"seed": 0})  # of step 2
BOTH_MODES = pytest.mark.parametrize("async_mode", ["disabled", "async_with_pinned_mem"])


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Run:
    """A model of two linears that is trained step by step."""

    def __init__(self, folder: Path, *, width: int = 4, **checkpoint: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.folder, self.width, self.step = folder, width, 0
        settings = CheckpointConfig(**{"enable": True, "interval": 2, **checkpoint})
        same: dict[str, Any] = {"mesh": {"dp_shard": 1}, "config": "[training]\nsteps = 4\n"}
        manifest = CheckpointManifest(world_size=1, model={"dim": width}, **same)
        options: dict[str, Any] = {"folder": folder, "device": CPU, "stages": None}
        self.checkpointer = Checkpointer(
            self.model, self.optimizer, settings, manifest=manifest, **options
        )

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            inputs = torch.arange(8.0 * self.width).reshape(8, self.width) + self.step
            loss = self.model(inputs / 100).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
            self.step += 1
        return losses

    def save(self, *, wait: bool = True, last: bool = False) -> Path:
        """Save, and return the checkpoint's path."""
        samples = {"samples": 8 * self.step, "tokens": 64 * self.step}
        progress = TrainingProgress(self.step, **samples, data={"seed": 0})
        self.checkpointer.save(progress, last=last)
        if wait:
            self.checkpointer.wait()
        return step_folder(self.folder, self.step)

    def train_and_save(self, *steps: int, **options: bool) -> Path:
        """Train up to each of `steps` and save it; return the path of the last one."""
        for step in steps:
            self.train(step - self.step)
            path = self.save(**options)
        return path

    def state(self) -> dict[str, torch.Tensor]:
        state = states.training_state(self.model, self.optimizer)
        return {name: tensor.clone() for name, tensor in state.items()}


def find(folder: Path, **settings: Any) -> Resume | None:
    return find_resume(CheckpointConfig(enable=True, **settings), folder=folder)


def resumed_step(folder: Path, **settings: Any) -> int | None:
    found = find(folder, **settings)
    return None if found is None else found.manifest.progress.step


def verified(path: Path) -> Resume:
    return Resume(path, verify(path))


# ----- Checkpointer: save, load -----


@BOTH_MODES
def test_a_resumed_run_continues_bit_by_bit(async_mode, tmp_path):
    first = Run(tmp_path, async_mode=async_mode)
    path = first.train_and_save(2, wait=False)
    later = first.train(3)  # while it is saved
    first.checkpointer.wait()

    second = Run(tmp_path)
    found = find(tmp_path)
    assert found is not None and found.manifest.progress == PROGRESS
    second.checkpointer.load(found)
    second.step = 2
    assert second.train(3) == later
    assert differing(first.state(), second.state()) == []
    assert first.checkpointer.last_saved == second.checkpointer.last_saved == path


def test_save_writes_a_manifest(tmp_path):
    run = Run(tmp_path)
    manifest = SafeReader(run.train_and_save(2)).manifest
    assert set(manifest.files) == {".metadata", "__0_0.distcp"}
    assert manifest.tensors == states.entries(run.state())
    assert (manifest.world_size, manifest.mesh, manifest.model) == (1, {"dp_shard": 1}, {"dim": 4})
    assert (manifest.progress, manifest.config) == (PROGRESS, "[training]\nsteps = 4\n")
    assert manifest.versions.keys() == {"torchtitan_lite", "torch", "torchao", "python"}


def test_load_refuses_another_model(tmp_path):
    found, other = verified(Run(tmp_path).train_and_save(2)), Run(tmp_path, width=6)
    before = other.state()
    message = r"9 tensors differ: model\.0\.weight: float32 \[4, 4\] -> float32 \[6, 6\]"
    with pytest.raises(CheckpointError, match=message):
        other.checkpointer.load(found)
    assert differing(other.state(), before) == []


def test_load_sets_later_checkpoints_aside(tmp_path):
    Run(tmp_path).train_and_save(2, 4, 6)
    for load_only, left in ((True, [2, 4, 6]), (False, [2])):
        checkpointer = Run(tmp_path, load_only=load_only).checkpointer
        checkpointer.load(verified(step_folder(tmp_path, 2)))
        assert steps_with_manifest(tmp_path) == left
        assert len(list(tmp_path.glob("superseded-step-*"))) == 3 - len(left)


# ----- Checkpointer: load_weights -----


def refuses_weights(run: Run, path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        run.checkpointer.load_weights(path, ModelArgs())


def test_weights_alone_start_a_new_run(tmp_path):
    run, new = Run(tmp_path / "a"), Run(tmp_path / "b")
    path = run.train_and_save(2)
    new.checkpointer.load_weights(path, ModelArgs())
    assert differing(states.model_state(new.model), states.model_state(run.model)) == []
    moments = [each for name, each in new.state().items() if name.startswith("optimizer.")]
    assert len(moments) == 12 and not any(map(torch.any, moments))

    other, from_hf = Run(tmp_path / "c", width=6), Run(tmp_path / "d", initial_load_in_hf=True)
    refuses_weights(other, path, r"step-00000002 is of another model: dim: 4 -> 6\.")
    refuses_weights(from_hf, path, "initial_load_in_hf = true: .*02 is of torchtitan_lite; set")
    flip_bit(path / "__0_0.distcp")
    refuses_weights(new, path, "contents have changed")
    refuses_weights(new, tmp_path / "nowhere", "nowhere cannot be listed: No such file")
    (tmp_path / "config.json").touch()
    refuses_weights(new, tmp_path, r"config\.json cannot be loaded: not JSON")


def test_loaded_weights_are_converted_and_refused_if_not_finite(tmp_path):
    run = Run(tmp_path / "new")
    weights = states.model_state(run.model)
    thirds = {name: torch.full_like(each, 1 / 3).bfloat16() for name, each in weights.items()}
    run.checkpointer.load_weights(write_checkpoint(tmp_path, 5, thirds), ModelArgs())
    for weight in run.model.parameters():
        assert (weight == 0.333984375).all() and weight.dtype == torch.float32
    weights["model.1.weight"] = torch.tensor([[1.0, torch.nan, -torch.inf, 2.0]])
    path = write_checkpoint(tmp_path, 6, weights)
    refuses_weights(run, path, r"step-00000006 .*: model\.1\.weight has values ")


# ----- last_save_model_only, export_dtype -----


@pytest.mark.parametrize("export_dtype", ["float32", "bfloat16", "float16"])
def test_the_last_save_of_a_run_may_have_weights_alone(export_dtype, tmp_path):
    settings = {"async_mode": "async", "export_dtype": export_dtype}
    run = Run(tmp_path / "a", last_save_model_only=True, **settings)
    run.train_and_save(2)
    path = run.train_and_save(4, last=True, wait=False)
    dtype = getattr(torch, export_dtype)
    expected = {name: each.to(dtype) for name, each in states.model_state(run.model).items()}
    assert SafeReader(path).tensors == states.entries(expected)
    assert differing(SafeReader(path).read_whole(), expected) == []
    open_checkpoint(path, hashes=True)
    table = format_checkpoints(folders.find_checkpoints(tmp_path / "a"))
    assert [line.endswith("ok, weights only") for line in table.splitlines()[1:]] == [False, True]

    new = Run(tmp_path / "b")
    new.checkpointer.load_weights(path, ModelArgs())
    loaded = {name: each.float() for name, each in expected.items()}
    assert differing(states.model_state(new.model), loaded) == []


def test_weights_beyond_the_range_of_export_dtype_are_not_saved(tmp_path):
    run = Run(tmp_path, last_save_model_only=True, export_dtype="float16")
    path = run.train_and_save(2)
    with torch.no_grad():
        run.model[1].weight[0, 1] = 1e5
    with pytest.raises(NumericError, match=r"model\.1\.weight .*float16\" with \"float32\"\."):
        run.train_and_save(4, last=True)
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_that_ended_with_weights_alone_resumes_from_earlier_steps_only(tmp_path):
    run = Run(tmp_path, last_save_model_only=True)
    run.train_and_save(2, 4)
    path = run.train_and_save(6, last=True)
    message = rf"{path} has only .* earlier step, .*_path = \"{path}\"\."
    for load_step in (-1, 6):
        found = find(tmp_path, load_step=load_step)
        assert found is not None and found.manifest.progress.step == 6
        found.check_can_train(last_step=6)  # nothing is left to train
        with pytest.raises(CheckpointError, match=message):
            found.check_can_train(last_step=7)
    assert resumed_step(tmp_path, load_step=4) == 4
    assert resumed_step(tmp_path, load_step=0) is None
    flip_bit(path / "__0_0.distcp")
    assert resumed_step(tmp_path) == 4


# ----- find_resume -----


def test_find_resume_takes_the_newest_checkpoint_or_load_step(tmp_path):
    assert resumed_step(tmp_path / "none") is None
    Run(tmp_path).train_and_save(2, 4)
    assert resumed_step(tmp_path) == 4
    assert resumed_step(tmp_path, load_step=2) == 2
    assert resumed_step(tmp_path, load_step=0) is None
    assert find_resume(CheckpointConfig(), folder=tmp_path) is None
    with pytest.raises(CheckpointError, match=r"load_step = 3: .* no .*\(it has: 2, 4\); use one"):
        resumed_step(tmp_path, load_step=3)


def test_find_resume_logs_a_broken_checkpoint_and_takes_the_one_before(tmp_path, notices):
    path = Run(tmp_path).train_and_save(2, 4)
    flip_bit(path / "__0_0.distcp")
    assert resumed_step(tmp_path) == 2
    assert "step-00000004 is broken: __0_0.distcp: its contents have changed" in notices.text
    message = r"load_step = 4: .*step-00000004 is broken: .*contents.* steps 2, 4: name"
    with pytest.raises(CheckpointError, match=message):
        resumed_step(tmp_path, load_step=4)
    (path / "manifest.json").unlink()
    assert resumed_step(tmp_path) == 2
    assert "step-00000004 is broken: manifest.json: No such file" in notices.text

    # No new run starts beside broken checkpoints.
    (step_folder(tmp_path, 2) / ".metadata").unlink()
    message = r"\.metadata: No such file.* No checkpoint .* verifies.*load_step = 0 for"
    with pytest.raises(CheckpointError, match=message):
        resumed_step(tmp_path)


def test_exclude_from_loading_starts_the_moments_at_zero_once(tmp_path, notices):
    run, second = Run(tmp_path), Run(tmp_path)
    run.train_and_save(2)
    found = find(tmp_path, exclude_from_loading=("optimizer",))
    assert found is not None and found.new_moments and found.manifest.progress == PROGRESS
    second.checkpointer.load(found)
    for name, tensor in run.state().items():
        expected = tensor if name.startswith("model.") else torch.zeros_like(tensor)
        assert second.state()[name].equal(expected)

    # The run that has done so resumes with its own moments.
    config = '[checkpoint]\nexclude_from_loading = ["optimizer"]\n'
    write_checkpoint(tmp_path / "own", 5, config=config)
    found = find(tmp_path / "own", exclude_from_loading=("optimizer",))
    assert found is not None and not found.new_moments
    assert "exclude_from_loading is ignored: the run that saved 5 had it" in notices.text


def test_initial_load_model_only_false_continues_another_run(tmp_path):
    first, second = Run(tmp_path / "a"), Run(tmp_path / "b")
    path = first.train_and_save(2)
    later = first.train(3)
    settings = {"initial_load_path": str(path), "initial_load_model_only": False}
    assert find(tmp_path / "b") is None
    found = find(tmp_path / "b", **settings)
    assert found is not None and (found.path, found.manifest.progress.step) == (path, 2)
    second.checkpointer.load(found)
    assert second.checkpointer.last_saved is None
    second.step = 2
    assert second.train(3) == later

    # Once it has saved, it resumes from its own.
    second.save()
    assert resumed_step(tmp_path / "b", **settings) == 5
    assert resumed_step(tmp_path / "b", load_step=0, **settings) == 2


def test_a_new_run_cannot_continue_from_weights_alone(tmp_path):
    ours = write_checkpoint(tmp_path, 5, {"model.w": torch.ones(2)})
    (tmp_path / "model.safetensors").touch()
    for path, kind in ((ours, "torchtitan_lite"), (tmp_path, "Hugging Face")):
        message = rf"initial_load_model_only = false: {path}, of {kind}, has nothing but weights"
        with pytest.raises(CheckpointError, match=message):
            find(tmp_path / "run", initial_load_path=str(path), initial_load_model_only=False)


# ----- Checkpointer: due, keep_latest_k -----


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [2, 4, 5]),
        ({"enable_first_step_checkpoint": True}, [1, 2, 4, 5]),
        ({"load_only": True, "enable_first_step_checkpoint": True}, []),
        ({"enable": False}, []),
    ],
)
def test_steps_that_are_saved(settings, steps, tmp_path, notices):
    checkpointer = Run(tmp_path, **settings).checkpointer
    assert [step for step in range(1, 6) if checkpointer.due(step, last=step == 5)] == steps
    off = settings.get("enable") is False
    assert ("checkpoints are off: a run that stops or fails starts again" in notices.text) == off


def test_keep_latest_k(tmp_path, monkeypatch, notices):
    run = Run(tmp_path, keep_latest_k=2)
    run.train_and_save(1, 2, 3, 4)
    assert steps_with_manifest(tmp_path) == [3, 4]
    # A prune that fails does not undo the save.
    monkeypatch.setattr(folders, "prune", Mock(side_effect=StorageError("no deletion.")))
    run.train_and_save(5)
    assert "no deletion. The new checkpoint is complete." in notices.text
    assert resumed_step(tmp_path) == 5


# ----- Checkpointer: save that fails -----


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(FileSystemWriter, "write_data", Mock(side_effect=error))


@BOTH_MODES
def test_a_failed_save_stops_the_run_and_leaves_earlier_ones(async_mode, tmp_path, monkeypatch):
    run = Run(tmp_path, async_mode=async_mode)
    path = run.train_and_save(2)
    fill_disk(monkeypatch)
    message = r"\.tmp-step-00000004 cannot be written: .*No space left.*GiB are free there"
    with pytest.raises(StorageError, match=message):
        run.train_and_save(4)
    assert list(tmp_path.iterdir()) == [path]
    assert resumed_step(tmp_path) == 2


def test_failure_of_a_save_in_the_background(tmp_path, monkeypatch):
    run = Run(tmp_path, async_mode="async")
    assert run.checkpointer.failure() is None
    fill_disk(monkeypatch)
    run.save(wait=False)
    run.checkpointer._saving.exception(timeout=20)
    error = run.checkpointer.failure()
    assert isinstance(error, StorageError) and "No space left" in str(error)
    assert run.checkpointer.failure() is None  # reported once
    run.checkpointer.wait()


@pytest.mark.parametrize("name", ["write_manifest", "hash_file", "folders.fsync_folder"])
def test_a_disk_that_fails_later_leaves_no_trace(name, tmp_path, monkeypatch):
    error = OSError(errno.EIO, "Input/output error")
    path = f"torchtitan_lite.checkpoint.checkpointer.{name}"
    monkeypatch.setattr(path, Mock(side_effect=error))
    with pytest.raises(StorageError):
        Run(tmp_path).save()
    assert list(tmp_path.iterdir()) == []


@BOTH_MODES
def test_weights_that_are_not_finite_are_not_saved(async_mode, tmp_path):
    run = Run(tmp_path, async_mode=async_mode)
    with torch.no_grad():
        run.model[1].weight[0, 1] = torch.nan
    with pytest.raises(NumericError, match=r"model\.1\.weight is no longer finite after step 0, "):
        run.save()
    assert list(tmp_path.iterdir()) == []


def test_files_that_other_ranks_wrote_elsewhere_make_no_checkpoint(tmp_path, monkeypatch):
    # On disks that are not shared, rank 0 has its own files only.
    files = {"__1_0.distcp": FileEntry(10, "0" * 64)}
    monkeypatch.setattr(Checkpointer, "_hash_files", lambda *_: files)
    message = r"on rank 0 .*: __1_0.distcp: No such file.*; \[job\] dump_folder"
    with pytest.raises(StorageError, match=message):
        Run(tmp_path).save()
    assert list(tmp_path.iterdir()) == []
