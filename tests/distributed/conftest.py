"""What all tests of several processes share."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import ENV, FOLDER


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Count as slow what is not marked as quick."""
    for item in items:
        if item.path.parent == FOLDER and not item.get_closest_marker("quick"):
            item.add_marker("slow")


@pytest.fixture(scope="module", autouse=True)
def without_gpus() -> Iterator[None]:
    """Processes train on CPU, also where there are GPUs, which may be fewer than they are."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setitem(ENV, "CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB, in which one checkpoint of 2 MB has room."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "faults", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted")
    yield path
    subprocess.run(["umount", str(path)], check=True)
