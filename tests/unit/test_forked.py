"""Forked processes; tests/unit/test_launch.py has them as agent and worker."""

import os
import threading
import time
from typing import Any

import pytest

from torchtitan_lite.run.forked import ForkedProcess

# ----- ForkedProcess -----


def test_two_threads_may_see_the_end_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    process = ForkedProcess(lambda: None)
    waitpid = os.waitpid

    def wait_slowly(*args: Any) -> tuple[int, int]:
        time.sleep(0.1)
        return waitpid(*args)

    monkeypatch.setattr(os, "waitpid", wait_slowly)
    codes: list[int] = []
    threads = [
        threading.Thread(target=lambda: codes.append(process.wait(timeout=30))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0, 0]
