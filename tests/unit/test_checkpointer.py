"""Saves and resumes of a small model by one process. Those of several are tested with real
processes."""

import errno
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sample_checkpoints import write_checkpoint
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torchtitan_layout import save_torchtitan

from torchtitan_lite.checkpoint import checkpointer as module
from torchtitan_lite.checkpoint import folders
from torchtitan_lite.checkpoint import state as states
from torchtitan_lite.checkpoint.checkpointer import Checkpointer
from torchtitan_lite.checkpoint.folders import (
    committed_steps,
    format_summaries,
    step_folder,
    step_folders,
    summarize,
)
from torchtitan_lite.checkpoint.manifest import (
    BrokenCheckpoint,
    CheckpointManifest,
    FileEntry,
    TrainingProgress,
    read_manifest,
)
from torchtitan_lite.checkpoint.reading import SafeReader, verify_checkpoint
from torchtitan_lite.checkpoint.resume import Resume, find_resume, verify
from torchtitan_lite.checkpoint.state import random_state
from torchtitan_lite.config import CheckpointConfig
from torchtitan_lite.errors import CheckpointError, NumericError, StorageError
from torchtitan_lite.models.flavors import ModelArgs

CPU = torch.device("cpu")
BOTH_MODES = pytest.mark.parametrize("async_mode", ["disabled", "async", "async_with_pinned_mem"])


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Run:
    """A model of two linears that is trained step by step."""

    def __init__(self, folder: Path, *, width: int = 4, **checkpoint: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(width, width), nn.Dropout(), nn.Linear(width, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step = 0
        self.checkpointer = Checkpointer(
            self.model,
            self.optimizer,
            CheckpointConfig(enable=True, interval=2, **checkpoint),
            folder=folder,
            device=CPU,
            manifest=CheckpointManifest(
                world_size=1,
                mesh={"dp_shard": 1},
                model={"dim": width},
                config="[training]\nsteps = 4\n",
            ),
            stages=None,
        )

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = self.model(torch.randn(8, self.model[0].in_features)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
            self.step += 1
        return losses

    def save(self, *, wait: bool = True, last: bool = False) -> None:
        progress = TrainingProgress(
            self.step, samples=8 * self.step, tokens=64 * self.step, data={"seed": 0}
        )
        self.checkpointer.save(progress, random_state(CPU), last=last)
        if wait:
            self.checkpointer.wait()

    def state(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor.clone()
            for name, tensor in states.training_state(self.model, self.optimizer).items()
        }


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def resume(folder: Path, **settings: Any) -> int | None:
    found = find_resume(CheckpointConfig(enable=True, **settings), folder=folder)
    return None if found is None else found.progress.step


def verified(folder: Path, step: int) -> Resume:
    path = step_folder(folder, step)
    return Resume(path, verify(path, hashes=True))


@BOTH_MODES
def test_a_resumed_run_goes_on_bit_by_bit(async_mode: str, tmp_path: Path) -> None:
    first = Run(tmp_path, async_mode=async_mode)
    first.train(2)
    first.save(wait=False)  # what is trained meanwhile must not get into it
    later = first.train(3)
    first.checkpointer.wait()
    second = Run(tmp_path)
    torch.manual_seed(1)
    random.seed(1)
    found = find_resume(CheckpointConfig(enable=True), folder=tmp_path)
    assert found is not None
    assert found.progress == TrainingProgress(2, samples=16, tokens=128, data={"seed": 0})
    second.checkpointer.load(found)
    assert second.train(3) == later
    assert equal(first.state(), second.state())
    assert (
        first.checkpointer.last_saved == second.checkpointer.last_saved == step_folder(tmp_path, 2)
    )


def test_what_the_manifest_says(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(2)
    run.save()
    manifest = read_manifest(step_folder(tmp_path, 2))
    assert set(manifest.files) == {".metadata", "__0_0.distcp", "rank-00000.json"}
    assert manifest.tensors == states.entries(run.state())
    assert (manifest.world_size, manifest.mesh, manifest.model) == (1, {"dp_shard": 1}, {"dim": 4})
    assert manifest.config == "[training]\nsteps = 4\n"
    assert (
        manifest.versions["torch"] == torch.__version__.split("+")[0]
        or manifest.versions["torch"] == torch.__version__
    )
    assert set(manifest.versions) == {"torchtitan_lite", "torch", "torchao", "python"}


def test_which_checkpoint_is_resumed_from(tmp_path: Path) -> None:
    assert resume(tmp_path / "none") is None
    run = Run(tmp_path)
    for _ in range(2):
        run.train(2)
        run.save()
    assert resume(tmp_path) == 4
    assert resume(tmp_path, load_step=2) == 2
    assert resume(tmp_path, load_step=0) is None
    assert find_resume(CheckpointConfig(), folder=tmp_path) is None
    with pytest.raises(
        CheckpointError,
        match=r"load_step = 3: .* has no checkpoint of that step \(it has: 2, 4\); use",
    ):
        resume(tmp_path, load_step=3)


def break_step(folder: Path, step: int) -> None:
    """Flip a bit in the tensors of a step."""
    path = step_folder(folder, step) / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_broken_checkpoint_is_logged_and_the_one_before_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    for _ in range(2):
        run.train(2)
        run.save()
    break_step(tmp_path, 4)
    with caplog.at_level("INFO"):
        assert resume(tmp_path) == 2
    assert "step-00000004 is broken: __0_0.distcp: its contents have changed" in caplog.text
    assert resume(tmp_path, verify_hashes=False) == 4  # its size is right
    with pytest.raises(
        CheckpointError,
        match=r"load_step = 4: .*step-00000004 is broken: .*contents.* steps 2, 4: name",
    ):
        resume(tmp_path, load_step=4)


def test_a_run_with_only_broken_checkpoints_does_not_start_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(2)
    run.save()
    (step_folder(tmp_path, 2) / "rank-00000.json").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"rank-00000.json: No such file.* None of the 1 .* verifies.*load_step = 0 for",
    ):
        resume(tmp_path)


def test_a_checkpoint_of_another_model_is_refused_with_the_differences(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(2)
    run.save()
    other = Run(tmp_path, width=6)
    before = other.state()
    with pytest.raises(
        CheckpointError,
        match=r"9 tensors differ .*: model\.0\.weight: float32 \[4, 4\] -> float32 \[6, 6\]",
    ):
        other.checkpointer.load(verified(tmp_path, 2))
    assert equal(other.state(), before)


def test_later_checkpoints_are_set_aside(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(3):
        run.train(2)
        run.save()
    Run(tmp_path).checkpointer.load(verified(tmp_path, 2))
    assert committed_steps(tmp_path) == [2]
    assert len(list(tmp_path.glob("superseded-step-*"))) == 2


def test_the_weights_alone_start_a_new_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "a")
    run.train(2)
    run.save()
    new = Run(tmp_path / "b")
    new.checkpointer.load_weights(step_folder(tmp_path / "a", 2), ModelArgs())
    state = new.state()
    assert all(
        torch.equal(state[name], tensor)
        for name, tensor in run.state().items()
        if name.startswith("model.")
    )
    assert all((state[name] == 0).all() for name in state if name.endswith("exp_avg"))
    other = Run(tmp_path / "c", width=6)
    with pytest.raises(CheckpointError, match=r"step-00000002 is of another model: dim: 4 -> 6\."):
        other.checkpointer.load_weights(step_folder(tmp_path / "a", 2), ModelArgs())
    break_step(tmp_path / "a", 2)
    with pytest.raises(BrokenCheckpoint, match="contents have changed"):
        new.checkpointer.load_weights(step_folder(tmp_path / "a", 2), ModelArgs())


def test_weights_of_another_data_type_are_converted(tmp_path: Path) -> None:
    weights = {
        name: torch.full_like(tensor, 1 / 3).bfloat16()
        for name, tensor in states.model_state(Run(tmp_path).model).items()
    }
    path = write_checkpoint(tmp_path, 5, weights)
    run = Run(tmp_path / "new")
    run.checkpointer.load_weights(path, ModelArgs())
    assert all(
        (weight == 0.333984375).all() and weight.dtype == torch.float32
        for weight in run.model.parameters()
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_loaded_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    weights = states.model_state(Run(tmp_path).model)
    weights["model.2.weight"] = torch.tensor([[1.0, value, value, 2.0]])
    path = write_checkpoint(tmp_path, 5, weights)
    with pytest.raises(
        CheckpointError,
        match=r"step-00000005 cannot .*: model\.2\.weight has 2 values that are NaN",
    ):
        Run(tmp_path / "new").checkpointer.load_weights(path, ModelArgs())


def test_weights_that_are_no_checkpoint(tmp_path: Path) -> None:
    checkpointer = Run(tmp_path / "run").checkpointer
    with pytest.raises(CheckpointError, match=r"nowhere is missing\. It takes the folder of a "):
        checkpointer.load_weights(tmp_path / "nowhere", ModelArgs())
    (tmp_path / "config.json").touch()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be imported: not JSON"):
        checkpointer.load_weights(tmp_path, ModelArgs())


@BOTH_MODES
@pytest.mark.parametrize("export_dtype", ["float32", "bfloat16", "float16"])
def test_the_last_save_of_a_run_may_have_weights_alone(
    export_dtype: str, async_mode: Any, tmp_path: Path
) -> None:
    settings = {"async_mode": async_mode, "export_dtype": export_dtype}
    run = Run(tmp_path / "a", last_save_model_only=True, **settings)
    run.train(2)
    run.save()
    run.train(2)
    run.save(last=True)
    dtype = getattr(torch, export_dtype)
    expected = {name: each.to(dtype) for name, each in states.model_state(run.model).items()}
    path = step_folder(tmp_path / "a", 4)
    assert SafeReader(path).tensors == states.entries(expected)
    assert equal(SafeReader(path).read_whole(), expected)
    assert verify_checkpoint(path, hashes=True) == []
    table = format_summaries([summarize(each) for each in step_folders(tmp_path / "a")])
    assert [line.endswith("ok, weights only") for line in table.splitlines()[1:]] == [False, True]

    new = Run(tmp_path / "b")
    new.checkpointer.load_weights(path, ModelArgs())
    loaded = states.model_state(new.model)
    assert equal(loaded, {name: each.float() for name, each in expected.items()})


def test_weights_beyond_the_range_of_float16_are_saved_in_float32(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, last_save_model_only=True, export_dtype="float16")
    with torch.no_grad():
        run.model[2].weight[0, 1] = 1e5
    run.save(last=True)
    assert 'export_dtype = "float16" cannot hold all weights' in caplog.text
    weights = SafeReader(step_folder(tmp_path, 0)).read_whole()
    assert equal(weights, states.model_state(run.model))


def test_a_run_that_ended_with_weights_alone_is_not_resumed_but_its_earlier_steps_are(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, last_save_model_only=True)
    for last in (False, False, True):
        run.train(2)
        run.save(last=last)
    for load_step in (-1, 6):
        settings = CheckpointConfig(enable=True, load_step=load_step)
        found = find_resume(settings, folder=tmp_path)
        assert found is not None and found.progress.step == 6
        found.check_can_train(last_step=6)  # nothing is left to train
        with pytest.raises(
            CheckpointError,
            match=r"load_step: .*step-00000006 has only weights, .* load_step to an "
            r'earlier step \(there are: 2, 4\), .* initial_load_path = ".*step-00000006"'
            r"\. .*-lite convert export .*step-00000006 NEW_FOLDER",
        ):
            found.check_can_train(last_step=7)
    assert resume(tmp_path, load_step=4) == 4
    assert resume(tmp_path, load_step=0) is None
    break_step(tmp_path, 6)
    assert resume(tmp_path) == 4


def test_which_steps_are_saved(tmp_path: Path) -> None:
    def saved(**settings: Any) -> list[int]:
        checkpointer = Run(tmp_path, **settings).checkpointer
        return [step for step in range(1, 6) if checkpointer.due(step, last=step == 5)]

    assert saved() == [2, 4, 5]
    assert saved(enable_first_step_checkpoint=True) == [1, 2, 4, 5]
    assert saved(load_only=True) == saved(load_only=True, enable_first_step_checkpoint=True) == []


def test_a_run_that_only_loads_renames_no_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(2):
        run.train(2)
        run.save()
    Run(tmp_path, load_only=True).checkpointer.load(verified(tmp_path, 2))
    assert committed_steps(tmp_path) == [2, 4]


def test_moments_that_are_excluded_start_at_zero_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.train(2)
    run.save()
    found = find_resume(
        CheckpointConfig(enable=True, exclude_from_loading=("optimizer",)), folder=tmp_path
    )
    assert found is not None and found.excluded == ("optimizer",)
    assert found.progress == TrainingProgress(2, samples=16, tokens=128, data={"seed": 0})
    second = Run(tmp_path)
    second.checkpointer.load(found)
    weights, state = run.state(), second.state()
    assert all(
        torch.equal(each, weights[name]) if name.startswith("model.") else (each == 0).all()
        for name, each in state.items()
    )

    # The run that has done so resumes with its own moments.
    config = '[checkpoint]\nexclude_from_loading = ["optimizer"]\n'
    saved = write_checkpoint(tmp_path / "own", 5, config=config)
    with caplog.at_level("INFO"):
        found = find_resume(
            CheckpointConfig(enable=True, exclude_from_loading=("optimizer",)),
            folder=tmp_path / "own",
        )
    assert found is not None and found.excluded == ()
    assert f"is ignored: the run that saved {saved} had the same" in caplog.text


def test_steps_do_not_begin_again_in_a_folder_with_checkpoints_of_them(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 5)
    with pytest.raises(
        CheckpointError,
        match=r'exclude_from_loading = \["train_state"\]: .* set another \[job\] dump_folder',
    ):
        resume(tmp_path, exclude_from_loading=("train_state",))


def test_a_new_run_goes_on_from_all_that_another_run_has_saved(tmp_path: Path) -> None:
    first = Run(tmp_path / "a")
    first.train(2)
    first.save()
    path = step_folder(tmp_path / "a", 2)
    later = first.train(3)
    settings: Any = {"initial_load_path": str(path), "initial_load_model_only": False}
    assert find_resume(CheckpointConfig(enable=True), folder=tmp_path / "b") is None
    found = find_resume(CheckpointConfig(enable=True, **settings), folder=tmp_path / "b")
    assert found is not None and (found.path, found.progress.step) == (path, 2)
    second = Run(tmp_path / "b")
    second.checkpointer.load(found)
    assert second.checkpointer.last_saved is None
    assert second.train(3) == later

    # Once it has saved, it resumes from its own.
    second.step = 5
    second.save()
    assert resume(tmp_path / "b", **settings) == 5
    assert resume(tmp_path / "b", load_step=0, **settings) == 2
    excluded = ("train_state", "dataloader")
    assert resume(tmp_path / "c", exclude_from_loading=excluded, **settings) == 0


@pytest.mark.parametrize("kind", ["torchtitan_lite", "torchtitan", "Hugging Face"])
def test_a_new_run_cannot_go_on_from_weights_alone(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    if kind == "torchtitan_lite":
        path = write_checkpoint(tmp_path, 5, {"model.w": torch.ones(2)})
    elif kind == "torchtitan":
        save_torchtitan(path, {"w": torch.ones(2)})
    else:
        path.mkdir()
        (path / "model.safetensors").touch()
    with pytest.raises(
        CheckpointError,
        match=rf"initial_load_model_only = false: {path}, of {kind}, has nothing but weights",
    ):
        resume(tmp_path / "run", initial_load_path=str(path), initial_load_model_only=False)


def test_any_but_a_hugging_face_model_can_be_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 5, states.model_state(Run(tmp_path).model))
    checkpointer = Run(tmp_path / "new", initial_load_in_hf=True).checkpointer
    with pytest.raises(
        CheckpointError, match=r"initial_load_in_hf = true: .*05 is of torchtitan_lite; set it to"
    ):
        checkpointer.load_weights(path, ModelArgs())


def test_a_run_without_checkpoints_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = CheckpointManifest(world_size=1, model={}, config="")
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with caplog.at_level("INFO"):
        Checkpointer(
            model,
            optimizer,
            CheckpointConfig(),
            folder=tmp_path,
            device=CPU,
            manifest=manifest,
            stages=None,
        )
    assert "checkpoints are off: [checkpoint] enable = false" in caplog.text


def test_as_many_are_kept_as_asked_for(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_latest_k=2)
    for _ in range(4):
        run.train(1)
        run.save()
    assert committed_steps(tmp_path) == [3, 4]


def test_a_step_that_is_there_already_is_kept(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(2)
    run.save()
    before = read_manifest(step_folder(tmp_path, 2)).save_id
    run.save()
    assert read_manifest(step_folder(tmp_path, 2)).save_id == before
    break_step(tmp_path, 2)
    run.save()
    assert read_manifest(step_folder(tmp_path, 2)).save_id != before
    assert resume(tmp_path) == 2


def test_what_killed_saves_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    draft = tmp_path / ".tmp-step-00000007"
    draft.mkdir()
    (draft / "__0_0.distcp").write_bytes(b"x")
    Run(tmp_path).save()
    assert list(tmp_path.iterdir()) == [step_folder(tmp_path, 0)]


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", fail)


@BOTH_MODES
def test_a_failed_save_stops_the_run_and_leaves_what_was_there(
    async_mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, async_mode=async_mode)
    run.train(2)
    run.save()
    run.train(2)
    fill_disk(monkeypatch)
    with pytest.raises(
        StorageError,
        match=r"\.tmp-step-00000004 cannot be written: .*No space left.*GiB are free there",
    ):
        run.save()
    assert run.checkpointer.last_failure is not None
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    assert resume(tmp_path) == 2


@BOTH_MODES
def test_a_failed_save_only_warns_where_asked_for(
    async_mode: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(tmp_path, async_mode=async_mode, on_failure="warn")
    run.train(2)
    with monkeypatch.context() as patch, caplog.at_level("WARNING"):
        fill_disk(patch)
        run.save()
    assert (
        "No space left" in caplog.text
        and 'Training goes on, as [checkpoint] on_failure = "warn"' in caplog.text
    )
    assert run.checkpointer.last_failure is not None and run.checkpointer.last_saved is None
    run.save()
    assert run.checkpointer.last_failure is None and run.checkpointer.last_saved == step_folder(
        tmp_path, 2
    )


def test_a_failed_save_in_the_background_is_known_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, async_mode="async")
    assert run.checkpointer.failure() is None
    run.train(2)
    fill_disk(monkeypatch)
    run.save(wait=False)
    assert run.checkpointer._saving is not None
    run.checkpointer._saving.exception(timeout=20)
    error = run.checkpointer.failure()
    assert isinstance(error, StorageError) and "No space left" in str(error)
    assert run.checkpointer.failure() is None  # reported once
    run.checkpointer.wait()


@pytest.mark.parametrize("operation", ["write_manifest", "commit", "replace_file", "hash_file"])
def test_a_disk_that_fails_later_in_a_save_leaves_no_trace_either(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise (
            OSError(errno.EIO, "Input/output error")
            if operation != "commit"
            else StorageError("no")
        )

    run = Run(tmp_path)
    run.train(2)
    monkeypatch.setattr(folders if operation == "commit" else module, operation, fail)
    with pytest.raises(StorageError):
        run.save()
    assert list(tmp_path.iterdir()) == []


@BOTH_MODES
def test_weights_that_are_not_finite_are_not_saved(async_mode: str, tmp_path: Path) -> None:
    run = Run(tmp_path, async_mode=async_mode, on_failure="warn")
    run.train(2)
    with torch.no_grad():
        run.model[2].weight[0, 1] = torch.nan
    with pytest.raises(
        NumericError,
        match=r"model\.2\.weight is no longer finite after step 2, so that step is not saved",
    ):
        run.save()
    assert list(tmp_path.iterdir()) == []


def test_what_other_ranks_wrote_elsewhere_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On disks that are not shared, rank 0 has its own files only."""
    run = Run(tmp_path)
    run.train(2)
    hash_files = Checkpointer._hash_files

    def with_another_rank(
        self: Checkpointer, draft: Path, state: dict[str, Any]
    ) -> dict[str, FileEntry]:
        return hash_files(self, draft, state) | {"__1_0.distcp": FileEntry(10, "0" * 64)}

    monkeypatch.setattr(Checkpointer, "_hash_files", with_another_rank)
    with pytest.raises(
        StorageError, match=r"on rank 0 .*: __1_0.distcp: No such file.*; \[job\] dump_folder"
    ):
        run.save()
    assert list(tmp_path.iterdir()) == []


def test_a_prune_that_fails_does_not_undo_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any) -> None:
        raise StorageError("old files cannot be deleted.")

    monkeypatch.setattr(folders, "prune", fail)
    run = Run(tmp_path)
    run.train(2)
    with caplog.at_level("WARNING"):
        run.save()
    assert "old files cannot be deleted. The new checkpoint is complete." in caplog.text
    assert resume(tmp_path) == 2


def test_a_checkpoint_without_its_manifest_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    for _ in range(2):
        run.train(2)
        run.save()
    (step_folder(tmp_path, 4) / "manifest.json").unlink()
    with caplog.at_level("INFO"):
        assert resume(tmp_path) == 2
    assert "step-00000004 is broken: manifest.json: No such file" in caplog.text


@pytest.mark.parametrize("file", [".metadata", "rank-00000.json"])
def test_damage_in_a_small_file_is_seen_without_verify_hashes(file: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(2):
        run.train(2)
        run.save()
    path = step_folder(tmp_path, 4) / file
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert resume(tmp_path, verify_hashes=False) == 2


def test_a_random_state_of_another_kind_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(2)
    run.save()
    found = find_resume(CheckpointConfig(enable=True), folder=tmp_path)
    assert found is not None
    (step_folder(tmp_path, 2) / "rank-00000.json").write_text(json.dumps({"python": "os.system"}))
    with pytest.raises(BrokenCheckpoint, match=r"rank-00000\.json: "):
        run.checkpointer.load(found)
