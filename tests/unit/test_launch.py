"""The launcher, with a stand-in for the agent; and the shell scripts, with a stand-in for the
environment's Python that writes down how it is called."""

import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2
from typing import Any
from unittest.mock import Mock

import pytest

from torchtitan_lite.base.errors import ConfigError, RankLostError, StorageError
from torchtitan_lite.run import launch
from torchtitan_lite.run.launch import (
    AgentEnd,
    Launch,
    find_outcome,
    listen,
    make_log_folder,
    report_end,
    wait_for_end,
)
from torchtitan_lite.run.run_folder import RunFolder, Status, job_name

ROOT = Path(__file__).parents[2]
PYTHON = f"""#!/bin/bash
echo "$*" >>"$CALLS"
case "$*" in
    "-m pip"*) echo "pip says no" >&2; exit ${{PIP_EXIT:-0}} ;;
    "-m torchtitan_lite train"*) echo "$PYTHONPATH"; exit 5 ;;
    -c*) exec {sys.executable} "$@" ;;
esac
"""


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class Project:
    """A copy of the scripts in a folder of their own, with an active environment whose Python is
    the stand-in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in ("run_train.sh", "pyproject.toml", "scripts/setup.sh", "scripts/test.sh"):
            (path / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, path / name)
        executable(path / "env/bin/python", PYTHON)
        self.env = {
            "PATH": f"{path}/bin:{os.environ['PATH']}",
            "VIRTUAL_ENV": f"{path}/env",
            "CALLS": f"{path}/calls",
        }

    def run(self, script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        command, env = [self.path / script, *args], self.env | env
        return subprocess.run(command, env=env, cwd=self.path, capture_output=True, text=True)

    def run_without_environment(self, python3: str) -> subprocess.CompletedProcess[str]:
        """Run setup.sh where each Python on PATH is the shell code `python3`."""
        for name in ("python3", *(f"python3.{minor}" for minor in range(10, 14))):
            executable(self.path / "bin" / name, f"#!/bin/sh\n{python3}")
        return self.run("scripts/setup.sh", VIRTUAL_ENV="")

    def calls(self, module: str = "") -> list[str]:
        """Return the arguments of each call of `python -m module` so far."""
        calls = (self.path / "calls").read_text().splitlines()
        prefix = f"-m {module} " if module else "-m "
        return [call.removeprefix(prefix) for call in calls if call.startswith(prefix)]


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


# ----- setup.sh -----


def test_the_first_use_installs_torch_then_the_project_and_a_later_use_nothing(project):
    install = "install --progress-bar off --disable-pip-version-check"
    first = project.run("scripts/setup.sh")
    assert (first.returncode, first.stdout) == (0, f"{project.path}/env/bin/python\n")
    installs = [f"{install} torch>=2.11,<2.14", f"{install} --editable {project.path}"]
    assert project.calls("pip") == installs
    later = project.run("scripts/setup.sh")
    assert (later.returncode, later.stdout, later.stderr) == (0, first.stdout, "")
    assert project.calls("pip") == installs
    with (project.path / "pyproject.toml").open("a") as pyproject:
        pyproject.write("# changed\n")
    project.run("scripts/setup.sh")
    assert project.calls("pip") == installs * 2

    # The extra is installed once, and covers plain use.
    for words in (["dev"], ["dev"], []):
        assert project.run("scripts/setup.sh", *words).returncode == 0
    assert len(project.calls("pip")) == 6
    assert project.calls("pip")[-1] == f"{install} --editable {project.path}[dev]"


def test_a_failed_install_is_explained_and_tried_again(project):
    for _ in range(2):
        failed = project.run("run_train.sh", PIP_EXIT="1")
        assert failed.returncode == 1
        assert re.search(r"pip says no\n.*could not install torch>=2\.11,<2\.14", failed.stderr)
    assert project.run("scripts/setup.sh").returncode == 0


@pytest.mark.parametrize(
    ("python3", "error"),
    [
        ("exit 1", "no Python 3.10 or newer found; install one"),
        ('case "$2" in *venv*) exit 1 ;; esac', "python3 has no venv module; .* python3-venv"),
        (None, "/nowhere/bin/python is missing or older than Python 3.10"),
    ],
)
def test_an_unusable_python_is_one_clear_line(python3, error, project):
    if python3 is None:
        result = project.run("scripts/setup.sh", VIRTUAL_ENV="/nowhere")
    else:
        result = project.run_without_environment(python3)
    assert result.returncode == 1
    assert re.match(f"setup: {error}", result.stderr) and result.stderr.count("\n") == 1


def test_without_an_environment_one_is_made_in_the_project(project):
    make = f'mkdir -p "$4/bin" && cp "{project.path}/env/bin/python" "$4/bin"'
    result = project.run_without_environment(f'[ "$2" = venv ] && {make}; exit 0')
    assert result.stdout == f"{project.path}/.venv/bin/python\n"
    assert (project.path / ".venv/torchtitan_lite.stamp").is_file()


# ----- test.sh, run_train.sh -----


def selected(calls: Sequence[str]) -> list[str]:
    """Return the marks that calls of pytest select."""
    return [re.match("pytest -m (.+?) --", call)[1] for call in calls]


def test_test_sh_with_arguments_only_runs_pytest(project):
    assert project.run("scripts/test.sh", "tests/unit", "-k", "config").returncode == 0
    assert project.calls()[-1] == "pytest tests/unit -k config"
    assert {call.split()[0] for call in project.calls()} == {"pip", "pytest"}


def test_test_sh_checks_then_runs_the_quick_tests_or_all(project):
    assert project.run("scripts/setup.sh", "dev").returncode == 0
    installs = len(project.calls())
    assert project.run("scripts/test.sh", TORCHTITAN_LITE_CUDA_PYTHON="").returncode == 0
    quick = project.calls()[installs:]
    assert quick[:3] == ["ruff check", "ruff format --check", "mypy"]
    assert selected(quick[3:]) == ["not slow"]

    cuda_python = f"{project.path}/env/bin/python"
    for python, deviceless in (("", 0), (cuda_python, 1)):
        before = len(project.calls())
        result = project.run("scripts/test.sh", "--all", TORCHTITAN_LITE_CUDA_PYTHON=python)
        assert result.returncode == 0
        calls = project.calls()[before:]
        assert calls[:4] == quick
        assert sum("tests/deviceless" in call for call in calls) == deviceless
        slow = selected(calls[4 : len(calls) - deviceless])
        for marks in ({"slow": True, "timed": False}, {"slow": True, "timed": True}):
            assert [eval(rule, {}, marks) for rule in slow].count(True) == 1


def test_run_train_sets_up_and_hands_over_to_the_launcher(project):
    link = project.path / "a folder" / "train"
    link.parent.mkdir()
    link.symlink_to(project.path / "run_train.sh")
    for script in (project.path / "run_train.sh", link):
        result = project.run(str(script), "--training.steps=5", "two words", PYTHONPATH="/mine")
        path = f"{project.path}:/mine"  # the environment may have another checkout's package
        assert (result.returncode, result.stdout) == (5, f"{path}\n")
        assert project.calls("torchtitan_lite train")[-1] == "--training.steps=5 two words"


# ----- launch, agent, train: run as modules -----
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([" train", "--training.steps=-1"], "must be greater than or equal to 1"),
        ([".train", "--training.steps=-1"], "no config file"),
    ],
)
def test_files_in_the_working_directory_are_not_imported(words, shown, tmp_path):
    for name in ("random.py", "numpy/__init__.py", "json.py", "torch.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('a file of the user')")
    command = [sys.executable, "-m", *f"torchtitan_lite{words[0]}".split(), *words[1:]]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    env |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert shown in result.stdout + result.stderr


def test_each_checkout_runs_its_own_sources_in_an_environment_of_another(tmp_path):
    # As under run_train.sh in the project's folder.
    other = tmp_path / "other/torchtitan_lite/__init__.py"
    other.parent.mkdir(parents=True)
    other.write_text("raise SystemExit('of another checkout')")
    env = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{ROOT}:{other.parents[1]}"}
    words = [sys.executable, "-m", "torchtitan_lite", "schema"]
    result = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


# ----- Launch -----

NODES = {"NNODES": "2", "NGPU": "8", "NODE_RANK": "1", "RDZV_ENDPOINT": "head:29500"}
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def asked(*overrides: str, **env: str) -> Launch:
    """The launch that some variables describe, on a machine without GPUs unless they name some."""
    return Launch({"CUDA_VISIBLE_DEVICES": "", **env}, overrides)


@pytest.mark.parametrize(
    ("name", "values", "rule"),
    [
        ("NGPU", ["two", "0", "9" * 5000], "whole number of 1 or more"),
        ("MAX_RESTARTS", ["-1"], "whole number of 0 or more"),
        ("NNODES", ["1.5"], "whole number of 1 or more"),
        ("NODE_RANK", ["x"], "whole number of 0 or more"),
        ("NODE_RANK", ["2"], "below NNODES=2; nodes count from 0"),
        (SHUTDOWN, ["x"], "whole number of 0 or more"),
        ("RDZV_ENDPOINT", ["head", "head:", "head:x", ":29500"], "host:port of node 0"),
        ("RDZV_ENDPOINT", ["http://head:1", "head:65536", "head:0"], "host:port of node 0"),
        ("LOG_RANK", ["abc", "8", "-1", "0,8", "0,", "0;1"], "0 to NGPU - 1 = 7"),
    ],
)
def test_a_bad_variable_is_named(name, values, rule):
    for value in values:
        with pytest.raises(ConfigError, match=f"^{name}={value} .*{rule}"):
            asked(**NODES | {name: value})


@pytest.mark.parametrize(
    ("env", "shown"),
    [
        ({"NNODES": "2"}, "NNODES=2 NODE_RANK= RDZV_ENDPOINT=:"),
        ({"NNODES": "2", "NODE_RANK": "1"}, "NNODES=2 NODE_RANK=1 RDZV_ENDPOINT=:"),
        ({"NODE_RANK": "0"}, "NNODES= NODE_RANK=0 RDZV_ENDPOINT=:"),
        ({"RDZV_ENDPOINT": "a:1"}, "NNODES= NODE_RANK= RDZV_ENDPOINT=a:1:"),
        ({"NODE_RANK": "1", "RDZV_ENDPOINT": "a:1"}, "NNODES= NODE_RANK=1 RDZV_ENDPOINT=a:1:"),
    ],
)
def test_only_some_of_the_variables_of_nodes_are_named_with_the_others(env, shown):
    with pytest.raises(ConfigError, match=f"^{shown} .*; set all three"):
        asked(**env)
    assert asked(NNODES="1", NODE_RANK="0").nnodes == 1  # as clusters set them for one node
    with pytest.raises(ConfigError, match="^NODE_RANK=1 must be below NNODES=1"):
        asked(NNODES="1", NODE_RANK="1")


@pytest.mark.parametrize(
    ("env", "ngpu", "policy"),
    [
        ({}, 2, "PASSIVE"),
        ({"NGPU": ""}, 2, "PASSIVE"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 2, "PASSIVE"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1f"}, 1, None),
        ({"CUDA_VISIBLE_DEVICES": "0,2,3"}, 3, None),
        ({"NGPU": "5", "CUDA_VISIBLE_DEVICES": "0,2,3"}, 5, None),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, 2, "ACTIVE"),
        ({"OMP_WAIT_POLICY": ""}, 2, ""),
    ],
)
def test_number_of_processes_and_threads_that_sleep_on_cpu(env, ngpu, policy):
    run = asked(**env)
    assert (run.ngpu, run.worker_env.get("OMP_WAIT_POLICY")) == (ngpu, policy)


@pytest.mark.parametrize(("nvidia_smi", "ngpu"), [("echo 'GPU 0\nGPU 1\nGPU 2'", 3), ("exit 9", 2)])
def test_number_of_processes_is_the_number_of_gpus(nvidia_smi, ngpu, tmp_path, monkeypatch):
    executable(tmp_path / "nvidia-smi", f"#!/bin/sh\n{nvidia_smi}")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert Launch({}, []).ngpu == ngpu
    monkeypatch.setenv("PATH", "")
    assert Launch({}, []).ngpu == 2


def test_variables_of_workers(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(7))
    assert asked().worker_env == {
        "LOG_RANK": "0",
        "OMP_NUM_THREADS": "3",
        "OMP_WAIT_POLICY": "PASSIVE",
        SHUTDOWN: "600",
        "PYTHONUNBUFFERED": "1",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}] ",
    }
    for text, ranks in (("0, 1", "0,1"), (" ", "0")):
        assert asked(LOG_RANK=text).worker_env["LOG_RANK"] == ranks
    chosen = {"LOG_RANK": "1", "OMP_NUM_THREADS": "9", SHUTDOWN: "45"}
    assert asked(**chosen, NGPU="8").worker_env.items() >= chosen.items()
    assert asked(NGPU="8").worker_env["OMP_NUM_THREADS"] == "1"


def test_the_agent_is_told_of_one_node_and_of_several():
    with listen("") as listener:
        host, port = listener.getsockname()
        at = {"host": host, "port": port, "node_rank": 0, "nnodes": 1, "timeout_s": 9}
        store = {**at, "listener": listener.fileno()}
        task = asked(MAX_RESTARTS="3").task(listener, timeout_s=9)
        os.close(store["listener"])  # the agent's
    words = ["--job.config_file", "debug_model"]
    assert task == {"words": words, "store": store, "ngpu": 2, "max_restarts": 3}
    assert host == "127.0.0.1"

    task = asked(**NODES | {"RDZV_ENDPOINT": "[::1]:29500"}).task(None, timeout_s=9)
    store = {"host": "::1", "port": 29500, "node_rank": 1, "nnodes": 2, "listener": None}
    store["timeout_s"] = 9
    assert task == {"words": words, "store": store, "ngpu": 8, "max_restarts": 0}


@pytest.mark.parametrize("dualstack", [True, False])
def test_listen_names_a_port_that_is_in_use(dualstack, monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: dualstack)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^RDZV_ENDPOINT=head:{port}: port {port} .* in use"):
            listen(f"head:{port}")


def test_a_compiler_that_cannot_work_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("CONFIG_FILE", "debug_model")
    monkeypatch.setattr(launch, "make_log_folder", lambda path: 1 / 0)
    words = [f"--job.dump_folder={tmp_path}"]
    with pytest.raises(ZeroDivisionError):
        launch.main(words)
    with pytest.raises(ConfigError, match="needs a C.. compiler, and there is no no-such-compiler"):
        launch.main([*words, "--compile.enable"])


# ----- find_outcome -----

RUNNING = Status("running", 0, 0)
DONE = Status("done", 0, 0, exit_code=0)
FAILED = Status("failed", 0, 0, cause="hangs", exit_code=6, rank=4)
KILLED = AgentEnd(1, 1, cause="rank 9 was killed by SIGKILL", cause_code=6, rank=9, killed=True)


@pytest.mark.parametrize(
    ("status", "end", "outcome"),
    [
        # what is in status.json counts
        (FAILED, KILLED, ("hangs", 6, 4)),
        (FAILED, AgentEnd(1, -9), ("hangs", 6, 4)),
        (FAILED, AgentEnd(1, 1, SIGTERM), ("hangs", 6, 4)),
        (DONE, AgentEnd(1, 1, SIGINT), ("done", 0, None)),
        # a rank that misses another does not know what killed that
        (replace(FAILED, rank=9), KILLED, (f"{KILLED.cause}; hangs", 6, 9)),
        # no rank has written the end
        (RUNNING, KILLED, (KILLED.cause, 6, 9)),
        (None, KILLED, (KILLED.cause, 6, 9)),
        (RUNNING, AgentEnd(1, 1, SIGINT), ("killed before it could stop at a step's end", 6, None)),
        (RUNNING, AgentEnd(1, -9, SIGINT),  # by the system, short of memory
         ("killed before it could stop at a step's end", 6, None)),
        (RUNNING, AgentEnd(1, -9, SIGINT, repeated=True),
         ("stopped by a second Ctrl-C or signal without saving", 6, None)),
        (None, AgentEnd(1, -9, SIGINT), ("stopped by SIGINT before the first step", 75, None)),
        (None, AgentEnd(1, -15, SIGTERM), ("stopped by SIGTERM before the first step", 75, None)),
        (RUNNING, AgentEnd(1, -9), ("the agent was killed by SIGKILL", 6, None)),
        (None, AgentEnd(1, 1), ("the agent failed, and torchrun.log says why", 1, None)),
    ],
)  # fmt: skip
def test_outcome(status, end, outcome):
    assert find_outcome(status, end) == outcome


# ----- report_end -----


def begun(path: Path) -> RunFolder:
    """The folder of a run whose agent is this process's parent, and that has a checkpoint."""
    folder = RunFolder(path)
    folder.lock()
    folder.begin(resumes=False, config="")
    folder.update(step=7, last_checkpoint="a/step-00000005")
    folder.close()
    return folder


