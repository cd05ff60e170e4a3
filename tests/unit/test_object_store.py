"""Checkpoints in an object store, a real S3 server on loopback: what a save leaves when it fails,
and what a run resumes from."""

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from test_checkpointer import BOTH_MODES, Run, differing, find, resumed_step, verified

from torchtitan_lite.base.errors import CheckpointError, ConfigError, StorageError
from torchtitan_lite.base.paths import fetch, open_path
from torchtitan_lite.checkpoint import folders
from torchtitan_lite.checkpoint.folders import find_checkpoints, steps_with_manifest
from torchtitan_lite.checkpoint.hf_export import new_folder
from torchtitan_lite.checkpoint.hf_folder import HfReader
from torchtitan_lite.checkpoint.manifest import BrokenCheckpoint
from torchtitan_lite.checkpoint.reading import open_checkpoint
from torchtitan_lite.cli.checkpoint import format_checkpoints

pytest.importorskip("moto")
pytest.importorskip("s3fs")
from s3_server import DENIED, FULL, Server, fails, waits  # noqa: E402

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def one_rank() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in started.env.items():
            patch.setenv(name, value)
        started.make_bucket("bucket")
        yield started
    started.close()


@pytest.fixture
def folder(server: Server, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A URL of its own for each test, in a server without faults."""
    name = re.sub(r"\W+", "-", request.node.name)
    yield open_path(f"s3://bucket/{name}-{os.urandom(4).hex()}/checkpoint")
    server.fault = lambda request: None


def names(folder: Any) -> set[str]:
    """The keys in a folder, below it."""
    prefix = f"{folder.path}/"
    return {name.removeprefix(prefix) for name in folder.fs.find(folder.path)}


# ----- Checkpointer: save, load -----


@BOTH_MODES
def test_a_resumed_run_continues_bit_by_bit(async_mode: str, folder: Any) -> None:
    first = Run(folder, async_mode=async_mode)
    path = first.train_and_save(2)
    later = first.train(3)
    second = Run(folder)
    found = find(folder)
    assert found is not None and found.path == path
    second.checkpointer.load(found)
    second.step = 2
    assert second.train(3) == later


def test_save_writes_the_manifest_last_and_renames_nothing(server: Server, folder: Any) -> None:
    run = Run(folder)
    run.train_and_save(2)
    server.requests.clear()
    run.train_and_save(4)
    written = [each for each in server.requests if each.split()[0] in ("PUT", "POST", "DELETE")]
    assert written[-1] == f"PUT /{folder.path}/step-00000004/manifest.json"
    assert all("step-00000004" in each or each.startswith("POST /bucket") for each in written)
    assert steps_with_manifest(folder) == [2, 4]
    assert names(folder / "step-00000004") == {".metadata", "__0_0.distcp", "manifest.json"}


def test_format_checkpoints_and_find_checkpoints_take_a_url(folder: Any) -> None:
    Run(folder).train_and_save(2, 4)
    assert [path.name for path in find_checkpoints(folder.parent)] == [
        "step-00000002",
        "step-00000004",
    ]
    assert format_checkpoints(find_checkpoints(folder)).count(" ok") == 2


# ----- Checkpointer: start and save that fail -----


def test_a_start_fails_if_the_store_refuses_to_be_written(server: Server, folder: Any) -> None:
    with pytest.raises(StorageError, match=r"s3://no-such-bucket/.* cannot be written.*not exist"):
        Run(open_path("s3://no-such-bucket/run")).checkpointer.begin()
    Run(folder).train_and_save(2)
    # A save deletes too.
    for server.fault in (fails("PUT", ".write-test", DENIED), fails("POST", "/bucket", DENIED)):
        with pytest.raises(StorageError, match=r"s3://bucket/.* cannot be written.*not yours"):
            Run(folder).checkpointer.load(verified(folder / "step-00000002"))
    Run(folder, load_only=True).checkpointer.load(verified(folder / "step-00000002"))


@pytest.mark.parametrize("part", ["__0_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize(("status", "says"), [(DENIED, "not yours"), (FULL, "no more room")])
def test_a_save_that_the_store_refuses_leaves_earlier_ones(
    part: str, status: str, says: str, server: Server, folder: Any
) -> None:
    run = Run(folder)
    run.train_and_save(2)
    run.train(2)
    server.fault = fails("PUT", f"step-00000004/{part}", status)
    with pytest.raises(StorageError, match=rf"s3://.*step-00000004.*cannot be written.*{says}"):
        run.save()
    server.fault = lambda request: None
    assert steps_with_manifest(folder) == [2]
    assert {name.partition("/")[0] for name in names(folder)} == {"step-00000002"}
    assert resumed_step(folder) == 2
    run.save()
    assert resumed_step(folder) == 4


@pytest.mark.parametrize("left", [["__0_0.distcp"], ["__0_0.distcp", ".metadata"]])
def test_what_a_killed_upload_leaves_is_no_checkpoint_and_deleted(
    left: list[str], folder: Any
) -> None:
    assert find(folder) is None
    for name in left:
        (folder / "step-00000002" / name).write_bytes(b"half")
    assert find(folder) is None  # a new run starts at step 1
    run = Run(folder)
    run.train_and_save(4)
    assert {name.partition("/")[0] for name in names(folder)} == {"step-00000004"}


def test_a_slow_store_delays_a_save_in_the_background_alone(server: Server, folder: Any) -> None:
    run = Run(folder, async_mode="async")
    server.fault = waits("PUT", "distcp", 2)
    run.train_and_save(2, wait=False)
    assert run.checkpointer.failure() is None and steps_with_manifest(folder) == []
    run.train(2)
    run.checkpointer.wait()
    assert steps_with_manifest(folder) == [2]


def test_a_store_that_cannot_be_reached_is_named(folder: Any, monkeypatch: Any) -> None:
    kind = type(folder.fs)
    kind.clear_instance_cache()  # they have read the environment
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        with pytest.raises(OSError, match="Could not connect.*'s3://bucket/away'"):
            find(open_path("s3://bucket/away"))
    kind.clear_instance_cache()


# ----- verify, open_checkpoint -----


def test_an_object_that_is_changed_or_cut_off_is_refused_for_the_one_before(folder: Any) -> None:
    run = Run(folder)
    newest = run.train_and_save(2, 4, 6)
    tensors = newest / "__0_0.distcp"
    content = tensors.read_bytes()

    tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BrokenCheckpoint, match=r"__0_0.distcp: its contents have changed"):
        open_checkpoint(newest, hashes=True)
    assert resumed_step(folder) == 4
    tensors.write_bytes(content[:100])
    with pytest.raises(BrokenCheckpoint, match=r"__0_0.distcp has 100 bytes"):
        open_checkpoint(newest, hashes=False)
    tensors.unlink()
    with pytest.raises(BrokenCheckpoint, match=r"__0_0.distcp: it is missing"):
        open_checkpoint(newest, hashes=False)
    assert resumed_step(folder) == 4
    (newest / "manifest.json").unlink()
    with pytest.raises(BrokenCheckpoint, match=r"manifest.json: No such file or directory"):
        open_checkpoint(newest, hashes=False)


@pytest.mark.parametrize("part", ["manifest.json", "__0_0.distcp"])
def test_a_store_that_refuses_to_give_a_file_stops_a_resume(
    part: str, server: Server, folder: Any
) -> None:
    """The checkpoint is sound: a run must not go on from an older one."""
    Run(folder).train_and_save(2, 4)
    server.fault = fails("GET", f"step-00000004/{part}", DENIED)
    with pytest.raises(StorageError, match=rf"step-00000004.*{part} cannot be read.*not yours"):
        find(folder)


@pytest.mark.parametrize("method", ["HEAD", "GET /bucket"])
def test_a_refusal_never_makes_a_checkpoint_a_draft(
    method: str, server: Server, folder: Any
) -> None:
    """The next save would delete it."""
    run = Run(folder, keep_latest_k=0)
    run.train_and_save(2, 4)
    for number in range(6):
        asked = itertools.count()
        server.fault = lambda request, number=number, asked=asked: (
            DENIED if request.startswith(method) and next(asked) == number else None
        )
        run.train(2)
        with contextlib.suppress(StorageError):
            run.save()
    server.fault = lambda request: None
    assert {2, 4} <= {*steps_with_manifest(folder)}


# ----- prune, set_aside_after, begin -----


def test_keep_latest_k_prunes_with_the_manifest_first(server: Server, folder: Any) -> None:
    run = Run(folder, keep_latest_k=2)
    run.train_and_save(2, 4, 6)
    assert steps_with_manifest(folder) == [4, 6]
    assert {name.partition("/")[0] for name in names(folder)} == {"step-00000004", "step-00000006"}


def test_load_sets_later_checkpoints_aside_and_begin_those_of_earlier_runs(folder: Any) -> None:
    first = Run(folder)
    first.train_and_save(2, 4)
    kept = first.state()
    second = Run(folder, load_step=2)
    second.checkpointer.load(verified(folder / "step-00000002"))
    assert steps_with_manifest(folder) == [2]
    (aside,) = (each for each in folder.iterdir() if each.name.startswith("superseded-step"))
    assert differing(open_checkpoint(aside, hashes=True).read_whole(), kept) == []

    Run(folder).checkpointer.begin()
    assert steps_with_manifest(folder) == []
    assert len([each for each in folder.iterdir() if each.name.startswith("superseded-")]) == 2


def test_a_checkpoint_of_the_same_step_is_kept_aside(folder: Any) -> None:
    Run(folder).train_and_save(2)
    Run(folder).train_and_save(2)
    assert steps_with_manifest(folder) == [2]
    assert len([each for each in folder.iterdir() if each.name.startswith("superseded-")]) == 1


def test_foreign_objects_are_never_deleted(folder: Any) -> None:
    (folder / "step-00000002" / "notes.txt").write_bytes(b"mine")
    with pytest.raises(StorageError, match="step-00000002/notes.txt is in the way"):
        Run(folder).train_and_save(2)
    assert (folder / "step-00000002" / "notes.txt").read_bytes() == b"mine"


def test_remove_drafts_deletes_a_model_that_is_not_whole(folder: Any) -> None:
    Run(folder).train_and_save(2)
    half, whole = folder / "step-00000002-hf", folder / "step-00000004-hf"
    mine = folder / "best-hf"
    for path in (half, whole, mine):
        (path / "model.safetensors").write_bytes(b"")
    (whole / "config.json").write_bytes(b"{}")
    folders.remove_drafts(folder)
    left = {"step-00000002", "step-00000004-hf", "best-hf"}
    assert {name.partition("/")[0] for name in names(folder)} == left
    assert steps_with_manifest(folder) == [2]


# ----- open_path, fetch, HfReader, new_folder, find_kind -----


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///", "://run", "s3://bucket/a*", "s3://bucket/lr[1e-3]/a"]
)
def test_open_path_refuses_what_stands_for_other_folders(url: str) -> None:
    """fsspec deletes whatever a pattern matches."""
    with pytest.raises(ConfigError, match=r"must name a bucket, and may not have \*, \? or \["):
        open_path(url)


def test_open_path_names_a_store_that_needs_more_than_a_url() -> None:
    with pytest.raises(ConfigError, match=r"^dir://a: .*; pip install"):
        open_path("dir://a")


def test_fetch_copies_no_object_to_outside_of_the_cache(
    folder: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Its name may be anything, and fsspec of before August 2026 follows it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (folder / "config.json").write_bytes(b"{}")
    assert (fetch(folder) / "config.json").is_file()
    folder.fs.pipe_file(f"{folder.path}/../../outside", b"")
    with pytest.raises(OSError, match=r"one's name has \.\."):
        fetch(folder)
    assert not [*tmp_path.rglob("outside")]


def test_hf_reader_of_a_store_that_refuses_a_file_does_not_call_the_model_broken(
    server: Server, folder: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(b"")
    server.fault = fails("GET", "model.safetensors", DENIED)
    with pytest.raises(StorageError, match="s3://bucket/.* cannot be read: not yours; "):
        HfReader(folder)


def test_new_folder_copies_config_json_last(server: Server, folder: Any) -> None:
    server.requests.clear()
    with new_folder(folder / "hf") as made:
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (made / name).write_text(name)
    puts = [each.rpartition("/")[2] for each in server.requests if each.startswith("PUT")]
    assert puts[-1] == "config.json" and len(puts) == 3
    with pytest.raises(ConfigError, match="hf exists; remove it"), new_folder(folder / "hf"):
        pass


def test_find_kind_of_a_missing_url(folder: Any) -> None:
    with pytest.raises(CheckpointError, match=r"initial_load_path: s3://.* cannot be listed"):
        folders.find_kind(folder / "nothing")
    with pytest.raises(CheckpointError, match="http://.* cannot be listed: Cannot connect"):
        folders.find_kind(open_path("http://127.0.0.1:9/model"))
