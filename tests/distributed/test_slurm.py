"""scripts/train.slurm, with stand-ins for Slurm's commands that run all nodes on this machine."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from documented import make_copy
from launching import TINY, read_losses, train

pytestmark = pytest.mark.timeout(200)
# Each task has a line of output; the exit code is the highest of the tasks, as srun's.
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
    SLURM_NODEID=$node "$@" &
    tasks+=($!)
done
for task in "${tasks[@]}"; do
    wait "$task" || { ended=$?; ((ended > ${code:=0})) && code=$ended; }
done
exit "${code:-0}"
"""
SCONTROL = """#!/bin/bash
case "$1" in
    show) printf '%s\\n' localhost elsewhere ;;
    requeue) echo "requeued $2" && exit "${REFUSED:-0}" ;;
esac
"""
STOP = """
import os, signal, time

def stop(trainer, values):
    os.kill(os.getpid(), signal.SIGTERM)
    while not trainer.watchdog.stop_signal.received:
        time.sleep(0.01)
"""
PYTHON = """#!/bin/bash
echo "$NNODES $NODE_RANK $RDZV_ENDPOINT $NGPU $*"
exit $((NODE_RANK == 0 ? 1 : CODE))
"""


class Cluster:
    """A copy of the project, and a job of two nodes in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = make_copy(folder) | {
            "SLURM_JOB_ID": str(70_000 + os.getpid() % 10_000),
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_GPUS_ON_NODE": "1",
            "SECONDS": "60",  # since the job's start
        }
        self.write("env/bin/srun", SRUN)
        self.write("env/bin/scontrol", SCONTROL)

    def write(self, name: str, text: str) -> None:
        """Write a program into the copy."""
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def run(self, words: Sequence[str] = (), **env: str) -> subprocess.CompletedProcess[str]:
        """Run the script in the copy, as Slurm does: from a place of its own."""
        script = self.folder.with_suffix(".script")
        script.write_bytes((self.folder / "scripts/train.slurm").read_bytes())
        return subprocess.run(
            ["bash", script, *words], cwd=env.pop("cwd", self.folder), env=self.env | env,
            capture_output=True, text=True, timeout=150,
        )  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("cluster") / "project")


# ----- train.slurm -----


def test_two_nodes_train_one_run_and_a_stopped_one_is_requeued(
    cluster: Cluster, tmp_path: Path
) -> None:
    steps = "--training.steps=3"
    words = ["--job.config_file", str(TINY), "--job.dump_folder", str(tmp_path / "run"), steps]
    (tmp_path / "slurm_signal.py").write_text(STOP)
    stop = "--training.after_step=slurm_signal:stop"
    stopped = cluster.run([*words, stop], PYTHONPATH=str(tmp_path))
    assert stopped.returncode == 75, stopped.stderr
    assert stopped.stdout.endswith(f"requeued {cluster.env['SLURM_JOB_ID']}\n")
    assert "exit code 75: stopped by SIGTERM after step 1" in stopped.stderr

    done = cluster.run(words)
    assert done.returncode == 0, done.stderr
    assert "requeued" not in done.stdout
    train(tmp_path / "torchrun", steps, processes=2)
    assert read_losses(tmp_path / "run") == read_losses(tmp_path / "torchrun")
    assert list((tmp_path / "run/checkpoint").glob("step-*"))


@pytest.mark.parametrize(
    ("code", "seconds", "requeued"),
    [("75", "60", True), ("75", "0", False), ("6", "60", False), ("137", "60", False)],
)
def test_only_a_stopped_run_is_requeued_and_not_at_once(
    code: str, seconds: str, requeued: bool, cluster: Cluster, tmp_path: Path
) -> None:
    python = tmp_path / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    kept = (cluster.folder / "scripts/setup.sh").read_text()
    cluster.write("scripts/setup.sh", f"#!/bin/sh\necho {python}\n")
    try:
        ended = cluster.run(["--training.steps", "2"], CODE=code, SECONDS=seconds, REFUSED="1")
    finally:
        cluster.write("scripts/setup.sh", kept)
    assert ended.returncode == int(code)
    job = cluster.env["SLURM_JOB_ID"]
    endpoint = f"localhost:{20_000 + int(job) % 10_000}"
    words = "1 -m torchtitan_lite train --checkpoint.enable --training.steps 2"
    nodes = [f"2 {rank} {endpoint} {words}" for rank in (0, 1)]
    assert sorted(ended.stdout.splitlines()) == [*nodes, *[f"requeued {job}"] * requeued]


def test_a_job_that_was_not_submitted_in_the_project_names_the_folder(
    cluster: Cluster, tmp_path: Path
) -> None:
    ended = cluster.run(cwd=str(tmp_path))
    assert ended.returncode == 2
    assert f"{tmp_path} is not the project's folder: submit it from there" in ended.stderr
