"""Checkpoints that are not as they were written, or not of this run: none is loaded, none is
overwritten, and of those before them nothing is lost."""

import hashlib
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from faults import (
    checkpoint,
    checkpoints,
    fault,
    finish,
    records,
    refuse,
    reported,
    run,
    step_names,
    values,
)
from launching import FOLDER
from matrix import STEPS

from torchtitan_lite.base.errors import CheckpointError
from torchtitan_lite.checkpoint.manifest import FileEntry, read_manifest, write_manifest
from torchtitan_lite.checkpoint.reading import open_checkpoint
from torchtitan_lite.checkpoint.resume import find_resume
from torchtitan_lite.config import CheckpointConfig
from torchtitan_lite.data.sources import open_source
from torchtitan_lite.data.store_writer import make_store
from torchtitan_lite.data.tokenizer import build_tokenizer

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def ten_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of 10 steps, with checkpoints of steps 5 and 10."""
    folder = tmp_path_factory.mktemp("ten-steps") / "run"
    finish(folder, f"{STEPS}=10", "--checkpoint.interval=5")
    return folder


@pytest.fixture
def folder(ten_steps: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(ten_steps, tmp_path / "run"))


def flip_a_bit(file: Path, older: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def zero_a_page(file: Path, older: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        stream.write(bytes(4096))


def cut_off(file: Path, older: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def delete(file: Path, older: Path) -> None:
    file.unlink()


def swap(file: Path, older: Path) -> None:
    assert older.stat().st_size == file.stat().st_size
    shutil.copy(older, file)


@pytest.fixture
def one_rank() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


# ----- find_resume, open_checkpoint -----
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_a_bit, "its contents"),
        (zero_a_page, "its contents"),
        (swap, "its contents"),
        (cut_off, r"has \d+ bytes, not \d+"),
        (delete, "No such file or directory"),
    ],
)
def test_damage_is_found_and_the_checkpoint_before_is_used(
    damage: Callable[[Path, Path], None], reason: str, folder: Path, one_rank: None, notices: Any
) -> None:
    name = "__1_0.distcp"
    damage(checkpoint(folder, 10) / name, checkpoint(folder, 5) / name)
    found = find_resume(CheckpointConfig(enable=True), folder=folder / "checkpoint")
    assert found is not None and found.manifest.progress.step == 5
    (message,) = notices.messages
    broken = f"{checkpoint(folder, 10)} is broken: {name}:? {reason}"
    assert re.match(broken, message)
    with pytest.raises(CheckpointError, match=rf"load_step = 10: {broken}"):
        find_resume(CheckpointConfig(enable=True, load_step=10), folder=folder / "checkpoint")


# ----- find_resume, load_step -----


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one_unless_load_step_is_set(
    folder: Path,
) -> None:
    expected = values(folder, "loss")
    swap(checkpoint(folder, 10) / "__0_0.distcp", checkpoint(folder, 5) / "__0_0.distcp")
    broken = f"{checkpoint(folder, 10)} is broken: __0_0.distcp: its contents have changed"
    refused = run(folder, f"{STEPS}=12", "--checkpoint.load_step=10")
    assert f"error:\n[checkpoint] load_step = 10: {broken}" in refused.stdout
    assert re.findall(r"exitcode +: (\d+)", refused.stderr) == ["4", "4"]
    output = finish(folder, f"{STEPS}=12", "--optimizer.weight_decay=0.2")
    assert broken in output
    assert f"resumed from {checkpoint(folder, 5)}" in output
    assert "since step 5: [optimizer] weight_decay: 0.1 -> 0.2" in output
    assert list(records(folder)) == list(range(1, 13))
    # The weight decay of step 6 is first seen in the loss of step 7.
    losses = values(folder, "loss")
    assert [step for step in range(10) if losses[step] != expected[step]] == [6, 7, 8, 9]


def test_another_model_is_refused(folder: Path) -> None:
    code, cause = refuse(folder, "--model.flavor=wider", processes=1)
    assert code == 4
    assert re.match(r"\[model\] .* is of another model: dim: 32 -> 64\. ", cause)


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


# ----- SafeReader -----


def test_a_table_of_tensors_that_would_run_code_is_refused(folder: Path, tmp_path: Path) -> None:
    path, marker = checkpoint(folder, 10), tmp_path / "code ran"
    table = pickle.dumps(Evil(marker))
    (path / ".metadata").write_bytes(table)
    manifest = read_manifest(path)
    entry = FileEntry(len(table), hashlib.sha256(table).hexdigest())
    files = manifest.files | {".metadata": entry}
    write_manifest(path, replace(manifest, files=files))
    output = finish(folder, f"{STEPS}=6")
    assert not marker.exists()
    refused = r"is broken: \.metadata: names (pathlib\S*|builtins)\.\w+, which no table"
    assert re.search(f"{path} {refused}", output)
    assert f"resumed from {checkpoint(folder, 5)}" in output
    pickle.loads(table)
    assert marker.exists()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A token store of the text that is trained on."""
    source, store = open_source(str(FOLDER / "text.txt")), tmp_path / "store"
    make_store(store, source, build_tokenizer(""))
    return store


# ----- TokenStore -----


def test_a_token_store_that_is_cut_off_under_a_run_ends_it_on_all_ranks(
    store: Path, tmp_path: Path
) -> None:
    damage = fault("cut_off", "forward 3", 0, path=f"{store}/tokens-00000.bin")
    result = run(tmp_path / "run", f"--training.dataset_path={store}", faults=[damage])
    assert re.findall(r"exitcode +: (\d+)", result.stderr) == ["3", "3"]
    assert reported(tmp_path / "run", "state", "exit_code") == ["failed", 3]
    damaged = rf"token store {store}: tokens-00000\.bin ends at place \d+"
    assert re.match(damaged, *reported(tmp_path / "run", "cause"))


# ----- Checkpointer -----
def test_what_is_there_under_the_name_of_a_checkpoint_is_kept(tmp_path: Path) -> None:
    folder, foreign = tmp_path / "run", tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    draft = folder / "checkpoint/.tmp-step-00000002"
    copies = [
        fault(
            "copy", f"committing {step}", source=str(source), target=str(checkpoint(folder, step))
        )
        for step, source in ((2, draft), (4, foreign))
    ]
    result = run(folder, f"{STEPS}=6", faults=copies)
    assert f"{checkpoint(folder, 2)} was there already, and is kept" in result.stdout
    assert reported(folder, "state", "exit_code") == ["failed", 7]
    in_the_way = f"{checkpoint(folder, 4)}/notes.txt is in the way of a save, "
    assert in_the_way in reported(folder, "cause")[0]
    assert reported(folder, "last_checkpoint") == [str(checkpoint(folder, 2))]
    assert checkpoints(folder) == step_names(2, 4)
    open_checkpoint(checkpoint(folder, 2), hashes=True)
    assert [path.read_text() for path in checkpoint(folder, 4).iterdir()] == ["mine"]
