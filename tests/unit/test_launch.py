"""The launcher, with a stand-in for the agent; and the shell scripts, with a stand-in for the
environment's Python that writes down how it is called."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from torchtitan_lite import launch
from torchtitan_lite.errors import ConfigError, RunError
from torchtitan_lite.launch import (
    NEXT,
    AgentEnd,
    Launch,
    check_compiler_cache,
    find_outcome,
    report_end,
)
from torchtitan_lite.run_folder import RunFolder, Status

ROOT = Path(__file__).parents[2]
PYTHON = f"""#!/bin/bash
echo "$*" >>"$CALLS"
case "$*" in
    "-m pip"*) echo "pip says no" >&2; exit ${{PIP_EXIT:-0}} ;;
    "-m torchtitan_lite train"*) echo "$LAUNCHED_AS"; exit 5 ;;
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
        self.bin = path / "bin"  # first on PATH
        for name in ("run_train.sh", "pyproject.toml", "scripts/setup.sh", "scripts/test.sh"):
            (path / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, path / name)
        executable(path / "env/bin/python", PYTHON)
        self.env = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(path / "env"),
            "CALLS": str(path / "calls"),
        }

    def run(self, script: str, *args: str, **env: str) -> subprocess.CompletedProcess:
        command = [self.path / script, *args]
        return subprocess.run(
            command, env=self.env | env, cwd=self.path, capture_output=True, text=True
        )

    def calls(self, module: str) -> list[str]:
        """The arguments of each call of `python -m module` since the last look."""
        calls = Path(self.env["CALLS"]).read_text().splitlines()
        return [
            call.removeprefix(f"-m {module} ") for call in calls if call.startswith(f"-m {module}")
        ]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_first_use_installs_torch_then_the_project_and_a_later_use_nothing(
    project: Project,
) -> None:
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


def test_the_dev_extra_is_installed_once_and_covers_plain_use(project: Project) -> None:
    assert project.run("scripts/setup.sh", "dev").returncode == 0
    assert project.calls("pip")[-1].endswith(f"--editable {project.path}[dev]")
    installs = len(project.calls("pip"))
    project.run("scripts/setup.sh", "dev")
    project.run("scripts/setup.sh")
    assert len(project.calls("pip")) == installs


def test_a_failed_install_is_explained_and_tried_again(project: Project) -> None:
    for _ in range(2):
        failed = project.run("run_train.sh", PIP_EXIT="1")
        assert failed.returncode == 1
        assert "pip says no" in failed.stderr
        assert (
            "could not install torch>=2.11,<2.14: see pip's message above. No network"
            in failed.stderr
        )
    assert project.run("scripts/setup.sh").returncode == 0


def without_environment(project: Project, python3: str) -> subprocess.CompletedProcess:
    """setup.sh without an active environment, where each Python on PATH is the shell code
    `python3`."""
    for name in ("python3", "python3.13", "python3.12", "python3.11", "python3.10"):
        executable(project.bin / name, f"#!/bin/sh\n{python3}")
    return project.run("scripts/setup.sh", VIRTUAL_ENV="")


def test_no_recent_python_is_one_clear_line(project: Project) -> None:
    result = without_environment(project, "exit 1")
    assert result.returncode == 1
    assert result.stderr == (
        "setup: no Python 3.10 or newer found; install one, or activate an environment that has "
        "one.\n"
    )


def test_no_venv_module_is_one_clear_line(project: Project) -> None:
    result = without_environment(project, 'case "$2" in *venv*) exit 1 ;; esac')
    assert result.returncode == 1
    assert result.stderr == (
        "setup: python3 has no venv module; install it (Debian: apt-get install python3-venv) "
        "or activate an environment.\n"
    )


def test_an_environment_without_python_is_one_clear_line(project: Project) -> None:
    result = project.run("scripts/setup.sh", VIRTUAL_ENV="/nowhere")
    assert result.returncode == 1
    assert result.stderr == (
        "setup: /nowhere/bin/python is missing or older than Python 3.10; leave or change this "
        "environment.\n"
    )