def status_on_file(path: Path) -> dict[str, Any]:
    return json.loads((path / "status.json").read_text())


def report(path: Path, end: AgentEnd, *, since: float = 0.0) -> int:
    return report_end(asked(), end, path=path, log_dir=path / "logs", since=since)


def test_a_killed_rank_is_reported_and_ends_the_status(tmp_path, capfd):
    begun(tmp_path)
    told = {"cause": KILLED.cause, "cause_code": 6, "rank": 9}
    assert report(tmp_path, AgentEnd(os.getppid(), 1, **told)) == 6
    assert capfd.readouterr().err.splitlines() == [
        f"exit code 6: {KILLED.cause}",
        "rank: 9",
        "step: 7",
        "last checkpoint: a/step-00000005",
        f"run folder: {tmp_path}",
        f"logs: {tmp_path}/logs",
    ]
    status = status_on_file(tmp_path)
    keys = ("state", "cause", "exit_code", "step", "rank")
    assert [status[key] for key in keys] == ["failed", KILLED.cause, 6, 7, 9]


def test_a_run_that_is_done_stays_so_whatever_happens_to_its_agent(tmp_path, capfd):
    begun(tmp_path).update(step=7, state="done", exit_code=0)
    before = status_on_file(tmp_path)
    assert report(tmp_path, AgentEnd(os.getppid(), 1, SIGTERM)) == 0
    assert capfd.readouterr().err == ""
    assert status_on_file(tmp_path) == before


