"""Runs of two processes whose checkpoints are in an object store, an S3 server on loopback."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import ENV, ROOT, launcher, read_records, torchrun, train, train_arguments
from processes import kill_tree

from torchtitan_lite.base.paths import open_path
from torchtitan_lite.checkpoint.folders import find_checkpoints
from torchtitan_lite.run.run_folder import read_status

pytest.importorskip("moto")
pytest.importorskip("s3fs")
from s3_server import DENIED, Server, fails, waits  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SAVES = ("--checkpoint.enable", "--checkpoint.interval=2", "--training.steps=6")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    started = Server()
    for name, value in started.env.items():
        monkeypatch.setitem(ENV, name, value)  # type: ignore[arg-type]
    started.make_bucket("bucket")
    yield started
    started.close()


def losses(folder: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_records(folder)}


# ----- train -----


def test_a_run_killed_in_an_upload_goes_on_elsewhere_in_another_layout(
    server: Server, tmp_path: Path
) -> None:
    train(tmp_path / "straight", "--training.steps=6", processes=2)
    straight = losses(tmp_path / "straight")
    url = "--checkpoint.folder=s3://bucket/run"

    # Killed while the tensors of step 4 are uploaded.
    server.fault = waits("PUT", "step-00000004/__1_0.distcp", 60)
    words = [*launcher(2), *train_arguments(tmp_path / "killed", *SAVES, url)]
    killed = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=ENV)
    while not any("PUT" in each and "step-00000004/__1" in each for each in server.requests):
        assert killed.poll() is None
        time.sleep(0.1)
    kill_tree(killed.pid)
    killed.wait()

    # On another host, which has nothing of the first one.
    server.fault = lambda request: None
    layout = "--parallelism.tensor_parallel_degree=2"
    records = train(tmp_path / "elsewhere", *SAVES, url, layout, processes=2)
    assert [record["step"] for record in records] == [3, 4, 5, 6]
    for step, loss in losses(tmp_path / "elsewhere").items():
        assert loss == pytest.approx(straight[step], rel=5e-4)


def test_a_store_that_refuses_ends_a_run_with_its_words(server: Server, tmp_path: Path) -> None:
    server.fault = fails("PUT", "step-00000004/__1_0.distcp", DENIED)
    url = "--checkpoint.folder=s3://bucket/denied"
    failed = torchrun(*train_arguments(tmp_path / "run", *SAVES, url), processes=2)
    status = read_status(tmp_path / "run")
    assert failed.returncode == 1 and status is not None and status.exit_code == 7
    assert status.cause is not None and "rank 1: PermissionError: not yours" in status.cause
    server.fault = lambda request: None
    records = train(tmp_path / "again", *SAVES, url, processes=2)
    assert [record["step"] for record in records] == [3, 4, 5, 6]


def test_load_step_0_never_goes_on_from_the_earlier_run(tmp_path: Path) -> None:
    folder = f"file://{tmp_path}/bucket"
    saves = [*SAVES, f"--checkpoint.folder={folder}"]
    train(tmp_path / "run", *saves, processes=1)
    afresh = "--checkpoint.load_step=0", "--training.steps=4"
    train(tmp_path / "run", *saves, *afresh, processes=1)
    assert [path.name[-1] for path in find_checkpoints(open_path(folder))] == ["2", "4"]

    # Nor if the new run goes on from another folder.
    start = f"--checkpoint.initial_load_path={tmp_path}/other/checkpoint/step-00000002"
    train(tmp_path / "other", *SAVES, "--training.steps=2", processes=1)
    moments = "--checkpoint.initial_load_model_only=false"
    train(tmp_path / "run", *saves, *afresh, start, moments, processes=1)
    assert [path.name[-1] for path in find_checkpoints(open_path(folder))] == ["4"]