def test_without_an_environment_one_is_made_in_the_project(project: Project) -> None:
    make = f'mkdir -p "$4/bin" && cp "{project.path}/env/bin/python" "$4/bin"'
    make = f'[ "$2" = venv ] && {make}; exit 0'
    result = without_environment(project, make)
    assert result.stdout == f"{project.path}/.venv/bin/python\n"
    assert (project.path / ".venv/torchtitan_lite.stamp").is_file()


def test_test_sh_with_arguments_goes_straight_to_pytest(project: Project) -> None:
    assert project.run("scripts/test.sh", "tests/unit", "-k", "config").returncode == 0
    calls = Path(project.env["CALLS"]).read_text().splitlines()
    modules = [call for call in calls if call.startswith("-m ")]
    assert modules[-1] == "-m pytest tests/unit -k config"
    assert not {"-m ruff check", "-m ruff format --check", "-m mypy"} & set(modules)


def test_test_sh_alone_checks_and_tests_everything(project: Project) -> None:
    assert project.run("scripts/test.sh").returncode == 0
    calls = Path(project.env["CALLS"]).read_text().splitlines()
    timed = "tests/distributed/test_faults_ranks.py"
    assert calls[-6:] == [
        "-m ruff check",
        "-m ruff format --check",
        "-m mypy",
        "-m pytest tests/unit --numprocesses 2",
        f"-m pytest tests/distributed --ignore {timed} --numprocesses 2 --dist loadfile",
        f"-m pytest {timed} tests/gpu --numprocesses 2",
    ]


def test_run_train_sets_up_and_hands_over_to_the_launcher(project: Project) -> None:
    result = project.run("run_train.sh", "--training.steps=5", "two words")
    assert (result.returncode, result.stdout) == (5, f"{project.path}/run_train.sh\n")
    assert project.calls("torchtitan_lite train") == ["--training.steps=5 two words"]


def test_run_train_works_through_a_link(project: Project, tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    link = tmp_path / "a folder" / "train"
    link.symlink_to(project.path / "run_train.sh")
    result = subprocess.run([link], env=project.env, cwd="/", capture_output=True, text=True)
    assert (result.returncode, shlex.split(result.stdout)) == (5, [str(link)])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["torchtitan_lite.launch", "--training.steps=-1"], "must be at least 1"),
        (["torchtitan_lite.agent"], "IndexError"),
        (["torchtitan_lite.train", "--training.steps=-1"], "no config file"),
    ],
)
def test_files_in_the_working_directory_are_not_imported(
    words: list[str], told: str, tmp_path: Path
) -> None:
    for name in ("random.py", "numpy/__init__.py", "json.py", "torch.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('a file of the user')")
    command = [sys.executable, "-m", *words]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    env |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert told in result.stdout + result.stderr


def asked(*overrides: str, **env: str) -> Launch:
    """The launch that some variables describe, on a machine without GPUs unless they name some."""
    return Launch({"CUDA_VISIBLE_DEVICES": "", **env}, overrides, columns=120)