def test_an_earlier_status_stays_where_no_worker_began(tmp_path, capfd):
    begun(tmp_path)
    before = status_on_file(tmp_path)
    assert report(tmp_path, AgentEnd(os.getppid(), 1), since=before["started"] + 1) == 1
    assert capfd.readouterr().err.startswith("exit code 1: the agent failed, and torchrun.log says")
    assert status_on_file(tmp_path) == before

    # A disk that is gone.
    assert report(tmp_path / "gone", AgentEnd(1, 1)) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[1:] == [f"run folder: {tmp_path}/gone", f"logs: {tmp_path}/gone/logs"]


# ----- wait_for_end, make_log_folder -----


def test_the_end_of_a_run_is_not_another_ones(tmp_path):
    own = job_name(os.getppid())
    assert wait_for_end(tmp_path / "gone", since=0, job=own) is None
    begun(tmp_path).update(step=7, state="done", exit_code=0)
    started = status_on_file(tmp_path)["started"]
    assert wait_for_end(tmp_path, since=0, job=own).step == 7
    assert wait_for_end(tmp_path, since=0, job=None).step == 7  # of rank 0's node
    assert wait_for_end(tmp_path, since=started + 1, job=own) is None
    assert wait_for_end(tmp_path, since=0, job=job_name(7)) is None


