"""Exceptions of the main job, explained and reported."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import CppCompileError, InductorError

from torchtitan_lite.errors import DataError, RankLostError, RunError, StorageError
from torchtitan_lite.failures import FailureReport, explain
from torchtitan_lite.run_folder import open_run_folder


def test_a_failure_is_written_only_while_this_run_has_the_folder(tmp_path: Path) -> None:
    folder = open_run_folder(tmp_path)
    folder.begin(resumed_config=None, entries=[])
    report = FailureReport(tmp_path)
    report.write("too early", step=0)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"

    report.begin()
    (tmp_path / ".lock").rename(tmp_path / "old")
    report.write("another run's folder", step=3)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"

    (tmp_path / "old").rename(tmp_path / ".lock")
    report.write("the text is gone", step=3, exit_code=3, rank=1)
    status = json.loads((tmp_path / "status.json").read_text())
    found = (status["state"], status["cause"], status["exit_code"], status["rank"], status["step"])
    assert found == ("failed", "the text is gone", 3, 1, 3)
    folder.close()


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
