"""The launcher; and the shell scripts, run with a stand-in for the environment's Python that writes
down how it is called."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from torchtitan_lite import launch
from torchtitan_lite.run_folder import FAILURE

ROOT = Path(__file__).parents[2]
CONFIG_ERROR = "[training] steps = -1 must be 1 or more"
PYTHON = f"""#!/bin/bash
echo "$*" >>"$CALLS"
case "$*" in
    "-m pip"*) echo "pip says no" >&2; exit ${{PIP_EXIT:-0}} ;;
    "-m torchtitan_lite.config --help") echo "the keys" ;;
    "-m torchtitan_lite.config"*"steps -1"*) echo "{CONFIG_ERROR}" >&2; exit 2 ;;
    "-m torchtitan_lite.config"*) echo "$RUN" ;;
    "-m torchtitan_lite.launch"*) eval "$TORCHRUN" ;;
    "-m torchtitan_lite.run_folder"* | -c*) PYTHONPATH={ROOT} exec {sys.executable} "$@" ;;
esac
"""


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def receive_signals() -> None:
    """A shell cannot trap what it was started to ignore, as what runs in the background is for
    SIGINT."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Project:
    """A copy of the scripts in a folder of their own, with an active environment whose Python is
    the stand-in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_folder = path / "a run"
        self.bin = path / "bin"  # first on PATH
        for name in ("run_train.sh", "pyproject.toml", "scripts/setup.sh", "scripts/test.sh"):
            (path / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, path / name)
        executable(path / "env/bin/python", PYTHON)
        executable(self.bin / "nvidia-smi", "#!/bin/sh\nexit 9")
        self.env = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(path / "env"),
            "CALLS": str(path / "calls"),
            "RUN": str(self.run_folder),
        }

    def start(self, script: str, *args: str, **env: str) -> subprocess.Popen:
        return subprocess.Popen(
            [self.path / script, *args],
            env=self.env | env,
            cwd=self.path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=receive_signals,
        )

    def run(self, script: str, *args: str, **env: str) -> subprocess.CompletedProcess:
        process = self.start(script, *args, **env)
        stdout, stderr = process.communicate()
        return subprocess.CompletedProcess(script, process.returncode, stdout, stderr)

    def calls(self, module: str) -> list[str]:
        """The arguments of each call of `python -m module` since the last look."""
        calls = Path(self.env["CALLS"]).read_text().splitlines()
        return [
            call.removeprefix(f"-m {module} ") for call in calls if call.startswith(f"-m {module}")
        ]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def write_status(state: str, exit_code: int, cause: str) -> str:
    """Shell code that writes the status.json of a run that started now."""
    return (
        f'printf \'{{"state": "{state}", "started": %s, "time": 0, "cause": "{cause}", "exit_code": {exit_code}}}\' '
        '"$(date +%s)" >"$RUN/status.json"; '
    )


def test_first_use_installs_torch_then_the_project_and_a_later_use_nothing(
    project: Project,
) -> None:
    install = "install --quiet --disable-pip-version-check"
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
        "setup: no Python 3.10 or newer found; install one, or activate an environment that has one.\n"
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
        "setup: /nowhere/bin/python is missing or older than Python 3.10; leave or change this environment.\n"
    )


def test_without_an_environment_one_is_made_in_the_project(project: Project) -> None:
    make = f'[ "$2" = venv ] && mkdir -p "$4/bin" && cp "{project.path}/env/bin/python" "$4/bin"; exit 0'
    result = without_environment(project, make)
    assert result.stdout == f"{project.path}/.venv/bin/python\n"
    assert (project.path / ".venv/torchtitan_lite.stamp").is_file()


def test_test_sh_checks_and_then_tests(project: Project) -> None:
    assert project.run("scripts/test.sh", "tests/unit", "-k", "config").returncode == 0
    calls = Path(project.env["CALLS"]).read_text().splitlines()
    assert calls[-4:] == [
        "-m ruff check",
        "-m ruff format --check",
        "-m mypy",
        "-m pytest tests/unit -k config",
    ]


def test_test_sh_alone_tests_everything(project: Project) -> None:
    assert project.run("scripts/test.sh").returncode == 0
    calls = Path(project.env["CALLS"]).read_text().splitlines()
    timed = "tests/distributed/test_faults_ranks.py"
    assert calls[-3:] == [
        "-m pytest tests/unit --numprocesses 2",
        f"-m pytest tests/distributed --ignore {timed} --numprocesses 2 --dist loadfile",
        f"-m pytest {timed} tests/gpu --numprocesses 2",
    ]


def test_help_names_the_environment_and_the_keys(project: Project) -> None:
    result = project.run("run_train.sh", "--training.steps", "3", "--help")
    assert result.returncode == 0
    assert all(name in result.stdout for name in ("NGPU", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"))
    assert result.stdout.endswith("the keys\n")
    assert not project.calls("torchtitan_lite.launch")


def test_a_config_error_ends_it_before_torchrun(project: Project) -> None:
    result = project.run("run_train.sh", "--training.steps", "-1")
    assert result.returncode == 2
    assert result.stderr.endswith(f"{CONFIG_ERROR}\n")
    assert not project.calls("torchtitan_lite.launch")
    assert not project.run_folder.exists()


def test_defaults(project: Project) -> None:
    show = 'echo "$LOG_RANK $PYTHONUNBUFFERED $OMP_NUM_THREADS ${FORCE_COLOR-none}"'
    result = project.run("run_train.sh", "--training.steps=5", TORCHRUN=show, OMP_NUM_THREADS="3")
    assert (result.returncode, result.stdout) == (0, "0 1 3 none\n")
    overrides = (
        f"--job.config_file {project.path}/train_configs/debug_model.toml --training.steps=5"
    )
    assert project.calls("torchtitan_lite.config") == [
        f"--world-size 2 --get job.dump_folder {overrides}"
    ]
    (call,) = project.calls("torchtitan_lite.launch")
    (log_dir,) = (project.run_folder / "logs").iterdir()
    assert call == (
        f"--standalone --nproc-per-node 2 --max-restarts 0 --log-dir {log_dir} --tee 3 "
        f"-m torchtitan_lite.train {overrides}"
    )


def test_several_nodes(project: Project) -> None:
    nodes = {
        "NNODES": "2",
        "NGPU": "8",
        "NODE_RANK": "1",
        "RDZV_ENDPOINT": "head:29500",
        "CONFIG_FILE": "my.toml",
    }
    assert project.run("run_train.sh", **nodes).returncode == 0
    assert project.calls("torchtitan_lite.config") == [
        "--world-size 16 --get job.dump_folder --job.config_file my.toml"
    ]
    (call,) = project.calls("torchtitan_lite.launch")
    assert call.startswith(
        "--nnodes 2 --node-rank 1 --rdzv-backend static --rdzv-endpoint head:29500 --nproc-per-node 8 "
    )


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"NGPU": "two"}, "NGPU=two is not a whole number of 1 or more."),
        ({"NGPU": "0"}, "NGPU=0 is not a whole number of 1 or more."),
        ({"MAX_RESTARTS": "-1"}, "MAX_RESTARTS=-1 is not a whole number of 0 or more."),
        ({"NNODES": "1.5"}, "NNODES=1.5 is not a whole number of 1 or more."),
        ({"NNODES": "2"}, "NODE_RANK= is not a whole number of 0 or more."),
        (
            {"NNODES": "2", "NODE_RANK": "2"},
            "NODE_RANK=2 must be below NNODES=2; nodes count from 0.",
        ),
        ({"NNODES": "2", "NODE_RANK": "0"}, "RDZV_ENDPOINT= must be host:port of node 0."),
        (
            {"RUN": "/dev/null"},
            "[job] dump_folder = \"/dev/null\" cannot be written: mkdir: cannot create directory '/dev/null': Not a "
            "directory; name a folder that can.",
        ),
    ],
)
def test_a_bad_environment_variable_is_one_clear_line(
    project: Project, env: Mapping[str, str], message: str
) -> None:
    result = project.run("run_train.sh", **env)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == f"run_train.sh: {message}"
    assert not project.calls("torchtitan_lite.launch")


def test_a_full_disk_is_a_failure_of_storage(project: Project) -> None:
    executable(
        project.bin / "mkdir", "#!/bin/sh\necho \"mkdir: 'x': No space left on device\" >&2\nexit 1"
    )
    result = project.run("run_train.sh")
    assert (result.returncode, result.stderr.splitlines()[-1]) == (
        7,
        f'run_train.sh: [job] dump_folder = "{project.run_folder}" cannot be written: '
        "mkdir: 'x': No space left on device; name a folder that can.",
    )


@pytest.mark.parametrize(
    ("env", "ngpu"),
    [
        ({}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,2,3"}, 3),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1f"}, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, 2),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 2),
        ({"NGPU": "5", "CUDA_VISIBLE_DEVICES": "0,2,3"}, 5),
    ],
)
def test_number_of_processes(project: Project, env: Mapping[str, str], ngpu: int) -> None:
    project.run("run_train.sh", **env)
    assert project.calls("torchtitan_lite.config")[0].startswith(f"--world-size {ngpu} ")


@pytest.mark.parametrize(
    ("env", "policy"),
    [
        ({}, "PASSIVE"),
        ({"NGPU": "1"}, "PASSIVE"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "PASSIVE"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "unset"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
        ({"OMP_WAIT_POLICY": ""}, ""),
    ],
)
def test_threads_sleep_while_they_wait_on_cpu_unless_the_user_decides(
    project: Project, env: Mapping[str, str], policy: str
) -> None:
    result = project.run("run_train.sh", TORCHRUN='echo "${OMP_WAIT_POLICY-unset}"', **env)
    assert (result.returncode, result.stdout) == (0, f"{policy}\n")


def test_number_of_processes_is_the_number_of_gpus(project: Project) -> None:
    executable(
        project.bin / "nvidia-smi", "#!/bin/sh\nprintf 'GPU 0: H100\\nGPU 1: H100\\nGPU 2: H100\\n'"
    )
    project.run("run_train.sh")
    assert project.calls("torchtitan_lite.config")[0].startswith("--world-size 3 ")


def test_workers_are_heard_and_torchruns_report_is_kept(project: Project) -> None:
    torchrun = "echo '[rank0] step 1'; echo '[rank1] a warning' >&2; echo 'Traceback (most recent call last):' >&2; "
    torchrun += write_status("failed", 3, "no text") + "exit 1"
    result = project.run("run_train.sh", "two words", TORCHRUN=torchrun)
    (log_dir,) = (project.run_folder / "logs").iterdir()
    assert result.returncode == 3
    assert result.stdout == "[rank0] step 1\n"
    assert result.stderr.endswith(
        f"[rank1] a warning\nexit code 3: no text\nstep: 0\nlast checkpoint: none\nrun folder: {project.run_folder}\n"
        f"logs: {log_dir}\nnext: mend the data; this starts anew: "
        f"CONFIG_FILE={project.path}/train_configs/debug_model.toml NGPU=2 {project.path}/run_train.sh two\\ words\n"
    )
    assert "Traceback" not in result.stderr
    assert "Traceback" in (log_dir / "torchrun.log").read_text()


def test_torchruns_report_is_shown_when_no_worker_tells_the_cause(project: Project) -> None:
    result = project.run("run_train.sh", TORCHRUN="echo 'No module named torch' >&2; exit 1")
    assert result.returncode == 1
    assert "No module named torch\nexit code 1: torchrun failed\n" in result.stderr


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_passed_on_and_the_end_awaited(project: Project, sent: signal.Signals) -> None:
    end = "end() { " + write_status("stopped", 75, "SIGTERM") + "echo saved; exit 1; }; "
    torchrun = end + "trap end TERM; echo ready; while :; do sleep 0.05; done"
    process = project.start("run_train.sh", TORCHRUN=torchrun)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(sent)
    stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (75, "saved\n")
    assert "exit code 75: SIGTERM\n" in stderr


def test_a_second_sigint_kills_the_workers_and_a_sigterm_that_comes_again_at_once_does_not(
    project: Project,
) -> None:
    torchrun = "trap 'echo stopping' TERM; sleep 1000 & echo ready; while jobs %1 >/dev/null; do wait %1; done; exit 1"
    process = project.start("run_train.sh", TORCHRUN=torchrun)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.stdout.readline() == "stopping\n"
    process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 75  # nothing had opened the run folder


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("worker", "exit_code"), [("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", 6), ("0", 0)]
)
def test_the_launchers_exit_code_is_the_failed_workers(worker: str, exit_code: int) -> None:
    words = [
        "--standalone",
        "--nproc-per-node",
        "1",
        "--no-python",
        sys.executable,
        "-c",
        f"import os; {worker}",
    ]
    command = [sys.executable, "-m", "torchtitan_lite.launch", *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert result.returncode == exit_code
    assert bool(FAILURE.search(result.stderr)) == (exit_code != 0)
    assert "Traceback" not in result.stderr


class OldContext:
    """Workers as torch 2.11 closes them."""

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> int:
        return timeout


def test_a_stopped_run_may_save_for_as_long_as_told_also_on_torch_2_11(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OldConfig:
        __dataclass_fields__: Mapping[str, object] = {}

    monkeypatch.setattr(launch, "PContext", OldContext)
    launch.allow_long_saves()
    assert "torch>=2.11," in (ROOT / "pyproject.toml").read_text(), (
        "remove allow_long_saves when torch 2.11 goes"
    )
    monkeypatch.setattr(launch, "LaunchConfig", OldConfig)
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    launch.allow_long_saves()
    assert (OldContext().close(), os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == (600, "600")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "45")
    launch.allow_long_saves()
    assert OldContext().close() == 45