NODES = {"NNODES": "2", "NGPU": "8", "NODE_RANK": "1", "RDZV_ENDPOINT": "head:29500"}


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"NGPU": "two"}, "NGPU=two is not a whole number of 1 or more"),
        ({"NGPU": "0"}, "NGPU=0 is not a whole number of 1 or more"),
        ({"MAX_RESTARTS": "-1"}, "MAX_RESTARTS=-1 is not a whole number of 0 or more"),
        ({"NNODES": "1.5"}, "NNODES=1.5 is not a whole number of 1 or more"),
        ({"NNODES": "2"}, "NODE_RANK= is not a whole number of 0 or more"),
        (NODES | {"NODE_RANK": "2"}, "NODE_RANK=2 must be below NNODES=2; nodes count from 0"),
        ({"NGPU": "9" * 5000}, "is not a whole number of 1 or more"),
        *(
            (NODES | {"RDZV_ENDPOINT": endpoint}, f"RDZV_ENDPOINT={endpoint} must be host:port of")
            for endpoint in (
                "head",
                "head:",
                "head:x",
                ":29500",
                "a b:1",
                "http://head:1",
                "head:65536",
            )
        ),
        *(
            (
                {"LOG_RANK": ranks},
                rf"LOG_RANK={ranks} must be comma-separated ranks of 0 to NGPU - 1 = 1",
            )
            for ranks in ("abc", "99", "-1", "0,2", "0,", "0;1", "00")
        ),
        (
            {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"},
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=x is not a whole",
        ),
    ],
)
def test_a_bad_variable_is_named(env: Mapping[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        asked(**env)


@pytest.mark.parametrize(
    ("env", "ngpu"),
    [
        ({}, 2),
        ({"NGPU": ""}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,2,3"}, 3),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1f"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 2),
        ({"NGPU": "5", "CUDA_VISIBLE_DEVICES": "0,2,3"}, 5),
    ],
)
def test_number_of_processes(env: Mapping[str, str], ngpu: int) -> None:
    assert asked(**env).ngpu == ngpu


@pytest.mark.parametrize(
    ("nvidia_smi", "ngpu"), [("printf 'GPU 0: H100\nGPU 1: H100\nGPU 2: H100\n'", 3), ("exit 9", 2)]
)
def test_number_of_processes_is_the_number_of_gpus(
    nvidia_smi: str, ngpu: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable(tmp_path / "nvidia-smi", f"#!/bin/sh\n{nvidia_smi}")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert Launch({}, [], columns=0).ngpu == ngpu
    monkeypatch.setenv("PATH", "")
    assert Launch({}, [], columns=0).ngpu == 2


@pytest.mark.parametrize(
    ("env", "policy"),
    [
        ({}, "PASSIVE"),
        ({"NGPU": "1"}, "PASSIVE"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, None),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
        ({"OMP_WAIT_POLICY": ""}, ""),
    ],
)
def test_threads_sleep_while_they_wait_on_cpu_unless_the_user_decides(
    env: Mapping[str, str], policy: str | None
) -> None:
    assert asked(**env).worker_env.get("OMP_WAIT_POLICY") == policy


def test_what_workers_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(7))
    assert asked().worker_env == {
        "LOG_RANK": "0",
        "OMP_NUM_THREADS": "3",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
        "PYTHONUNBUFFERED": "1",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}] ",
        "COLUMNS": "120",
        "FORCE_COLOR": "1",
    }
    assert asked(LOG_RANK="0, 1").worker_env["LOG_RANK"] == "0,1"
    chosen = {"LOG_RANK": "1", "OMP_NUM_THREADS": "9", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "45"}
    assert asked(**chosen, NGPU="8").worker_env.items() >= chosen.items()
    assert asked(NGPU="8").worker_env["OMP_NUM_THREADS"] == "1"
    assert {"FORCE_COLOR", "COLUMNS"}.isdisjoint(Launch({}, [], columns=0).worker_env)


def test_one_node_and_several() -> None:
    assert asked(MAX_RESTARTS="3").elastic == {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": 2,
        "max_restarts": 3,
        "run_id": "none",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "rdzv_configs": {"rank": 0},
        "log_line_prefix_template": "[rank${rank}] ",
    }
    assert asked(**NODES).elastic == {
        "min_nodes": 2,
        "max_nodes": 2,
        "nproc_per_node": 8,
        "max_restarts": 0,
        "run_id": "none",
        "rdzv_backend": "static",
        "rdzv_endpoint": "head:29500",
        "rdzv_configs": {"rank": 1},
        "log_line_prefix_template": "[rank${rank}] ",
    }