def test_the_end_is_awaited_of_workers_that_outlive_their_agent(tmp_path):
    folder = begun(tmp_path)
    folder.lock()

    def end() -> None:
        folder.fail(RankLostError("the agent is gone"), step=0)
        folder.close()

    threading.Timer(0.5, end).start()
    ended = wait_for_end(tmp_path, since=0, job=job_name(os.getppid()))
    assert ended.cause == "the agent is gone"


def test_make_log_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(launch.time, "time", lambda: 1e9)
    first, *others = (make_log_folder(tmp_path / "run") for _ in range(3))
    assert [each.name for each in others] == [f"{first.name}.2", f"{first.name}.3"]
    assert all(each.is_dir() for each in (first, *others))
    with pytest.raises(ConfigError, match='dump_folder = "/dev/null" cannot be written: .*Not a'):
        make_log_folder(Path("/dev/null"))
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Path, "mkdir", Mock(side_effect=full))
    with pytest.raises(StorageError, match="cannot be written: .*No space left on device"):
        make_log_folder(tmp_path)


# ----- run_agent, main -----

SUPERVISED = """
import signal, sys
from torchtitan_lite.base.terminal import run_script
from torchtitan_lite.run import launch, signals
launch.start_agent = lambda task: exec(sys.argv[1], {"__name__": "agent", "task": task})
signals.REPEAT_SECONDS[signal.SIGTERM] = 1000.0
run_script(lambda argv: launch.main(sys.argv[2:]))
"""
STANDIN = """
import json, os, signal, socket, subprocess, sys, time

def end(state, exit_code, cause):
    status = {"state": state, "started": time.time(), "time": 0, "cause": cause}
    job = f"process {os.getpid()} on {socket.gethostname()}"
    with open(os.environ["RUN"] + "/status.json", "w") as file:
        json.dump(status | {"exit_code": exit_code, "job": job}, file)
    os._exit(1)

def say(line):
    os.write(1, line.encode() + b"\\n")  # a handler may not print while the main thread does

def serve(on_signal):
    for number in (1, 2, 3, 10, 12, 15):
        signal.signal(number, lambda number, frame: on_signal(signal.Signals(number).name))
    say("ready")
    while True:
        time.sleep(0.05)
"""
SAVES = "serve(lambda by: (say('saved'), end('stopped', 75, f'stopped by {by}')))"
STUBBORN = """
worker = subprocess.Popen(["sleep", "1000"], start_new_session=True)
with open(os.environ["RUN"] + "/worker", "w") as file:
    file.write(str(worker.pid))
serve(lambda by: say("stopping"))
"""


