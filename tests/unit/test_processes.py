import os
import subprocess
import sys
import time

import pytest

from torchtitan_lite.benchmarks.processes import (
    TAIL_LINES,
    Watched,
    environment,
    resident_kib,
    torchrun,
    watch,
)
from torchtitan_lite.errors import RunError


def run(code: str, **options: object) -> Watched:
    options = {"env": os.environ, "timeout_s": 30.0, **options}
    return watch([sys.executable, "-c", code], **options)  # type: ignore[arg-type]


def test_lines_have_the_moments_at_which_they_arrive() -> None:
    watched = run("import time; print('a', flush=True); time.sleep(0.5); print('b')")
    (first, a), (second, b) = watched.lines
    assert (a, b) == ("a", "b")
    assert first > 0 and second - first > 0.4


def test_the_peak_is_that_of_the_largest_process() -> None:
    child = "import sys; taken = bytearray(300 * 2**20); del taken"
    command = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    # Linux counts to a process what the one had that forked it: tests have imported torch, the
    # script has not.
    watcher = (
        "import os, sys; from torchtitan_lite.benchmarks.processes import watch; "
        f"print(watch([sys.executable, '-c', {command!r}], env=os.environ, timeout_s=30.0).peak_mib)"
    )
    result = subprocess.run(
        [sys.executable, "-c", watcher], capture_output=True, text=True, check=True, timeout=40
    )
    assert 300 < float(result.stdout) < 400


def test_each_line_can_be_followed() -> None:
    seen: list[tuple[int, str]] = []
    run("import os; print(os.getpid())", on_line=lambda pid, line: seen.append((pid, line)))
    ((pid, line),) = seen
    assert line == f"{pid}\n"


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(RunError, match=r"ended with 3:\nof no use"):
        run("print('of no use'); raise SystemExit(3)")


def test_only_the_end_of_a_long_output_is_told() -> None:
    with pytest.raises(RunError) as caught:
        run("print(*range(1000), sep='\\n'); raise SystemExit(1)")
    assert str(caught.value).splitlines()[1:] == [
        str(number) for number in range(1000 - TAIL_LINES, 1000)
    ]


def test_a_command_that_takes_too_long_is_ended() -> None:
    began = time.perf_counter()
    with pytest.raises(RunError, match="ended with -15"):
        run("import time; time.sleep(60)", timeout_s=0.5)
    assert time.perf_counter() - began < 20


def test_a_command_does_not_outlive_what_watches_it() -> None:
    def fail(pid: int, line: str) -> None:
        raise KeyError(line)

    began = time.perf_counter()
    with pytest.raises(KeyError):
        run("import time; print('a', flush=True); time.sleep(60)", on_line=fail)
    assert time.perf_counter() - began < 20


def test_what_a_line_tells_is_found() -> None:
    watched = Watched(((0.1, "a"), (0.2, "6 parameters"), (0.3, "7 parameters")), peak_mib=1.0)
    assert watched.find(r"(\d+) parameters") == "6"
    with pytest.raises(RunError, match=r"no line matches 'x':\na\n"):
        watched.find("x")


def test_resident_memory_is_that_of_the_largest_child() -> None:
    code = (
        "import subprocess, sys; small = 'input()'; large = 'taken = bytearray(200 * 2**20); print(0); input()'\n"
        "first = subprocess.Popen([sys.executable, '-c', small], stdin=subprocess.PIPE)\n"
        "second = subprocess.Popen([sys.executable, '-c', large], stdin=subprocess.PIPE)\n"
        "second.wait()"
    )
    found: list[int] = []

    def look(pid: int, line: str) -> None:
        found.append(resident_kib(pid))
        raise KeyError

    # The inner prints once it has its memory; unbuffered, as it waits then.
    with pytest.raises(KeyError):
        run(code, on_line=look, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    assert 200 * 1024 < found[0] < 260 * 1024


def test_a_process_without_children_has_no_resident_child() -> None:
    found: list[int] = []
    code = "import time; print(0, flush=True); time.sleep(1)"
    run(code, on_line=lambda pid, line: found.append(resident_kib(pid)))
    assert found == [0]


def test_one_thread_a_process_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert (
        environment(A="1").items()
        >= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "A": "1"}.items()
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert environment()["OMP_NUM_THREADS"] == "2"


def test_torchrun_is_started_by_the_python_that_is_named() -> None:
    command = torchrun("python", "-m", "x", processes=2)
    assert command[0] == "python" and command[-4:] == ["--nproc-per-node", "2", "-m", "x"]