@pytest.mark.parametrize("step", [["--checkpoint.load_step", "3"], ["--checkpoint.load-step=3"]])
def test_the_command_to_go_on_leaves_load_step_out(step: Sequence[str]) -> None:
    run = asked("two words", *step, "--x=1", LAUNCHED_AS="'/a b/run_train.sh'", CONFIG_FILE="m y")
    assert run.command() == "CONFIG_FILE='m y' NGPU=2 '/a b/run_train.sh' 'two words' --x=1"
    node = asked(**NODES, CONFIG_FILE="x").command()
    assert node == (
        "NNODES=2 NODE_RANK=1 RDZV_ENDPOINT=head:29500 CONFIG_FILE=x NGPU=8 "
        "python -m torchtitan_lite.launch"
    )


LOST = Status("failed", 0, 0, cause="rank 9 hangs", exit_code=6)
RUNNING = Status("running", 0, 0)
STOPPED = Status("stopped", 0, 0, step=4, exit_code=75)
DEAD = AgentEnd(1, 1, rank=9, rank_code=-9)


@pytest.mark.parametrize(
    ("status", "end", "outcome"),
    [
        (replace(LOST, cause="bad text", exit_code=3), replace(DEAD, rank_code=2), ("bad text", 3)),
        (replace(STOPPED, cause="SIGTERM"), AgentEnd(1, 1), ("SIGTERM", 75)),
        (
            replace(STOPPED, cause="stopped by SIGTERM after step 4"),
            AgentEnd(1, 1, signal.SIGINT),
            ("stopped by Ctrl-C after step 4", 75),
        ),
        (  # the signal came while the run saved
            replace(STOPPED, cause="stopped by the time limit after step 4"),
            AgentEnd(1, 1, signal.SIGTERM),
            ("stopped by the time limit after step 4", 75),
        ),
        (Status("done", 0, 0, exit_code=0), AgentEnd(1, 1, signal.SIGINT), ("done", 0)),
        (RUNNING, DEAD, ("rank 9 was killed by SIGKILL", 6, 9)),
        (replace(LOST, exit_code=1), DEAD, ("rank 9 was killed by SIGKILL", 6, 9)),
        (RUNNING, replace(DEAD, rank_code=-11), ("rank 9 was killed by SIGSEGV", 6, 9)),
        (LOST, DEAD, ("rank 9 hangs (rank 9 was killed by SIGKILL)", 6, 9)),
        (replace(LOST, rank=4), DEAD, ("rank 9 hangs (rank 9 was killed by SIGKILL)", 6, 4)),
        (
            RUNNING,
            AgentEnd(1, 1, signal.SIGINT),
            ("killed before it could stop at a step's end", 6),
        ),
        (RUNNING, AgentEnd(1, -9), ("the agent was killed by SIGKILL", 6)),
        (LOST, AgentEnd(1, -9), ("rank 9 hangs", 6)),
        (RUNNING, replace(DEAD, rank_code=7), ("rank 9 ended with exit code 7", 7, 9)),
        (None, replace(DEAD, rank_code=7), ("rank 9 ended with exit code 7", 7, 9)),
        (None, AgentEnd(1, -15, signal.SIGTERM), ("stopped by SIGTERM before the first step", 75)),
        (None, AgentEnd(1, 1), ("the agent failed", 1)),
    ],
)  # fmt: skip
def test_outcome(status: Status | None, end: AgentEnd, outcome: tuple) -> None:
    assert find_outcome(status, end) == (*outcome, None)[:3]


def report(path: Path, end: AgentEnd, *, log: str = "", since: float = 0.0, **env: str) -> int:
    """The exit code of a run in `path` whose agent has ended, and has left `log`."""
    path.mkdir(exist_ok=True)
    (path / "torchrun.log").write_text(log)
    run = asked(**env, LAUNCHED_AS="./again", CONFIG_FILE="x")
    return report_end(run, end, path=path, log_dir=path, since=since)


def begun(path: Path) -> RunFolder:
    """The folder of a run whose agent is this process's parent, and that has a checkpoint."""
    folder = RunFolder(path)
    folder.lock()
    folder.begin(resumed_config=None, entries=())
    folder.update(step=7, last_checkpoint="a/step-00000005")
    return folder


def status_on_file(path: Path) -> dict:
    return json.loads((path / "status.json").read_text())