class Supervised:
    """Runs of the launcher whose agent is Python code after STANDIN."""

    def __init__(self, path: Path) -> None:
        self.folder = path / "a run"

    def start(self, agent: str, *overrides: str, ignore: int = 0) -> subprocess.Popen[str]:
        def set_signals() -> None:  # what runs in the background is started to ignore SIGINT
            for number in (SIGINT, SIGTERM, SIGHUP, SIGQUIT):
                signal.signal(number, signal.SIG_IGN if number == ignore else signal.SIG_DFL)

        words = [f"--job.dump_folder={self.folder}", *overrides]
        return subprocess.Popen(
            [sys.executable, "-c", SUPERVISED, STANDIN + agent, *words],
            env=os.environ | {"RUN": str(self.folder), "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=set_signals,
        )

    def signal(self, agent: str, sent: int) -> Any:
        """Start a run, and send it a signal once its agent has said that it is ready."""
        process = self.start(agent)
        assert process.stdout.readline() == "ready\n"
        process.send_signal(sent)
        return process


@pytest.fixture
def supervised(tmp_path):
    return Supervised(tmp_path)


def test_config_errors_come_before_any_process_and_folder(supervised):
    words = ("--training.steps=-1", "--optimizer.lr", "-1e-3")
    process = supervised.start("print('started')", *words)
    stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (2, "")
    rule = r"\[optimizer\] lr = -0\.001 \(from the command line\).*\n\[training\] steps = -1 .*\n"
    assert re.fullmatch(rule, stderr)
    assert not supervised.folder.exists()


@pytest.mark.parametrize("sent", [SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2])
def test_a_signal_is_passed_on_once_and_the_end_awaited(supervised, sent):
    process = supervised.signal(SAVES, sent)
    stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (75, "saved\n")
    assert f"exit code 75: stopped by {sent.name}\n" in stderr


def test_a_cause_of_any_length_is_reported(supervised):
    agent = """
told = {"cause": "x" * 300_000 + " at the end", "cause_code": 5, "rank": 3}
os.write(task["failure"], json.dumps(told).encode())
os._exit(1)
"""
    process = supervised.start(agent)
    stderr = process.communicate(timeout=30)[1]
    assert process.returncode == 5
    assert re.search("exit code 5: x{300000} at the end\nrank: 3\n", stderr)


def test_a_signal_before_the_agent_can_act_on_it_ends_the_run(supervised):
    process = supervised.signal("say('ready'); time.sleep(1000)", SIGTERM)
    assert "exit code 75: stopped by SIGTERM before the first step" in process.communicate()[1]
    assert process.returncode == 75


def test_a_signal_that_is_ignored_at_the_start_stays_ignored(supervised):
    agent = "os.kill(os.getppid(), signal.SIGHUP); time.sleep(1); print('done')"
    process = supervised.start(agent, ignore=SIGHUP)
    assert process.communicate()[0] == "done\n"
    assert process.returncode == 0


def test_a_second_signal_kills_the_agent_and_its_workers_unless_it_repeats_the_first(supervised):
    process = supervised.signal(STUBBORN, SIGTERM)
    assert process.stdout.readline() == "stopping\n"
    process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(SIGINT)
    assert process.communicate()[0] == ""  # it was not passed on again
    assert process.returncode == 75  # no worker had opened the run folder
    worker = Path("/proc") / (supervised.folder / "worker").read_text()
    while worker.exists() and ") Z " not in (worker / "stat").read_text():
        time.sleep(0.01)


WITH_WORKER = """
import sys
from torchtitan_lite.base.terminal import run_script
from torchtitan_lite.run import launch

start_agent = launch.start_agent

def start_with_worker(task):
    from torchtitan_lite.run import agent
    agent.MODULE = "worker"
    start_agent(task)

launch.start_agent = start_with_worker
run_script(launch.main)
"""
WORKER = "import os, signal, socket, sys, time\n\ndef main():\n    {}\n"


def start_with_worker(folder: Path, lines: str, **env: str) -> subprocess.Popen[str]:
    """Start a run of one process that calls `lines` instead of training."""
    (folder / "worker.py").write_text(WORKER.format(lines.replace("\n", "\n    ")))
    return subprocess.Popen(
        [sys.executable, "-c", WITH_WORKER, f"--job.dump_folder={folder}/run"],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{folder}", "NGPU": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


SPEAKS = "print('heard', *sys.argv[1:3]); print('too', file=sys.stderr); "


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("end", "exit_code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 6),
        ("os._exit(0)", 0),
        ("sys.exit(3)", 3),
        ("1 / 0", 1),
    ],
)
def test_the_exit_code_is_the_failed_workers(end, exit_code, tmp_path):
    config_file = "debug_model"
    process = start_with_worker(tmp_path, SPEAKS + end, CONFIG_FILE=config_file)
    stdout, stderr = process.communicate()
    assert process.returncode == exit_code
    (log,) = tmp_path.glob("run/logs/*/torchrun.log")
    assert ("Traceback" in log.read_text()) == bool(exit_code)
    assert stdout == f"[rank0] heard --job.config_file {config_file}\n"
    killed = "rank 0 was killed by SIGKILL"
    cause = killed if exit_code == 6 else f"rank 0 ended with exit code {exit_code}"
    assert stderr.startswith("[rank0] too\n")
    assert (f"exit code {exit_code}: {cause}\nrank: 0\n" in stderr) == bool(exit_code)


WAITS = """\
print(os.environ["MASTER_ADDR"], os.environ["TORCHELASTIC_RUN_ID"])
time.sleep(50)"""


@pytest.mark.timeout(60)
def test_the_agent_listens_on_loopback_and_ends_with_a_launcher_that_is_killed(tmp_path):
    process = start_with_worker(tmp_path, WAITS)
    assert re.fullmatch(r"\[rank0\] 127\.0\.0\.1 [0-9a-f]{32}\n", process.stdout.readline())
    (agent,) = children(process.pid)
    (worker,) = children(agent)
    assert (listening(process.pid), listening(agent)) == ([], ["127.0.0.1"])
    links = [path.readlink() for path in Path(f"/proc/{worker}/fd").iterdir()]
    assert [str(link) for link in links if "socket" in str(link)] == []  # its agent's may end
    process.kill()
    assert process.stdout.read() == ""  # once the agent and its worker are gone
    process.communicate()


def children(process: int) -> list[int]:
    return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))


def listening(process: int) -> list[str]:
    """Return the addresses at which a process listens."""
    links = [str(path.readlink()) for path in Path(f"/proc/{process}/fd").iterdir()]
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in links:
                address = bytes.fromhex(local.partition(":")[0])[::-1]
                found.append(".".join(map(str, address)))
    return found