def test_a_killed_rank_is_reported_and_ends_the_status(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = begun(tmp_path)
    folder.fail(RunError("connection reset"), step=0)
    folder.close()
    for attempt in (2, 10):
        (tmp_path / f"none_x/attempt_{attempt}/1").mkdir(parents=True)
    assert report(tmp_path, replace(DEAD, pid=os.getppid()), **NODES) == 6
    assert capfd.readouterr().err == (
        "exit code 6: rank 9 was killed by SIGKILL\nrank: 9\nstep: 7\n"
        f"last checkpoint: a/step-00000005\nrun folder: {tmp_path}\n"
        f"logs: {tmp_path}/none_x/attempt_10/1/{{stdout,stderr}}.log\n"
        "next: look at the logs and at the host of that rank; this continues from the last "
        "checkpoint: NNODES=2 NODE_RANK=1 RDZV_ENDPOINT=head:29500 CONFIG_FILE=x NGPU=8 ./again\n"
    )
    assert (
        status_on_file(tmp_path).items()
        >= {
            "state": "failed",
            "cause": "rank 9 was killed by SIGKILL",
            "exit_code": 6,
            "step": 7,
            "rank": 9,
        }.items()
    )


def test_a_run_that_is_done_stays_so_whatever_happens_to_its_agent(tmp_path: Path) -> None:
    begun(tmp_path).update(step=7, state="done", exit_code=0)
    before = status_on_file(tmp_path)
    assert report(tmp_path, AgentEnd(os.getppid(), 1, signal.SIGTERM)) == 0
    assert status_on_file(tmp_path) == before


def test_the_agents_report_is_shown_where_no_worker_began_and_an_earlier_status_stays(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    begun(tmp_path)
    before = status_on_file(tmp_path)
    end = AgentEnd(os.getppid(), 1)
    assert report(tmp_path, end, log="No module named torch\n", since=before["started"] + 1) == 1
    error = capfd.readouterr().err
    assert error.startswith("No module named torch\nexit code 1: the agent failed\nstep: 7")
    assert status_on_file(tmp_path) == before


def test_the_end_of_a_run_whose_disk_is_gone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    assert report_end(asked(), AgentEnd(1, 1), path=gone, log_dir=gone, since=0.0) == 1
    assert capfd.readouterr().err.startswith("exit code 1: the agent failed\n")


@pytest.mark.parametrize("exit_code", [1, 2, 3, 4, 5, 6, 7, 75])
def test_each_exit_code_has_its_advice(
    exit_code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert report(tmp_path, replace(DEAD, rank_code=exit_code)) == exit_code
    text = capfd.readouterr().err
    assert f"\nstep: 0\nlast checkpoint: none\nrun folder: {tmp_path}\n" in text
    assert f"next: {NEXT[exit_code].format(path=tmp_path)}; this starts from step 1: " in text


def test_the_printed_path_of_a_command_is_quoted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report(tmp_path / "a run", replace(DEAD, rank_code=4))
    assert f"torchtitan-lite checkpoint verify '{tmp_path}/a run'; this" in capfd.readouterr().err


SUPERVISED = """
import sys
from torchtitan_lite import launch
launch.AGENT = [sys.executable, "-c", sys.argv[1]]
launch.DUPLICATE_SECONDS = float(sys.argv[2])
launch.run_script(lambda argv: launch.main(sys.argv[3:]))
"""
STANDIN = """
import json, os, signal, subprocess, sys, time
spec = json.loads(sys.argv[1])

def end(state, exit_code, cause, worker=None):
    status = {"state": state, "started": time.time(), "time": 0, "cause": cause}
    with open(os.environ["RUN"] + "/status.json", "w") as file:
        json.dump(status | {"exit_code": exit_code}, file)
    if worker is not None:
        os.write(spec["failure"], json.dumps({"rank": 0, "rank_code": worker}).encode())
    os._exit(1)

def serve(on_signal):
    signal.signal(signal.SIGTERM, lambda number, frame: on_signal())
    print("ready", flush=True)
    while True:
        time.sleep(0.05)
"""


class Supervised:
    """Runs of the launcher whose agent is Python code after STANDIN."""

    def __init__(self, path: Path) -> None:
        self.folder = path / "a run"

    def start(
        self, agent: str, *overrides: str, duplicate_seconds: float = 1000.0, ignore: int = 0
    ) -> subprocess.Popen[str]:
        def set_signals() -> None:  # what runs in the background is started to ignore SIGINT
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN if number == ignore else signal.SIG_DFL)

        code = [SUPERVISED, STANDIN + agent, str(duplicate_seconds)]
        words = [f"--job.dump_folder={self.folder}", *overrides]
        return subprocess.Popen(
            [sys.executable, "-c", *code, *words],
            env=os.environ | {"RUN": str(self.folder), "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=set_signals,
        )

    def started(self, agent: str, **how: float) -> subprocess.Popen[str]:
        """A run whose agent has said that it is ready."""
        process = self.start(agent, **how)  # type: ignore[arg-type]
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def run(self, agent: str, *overrides: str) -> subprocess.CompletedProcess[str]:
        process = self.start(agent, *overrides)
        return subprocess.CompletedProcess("", process.wait(), *process.communicate())


@pytest.fixture
def supervised(tmp_path: Path) -> Supervised:
    return Supervised(tmp_path)


def test_workers_are_heard_and_the_agents_report_is_kept(supervised: Supervised) -> None:
    agent = """
print("[rank0] step 1")
os.write(spec["terminal"], b"[rank1] a warning\\n")
sys.stdout.flush()
print("Traceback (most recent call last):", file=sys.stderr, flush=True)
end("failed", 3, "no text", worker=3)
"""
    result = supervised.run(agent)
    (log_dir,) = (supervised.folder / "logs").iterdir()
    assert (result.returncode, result.stdout) == (3, "[rank0] step 1\n")
    assert result.stderr.startswith("[rank1] a warning\nexit code 3: no text\n")
    assert "Traceback" not in result.stderr
    assert "Traceback" in (log_dir / "torchrun.log").read_text()


def test_a_run_that_is_done_says_no_more(supervised: Supervised) -> None:
    result = supervised.run("print('[rank0] done')")
    assert (result.returncode, result.stdout, result.stderr) == (0, "[rank0] done\n", "")


def test_a_config_error_comes_before_any_process_and_folder(supervised: Supervised) -> None:
    result = supervised.run("print('started')", "--training.steps=-1", "--optimizer.lr", "-1e-3")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "[optimizer] lr = -0.001 (from the command line): must be above 0",
        "[training] steps = -1 (from the command line): must be at least 1",
    ]
    assert not supervised.folder.exists()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_passed_on_once_and_the_end_awaited(
    supervised: Supervised, sent: signal.Signals
) -> None:
    cause = "stopped by SIGTERM after step 0"
    agent = f"serve(lambda: (print('saved', flush=True), end('stopped', 75, '{cause}')))"
    process = supervised.started(agent)
    process.send_signal(sent)
    stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (75, "saved\n")
    name = "Ctrl-C" if sent == signal.SIGINT else sent.name
    cause = f"stopped by {name} after step 0"
    assert f"exit code 75: {cause}\n" in stderr
    left = status_on_file(supervised.folder)
    assert (left["state"], left["cause"]) == ("stopped", cause)


def test_a_signal_before_the_agent_can_act_on_it_ends_the_run(supervised: Supervised) -> None:
    process = supervised.started("print('ready', flush=True); time.sleep(1000)")
    process.terminate()
    _, stderr = process.communicate()
    assert process.returncode == 75
    assert "exit code 75: stopped by SIGTERM before the first step\n" in stderr


def test_a_signal_that_is_ignored_at_the_start_stays_ignored(supervised: Supervised) -> None:
    agent = "os.kill(os.getppid(), signal.SIGHUP); time.sleep(1); print('done')"
    process = supervised.start(agent, ignore=signal.SIGHUP)
    assert process.communicate()[0] == "done\n"
    assert process.returncode == 0


STUBBORN = """
worker = subprocess.Popen(["sleep", "1000"], start_new_session=True)
with open(os.environ["RUN"] + "/worker", "w") as file:
    file.write(str(worker.pid))
serve(lambda: print("stopping", flush=True))
"""


@pytest.mark.parametrize(
    ("second", "duplicate_seconds"), [(signal.SIGINT, 1000.0), (signal.SIGTERM, 0.0)]
)
def test_a_second_signal_kills_the_agent_and_its_workers(
    supervised: Supervised, second: signal.Signals, duplicate_seconds: float
) -> None:
    process = supervised.started(STUBBORN, duplicate_seconds=duplicate_seconds)
    process.terminate()
    assert process.stdout is not None
    assert process.stdout.readline() == "stopping\n"
    process.send_signal(second)
    process.communicate()
    assert process.returncode == 75  # no worker had opened the run folder
    worker = Path("/proc") / (supervised.folder / "worker").read_text()
    while worker.exists() and ") Z " not in (worker / "stat").read_text():
        time.sleep(0.01)


def test_a_sigterm_that_comes_again_at_once_repeats_the_request(supervised: Supervised) -> None:
    process = supervised.started(STUBBORN)
    process.terminate()
    assert process.stdout is not None
    assert process.stdout.readline() == "stopping\n"
    process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGINT)
    assert process.communicate()[0] == ""  # it was not passed on


def test_a_config_file_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "missing.toml", tmp_path / "pipe"):
        monkeypatch.setenv("CONFIG_FILE", str(path))
        with pytest.raises(ConfigError, match=f"^CONFIG_FILE={path} is not a file; name one"):
            launch.main([])
    monkeypatch.setenv("CONFIG_FILE", "llama3_8b_fp8")
    with pytest.raises(ConfigError, match='is not a file; did you mean "llama3_8b_float8"'):
        launch.main([])


def test_a_compilers_cache_that_it_cannot_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TORCHINDUCTOR_CACHE_DIR"
    check_compiler_cache({name: str(tmp_path / "new/cache")}, compiles=True)
    check_compiler_cache({name: str(tmp_path / "a cache")}, compiles=False)
    with pytest.raises(ConfigError, match=rf"{name}=.*/a cache has a space or a quote, with whic"):
        check_compiler_cache({name: str(tmp_path / "a cache")}, compiles=True)
    for path in ("/dev/null/cache", "/proc/cache"):
        with pytest.raises(ConfigError, match=rf"{name}={path}: cannot be written: .*; set it"):
            check_compiler_cache({name: path}, compiles=False)

    def no_folder() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", no_folder)
    with pytest.raises(ConfigError, match=f"{name}=None: cannot be written: .* No usable"):
        check_compiler_cache({}, compiles=False)


def test_the_launcher_needs_no_torch() -> None:
    code = "import sys, torchtitan_lite.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("worker", "exit_code"), [("exit 7", 7), ("kill -9 $$", 6), ("exit 0", 0)])
def test_the_exit_code_is_the_failed_workers(worker: str, exit_code: int, tmp_path: Path) -> None:
    executable(tmp_path / "worker", f"#!/bin/sh\necho heard $4 $5; echo too >&2; {worker}\n")
    config_file = launch.DEFAULT_CONFIG
    env = {"PYTHON_EXEC": str(tmp_path / "worker"), "NGPU": "1", "CONFIG_FILE": config_file}
    result = subprocess.run(
        [sys.executable, "-m", "torchtitan_lite.launch", f"--job.dump_folder={tmp_path}/run"],
        env=os.environ | env,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert result.returncode == exit_code
    assert result.stdout == f"[rank0] heard --job.config_file {config_file}\n"
    assert result.stderr.startswith("[rank0] too\n")
    assert "Traceback" not in result.stderr
    assert ("rank: 0\n" in result.stderr) == (exit_code != 0)
