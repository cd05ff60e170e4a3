"""Runs of run_train.sh in which signals come, ranks die, hang or fail, and numbers go wrong: how
they end, what they report, and what is kept."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from faults import Fault, checkpoints, records, status
from launching import ENV, FOLDER, ROOT

from torchtitan_lite.checkpoint.compare import compare
from torchtitan_lite.checkpoint.folders import committed_steps
from torchtitan_lite.checkpoint.reading import SafeReader, verify_checkpoint
from torchtitan_lite.run_folder import LOCK_SECONDS

pytestmark = [pytest.mark.timed, pytest.mark.timeout(150)]
STEPS = 12
SECONDS = 70  # for a run, which then fails the test
SETTINGS = [
    f"--training.steps={STEPS}",
    "--checkpoint.interval=3",
    "--validation.enable",
    "--validation.freq=4",
]
SETTINGS += ["--validation.steps=2"]
TELLS = re.compile(
    r"exit code (?P<exit_code>\d+): (?P<cause>.*)\n(rank: (?P<rank>\d+)\n)?step: (?P<step>\d+)\n"
    r"last checkpoint: (?P<last_checkpoint>.*)\nrun folder: (?P<run_folder>.*)\n"
    r"logs: (?P<logs>.*)\n"
    r"next: (?P<advice>.*); this (?P<effect>.*): (?P<command>.*)\n\Z"
)


@dataclass(frozen=True)
class Ended:
    """A run that has ended: its exit code, its output, and the values in its last lines."""

    exit_code: int
    output: str
    told: dict[str, str | None]


class Launcher:
    """Starts runs of faults.toml by run_train.sh, with fault_worker.py as the worker."""

    def __init__(self, folder: Path) -> None:
        """Write the training text, and an environment that needs no installation, into `folder`."""
        self.folder = folder
        self.text = folder / "text.txt"
        self.text.write_text(Path(json.__file__).with_name("decoder.py").read_text() * 4)
        self._executable("env/bin/python", f'exec {sys.executable} "$@"')
        stamp = f"{ROOT}\n{(ROOT / 'pyproject.toml').read_text()}"
        (folder / "env/torchtitan_lite.stamp").write_text(stamp)
        self.worker = self._executable(
            "worker", f'exec {sys.executable} {FOLDER}/fault_worker.py "$FAULTS" "${{@:4}}"'
        )
        self.env = ENV | {
            "VIRTUAL_ENV": str(folder / "env"),
            "XDG_CACHE_HOME": str(folder / "cache"),
        }

    def _executable(self, name: str, line: str) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{line}\n")
        path.chmod(0o755)
        return str(path)

    def start(
        self,
        command: Sequence[str | Path],
        *,
        faults: Sequence[Fault] = (),
        ranks: int = 2,
        restarts: int = 0,
        nodes: Mapping[str, str] = MappingProxyType({}),
    ) -> subprocess.Popen[str]:
        """Start `command`, a call of run_train.sh. `nodes` are its variables on one node of
        several."""
        env = {
            "PYTHON_EXEC": self.worker,
            "FAULTS": json.dumps(faults),
            "NGPU": str(ranks),
            **nodes,
        }
        env |= {"CONFIG_FILE": str(FOLDER / "faults.toml"), "MAX_RESTARTS": str(restarts)}
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def train(self, folder: Path, *overrides: str) -> list[str | Path]:
        """Return the call of run_train.sh for a run in `folder`."""
        data = f"--training.dataset_path={self.text}"
        return [ROOT / "run_train.sh", f"--job.dump_folder={folder}", data, *overrides]

    def run(self, folder: Path, *overrides: str, **how: Any) -> Ended:
        """Run in `folder` and wait for the end."""
        return ended(self.start(self.train(folder, *overrides), **how))


def ended(process: subprocess.Popen[str]) -> Ended:
    """Wait for the end of a run, and return how it ended."""
    output, _ = process.communicate(timeout=SECONDS)
    told = TELLS.search(output)
    return Ended(process.returncode, output, told.groupdict() if told else {})


def living(folder: Path) -> list[int]:
    """Return the processes of runs in `folder`, recognized by their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def none_lives(folder: Path, *, seconds: float = 20) -> bool:
    """Return whether all processes of runs in `folder` end within a time."""
    deadline = time.monotonic() + seconds
    while found := living(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return not found


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    return Launcher(tmp_path_factory.mktemp("launcher"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A run folder. Processes of its runs that outlive the test are killed."""
    yield tmp_path / "run"
    for process in living(tmp_path / "run"):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.fixture(scope="module")
def straight(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without faults."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    done = launcher.run(folder, *SETTINGS)
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def half_done(straight: Path, folder: Path) -> Path:
    """A folder of a run that continues after step 6."""
    shutil.copytree(straight / "checkpoint/step-00000006", folder / "checkpoint/step-00000006")
    shutil.copy(straight / "metrics.jsonl", folder)
    return folder


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder).values()]


def assert_same_run(folder: Path, straight: Path) -> None:
    """Assert that two finished runs agree in every bit."""
    assert status(folder)["state"] == "done"
    assert losses(folder) == losses(straight)
    last = f"checkpoint/step-{STEPS:08d}"
    comparison = compare(straight / last, folder / last)
    assert (comparison.progress, comparison.tensors, comparison.values) == ([], [], [])
    assert comparison.equal_tensors > 20


# ----- StopSignal, launch: signals -----


def test_a_signal_anywhere_stops_all_ranks_at_one_step_and_loses_nothing(
    launcher: Launcher, straight: Path, folder: Path
) -> None:
    def stopped(*faults: Fault, by: str) -> int:
        """Run with faults that stop it, and return the step after which it stopped."""
        run = launcher.run(folder, *SETTINGS, "--checkpoint.async_mode=async", faults=faults)
        assert run.exit_code == 75, run.output
        step = int(run.told["step"] or 0)
        assert run.told["cause"] == status(folder)["cause"] == f"stopped by {by} after step {step}"
        if step:
            saved = folder / f"checkpoint/step-{step:08d}"
            assert run.told["last_checkpoint"] == str(saved)
            assert verify_checkpoint(saved, hashes=True) == []
            assert list(records(folder)) == list(range(1, step + 1))
        return step

    term, interrupt = int(signal.SIGTERM), int(signal.SIGINT)
    # to run_train.sh, and so to torchrun, while the first forward pass takes long, as when it
    # compiles
    at_start = {"do": "send", "at": "forward 1", "rank": 0, "number": term, "to": "run_train.sh"}
    assert (
        stopped(at_start, {"do": "await_signal", "at": "forward 1", "rank": 0}, by="SIGTERM") == 1
    )
    # to one rank, between the two forward passes of a step
    between = {"do": "send", "at": "accumulation 2", "rank": 1, "number": term}
    assert stopped(between, by="SIGTERM") == 2
    assert (
        stopped({"do": "send", "at": "validation 4", "rank": 0, "number": interrupt}, by="SIGINT")
        == 4
    )
    saving = {"at": "written 6", "rank": 1}
    in_save = stopped(
        {"do": "send", "number": term, **saving},
        {"do": "sleep", "seconds": 2, **saving},
        by="SIGTERM",
    )
    assert 6 <= in_save < STEPS
    saves = [f"step-{step:08d}" for step in sorted({1, 2, 3, 4, 6, in_save})]
    assert checkpoints(folder) == saves

    at_start = {
        "do": "send",
        "at": f"forward {in_save + 1}",
        "rank": 0,
        "number": term,
        "to": "torchrun",
    }
    faults = [at_start, {"do": "await_signal", "at": f"forward {in_save + 1}", "rank": 0}]
    assert stopped(*faults, by="SIGTERM") == in_save + 1
    assert launcher.run(folder, *SETTINGS).exit_code == 0
    assert_same_run(folder, straight)


def test_a_second_signal_ends_a_run_at_once_and_tears_no_checkpoint(
    launcher: Launcher, straight: Path, half_done: Path
) -> None:
    signals = [
        {
            "do": "send",
            "at": "written 9",
            "rank": 1,
            "number": int(signal.SIGTERM),
            "to": "run_train.sh",
        },
        # Not SIGINT, which a shell script that was started in the background ignores.
        {"do": "sleep", "at": "written 9", "rank": 1, "seconds": 5},
        {
            "do": "send",
            "at": "written 9",
            "rank": 1,
            "number": int(signal.SIGTERM),
            "to": "run_train.sh",
        },
        {"do": "sleep", "at": "written 9", "rank": 1, "seconds": 600},
    ]
    run = launcher.run(half_done, *SETTINGS, faults=signals)
    assert run.exit_code == 6, run.output
    assert run.told["cause"] == "killed before it could stop at a step's end"
    assert run.told["last_checkpoint"] == str(half_done / "checkpoint/step-00000006")
    assert checkpoints(half_done) == [".tmp-step-00000009", "step-00000006"]
    assert none_lives(half_done)
    # The command that the run printed continues from there.
    assert run.told["effect"] == "continues from the last checkpoint"
    assert ended(launcher.start(["bash", "-c", run.told["command"] or ""])).exit_code == 0
    assert checkpoints(half_done) == ["step-00000006", "step-00000009", "step-00000012"]
    assert_same_run(half_done, straight)


def test_a_signal_to_every_process_leaves_the_save_its_time(
    launcher: Launcher, half_done: Path
) -> None:
    in_save = {"at": "written 9", "rank": 1}
    term = {"do": "send", "number": int(signal.SIGTERM), **in_save}
    pause = {"do": "sleep", "seconds": 1, **in_save}  # else torchrun sees two signals as one
    signals = [term | {"to": "torchrun"}, pause, term, term | {"to": "run_train.sh"}]
    faults = [*signals, pause | {"seconds": LOCK_SECONDS + 5}]
    run = launcher.run(half_done, *SETTINGS, faults=faults)
    assert run.exit_code == 75, run.output
    assert run.told["cause"] == "stopped by SIGTERM after step 9"
    assert run.told["last_checkpoint"] == str(half_done / "checkpoint/step-00000009")
    assert none_lives(half_done)


@pytest.mark.parametrize("node_rank", ["0", "1"])
def test_a_signal_while_other_nodes_are_awaited_ends_the_run(
    node_rank: str, launcher: Launcher, folder: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as node_0:
        endpoint = node_0.getsockname()
        if node_rank == "0":
            node_0.close()
        variables = {
            "NNODES": "2",
            "NODE_RANK": node_rank,
            "RDZV_ENDPOINT": f"127.0.0.1:{endpoint[1]}",
        }
        process = launcher.start(launcher.train(folder), nodes=variables)
        if node_rank == "1":
            node_0.accept()  # it waits for an answer, in C++
        else:
            wait_for_server(endpoint)
        process.send_signal(signal.SIGTERM)
        run = ended(process)
    assert run.exit_code == 75, run.output
    assert run.told["cause"] == "stopped by SIGTERM before the first step"
    assert not living(folder)


def wait_for_server(address: tuple[str, int]) -> None:
    """Return when a process listens at an address."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        with suppress(ConnectionRefusedError), socket.create_connection(address):
            return
        time.sleep(0.1)
    raise TimeoutError


def test_a_signal_while_some_ranks_still_start_ends_the_run(
    launcher: Launcher, folder: Path
) -> None:
    # Rank 1 has not got so far that it handles signals, and rank 0 waits for it.
    starting = {"at": "start", "rank": 1}
    signals = {"do": "send", "number": int(signal.SIGTERM), "to": "run_train.sh", **starting}
    faults = [{"do": "sleep", "seconds": 8, **starting}, signals]
    run = launcher.run(folder, faults=[*faults, {"do": "sleep", "seconds": 600, **starting}])
    assert run.exit_code == 75, run.output
    assert run.told["cause"] == "stopped by SIGTERM before the first step"
    assert none_lives(folder)


KILL = {"do": "send", "at": "forward 8", "rank": 1, "number": int(signal.SIGKILL)}


# ----- launch: MAX_RESTARTS -----


@pytest.mark.quick
def test_after_a_rank_was_killed_all_start_again_from_the_last_checkpoint(
    launcher: Launcher, straight: Path, half_done: Path
) -> None:
    run = launcher.run(half_done, *SETTINGS, faults=[KILL], restarts=1)
    assert run.exit_code == 0, run.output
    assert run.output.count(f"resumed from {half_done}/checkpoint/step-00000006") == 2
    assert_same_run(half_done, straight)


def test_a_restart_continues_from_its_jobs_checkpoint_whatever_load_step_says(
    launcher: Launcher, straight: Path, folder: Path
) -> None:
    run = launcher.run(folder, *SETTINGS, "--checkpoint.load_step=0", faults=[KILL], restarts=1)
    assert run.exit_code == 0, run.output
    assert run.output.count(f"resumed from {folder}/checkpoint/step-00000006") == 1
    assert not (folder / "previous").exists()
    assert_same_run(folder, straight)


@pytest.mark.quick
def test_a_stop_is_no_reason_to_start_again(launcher: Launcher, half_done: Path) -> None:
    term = {"do": "send", "at": "forward 8", "rank": 1, "number": int(signal.SIGTERM)}
    run = launcher.run(half_done, *SETTINGS, faults=[term], restarts=1)
    assert run.exit_code == 75, run.output
    assert (status(half_done)["state"], status(half_done)["step"]) == ("stopped", 8)


# ----- max_minutes, find_time_limit -----


def test_a_run_ends_at_its_time_limit_and_goes_on_when_started_again(
    launcher: Launcher, straight: Path, half_done: Path
) -> None:
    limit = "--job.max_minutes=56"
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 3600)}
    starts: list[tuple[int, list[str], dict[str, str], str]] = [
        (7, [limit], {}, "[job] max_minutes = 56"),
        (8, [], slurm, "of Slurm job 7"),
    ]
    for step, settings, env, cause in starts:
        late = {"do": "let_pass", "minutes": 56, "at": f"forward {step}", "rank": 0}
        run = launcher.run(half_done, *SETTINGS, *settings, faults=[late], restarts=1, nodes=env)
        assert run.exit_code == 75, run.output
        told = f"stopped by the time limit ({cause}) after step {step}"
        assert run.told["cause"] == status(half_done)["cause"] == told
        saved = half_done / f"checkpoint/step-{step:08d}"
        assert run.told["last_checkpoint"] == str(saved)

    # The last step is done, not stopped. A new start has all of its time.
    late = {"do": "let_pass", "minutes": 56, "at": f"forward {STEPS}", "rank": 0}
    run = launcher.run(half_done, *SETTINGS, limit, faults=[late])
    assert run.exit_code == 0, run.output
    assert f"resumed from {saved}" in run.output
    assert_same_run(half_done, straight)


# ----- launch, Status: a killed rank -----


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_rank_that_is_always_killed_ends_the_run(
    restarts: int, launcher: Launcher, half_done: Path
) -> None:
    run = launcher.run(half_done, *SETTINGS, faults=[KILL | {"always": True}], restarts=restarts)
    assert run.exit_code == 6, run.output
    assert run.output.count(f"resumed from {half_done}/checkpoint/step-00000006") == 1 + restarts
    left = status(half_done)
    assert (left["state"], left["exit_code"], left["rank"]) == ("failed", 6, 1)
    assert re.match(
        r"rank 1 (has ended; last seen at step \d, |was killed by SIGKILL$)", left["cause"]
    )
    # The lines at the end.
    assert run.told["cause"] is not None and "rank 1 was killed by SIGKILL" in run.told["cause"]
    assert (run.told["rank"], run.told["step"]) == ("1", "8")
    assert run.told["last_checkpoint"] == str(half_done / "checkpoint/step-00000006")
    assert run.told["run_folder"] == str(half_done)
    assert run.told["logs"] is not None and run.told["logs"].endswith(
        f"/attempt_{restarts}/1/{{stdout,stderr}}.log"
    )
    assert Path(run.told["logs"].replace("{stdout,stderr}", "stdout")).is_file()
    assert run.told["advice"] == "look at the logs and at the host of that rank"
    command = shlex.split(run.told["command"] or "")
    assert command == [
        f"CONFIG_FILE={FOLDER}/faults.toml",
        "NGPU=2",
        *map(str, launcher.train(half_done, *SETTINGS)),
    ]


def assert_named(run: Ended, folder: Path, *, found: str, step: int) -> None:
    """Assert that the report names rank 1, for which rank 0 waited at a step, and that no process
    of the run is left."""
    assert run.exit_code == 6, run.output
    assert run.told["cause"] is not None
    assert f"rank 1 {found} step {step}, forward and backward, at " in run.told["cause"]
    assert (
        f"; rank 0 waited at step {step}, forward and backward, in all_gather" in run.told["cause"]
    )
    left = status(folder)
    assert (left["state"], left["exit_code"], left["rank"]) == ("failed", 6, 1)
    assert none_lives(folder)


def seconds_since(step: int, folder: Path) -> float:
    """Return the seconds since a step ended."""
    return time.time() - records(folder)[step]["time"]


# ----- Watchdog, train_timeout_seconds -----


@pytest.mark.quick
def test_a_rank_that_sleeps_ends_the_run_and_is_named(launcher: Launcher, half_done: Path) -> None:
    asleep = {"do": "sleep", "at": "accumulation 8", "rank": 1, "seconds": 600}
    run = launcher.run(half_done, *SETTINGS, "--comm.train_timeout_seconds=5", faults=[asleep])
    assert seconds_since(7, half_done) < 5 + 30
    assert_named(run, half_done, found="is in no collective, but at", step=8)


def test_a_stopped_rank_ends_the_run_and_is_named_also_right_after_a_resume(
    launcher: Launcher, half_done: Path
) -> None:
    # Late, because ranks post where they are once a second, and because rank 0's collective must
    # time out before the watchdog loses patience with the stopped rank.
    late = {"do": "sleep", "at": "forward 7", "rank": 1, "seconds": 5}
    stopped = {"do": "send", "at": "forward 7", "rank": 1, "number": int(signal.SIGSTOP)}
    # The time-out up to the first step: the other one applies after it.
    run = launcher.run(
        half_done, *SETTINGS, "--comm.init_timeout_seconds=15", faults=[late, stopped]
    )
    assert seconds_since_start(half_done) < 15 + 30
    assert_named(run, half_done, found="was stopped and is killed now; last seen at", step=7)


def seconds_since_start(folder: Path) -> float:
    """Return the seconds since a run opened its folder."""
    return time.time() - status(folder)["started"]


# ----- UpdateGuard, loss_spike_factor, max_consecutive_skips -----


def test_steps_whose_numbers_are_bad_on_one_rank_update_no_rank(
    launcher: Launcher, folder: Path
) -> None:
    settings = [
        "--training.steps=6", "--training.loss_spike_factor=3", "--checkpoint.interval=1",
        "--parallelism.data_parallel_replicate_degree=2",
    ]  # fmt: skip
    note = {"do": "note_weights", "at": "start"}
    bad = {"do": "scale_loss", "at": "forward 3", "rank": 1, "factor": float("nan")}
    stop = {"do": "send", "at": "forward 4", "rank": 0, "number": int(signal.SIGTERM)}
    assert launcher.run(folder, *settings, faults=[note, bad, stop]).exit_code == 75
    # It is a spike compared with the losses before the stop.
    spike = {"do": "scale_loss", "at": "forward 5", "rank": 1, "factor": 100.0}
    run = launcher.run(folder, *settings, faults=[note, spike])
    assert run.exit_code == 0, run.output
    assert [record["skipped_steps"] for record in records(folder).values()] == [0, 0, 1, 1, 2, 2]
    assert [len(changed_tensors(folder, step)) > 0 for step in range(2, 7)] == [
        True,
        False,
        True,
        False,
        True,
    ]
    weights = [(folder / f"weights-{rank}.jsonl").read_text() for rank in range(2)]
    assert weights[0].count("\n") == 6
    assert weights[0] == weights[1]


def changed_tensors(folder: Path, step: int) -> list[str]:
    """Return the names of the tensors that a step has changed."""
    before, after = (
        SafeReader(folder / f"checkpoint/step-{each:08d}").read_whole() for each in (step - 1, step)
    )
    return [name for name in before if not torch.equal(before[name], after[name])]


def test_bad_numbers_in_each_step_end_the_run_and_none_is_saved(
    launcher: Launcher, folder: Path
) -> None:
    settings = [
        "--training.steps=12",
        "--training.max_consecutive_skips=3",
        "--checkpoint.interval=2",
    ]
    spike = {"do": "scale_loss", "at": "forward 2", "rank": 1, "factor": 100.0}
    bad = [
        {"do": "scale_loss", "at": f"accumulation {step}", "rank": 1, "factor": float("nan")}
        for step in range(4, 13)
    ]
    run = launcher.run(folder, *settings, faults=[spike, *bad])
    assert run.exit_code == 5, run.output
    assert re.match(
        r"\[training\] max_consecutive_skips = 3: the 3 steps up to 6 had no update, .*; "
        r"step 6: loss = nan, grad_norm = nan\. Lower \[optimizer\] lr",
        status(folder)["cause"],
    )
    # A spike is no reason to skip a step unless spikes are looked for.
    assert [record["skipped_steps"] for record in records(folder).values()] == [0, 0, 0, 1, 2, 3]
    assert losses(folder)[1] > 10 * losses(folder)[0]
    assert checkpoints(folder) == ["step-00000002", "step-00000004"]
    tensors = SafeReader(folder / "checkpoint/step-00000004").read_whole().values()
    assert all(tensor.isfinite().all() for tensor in tensors)


# ----- launch, Status: errors of one rank -----


def test_data_that_one_rank_lacks_ends_all_and_a_failure_before_the_first_step_keeps_what_is_known(
    launcher: Launcher, half_done: Path
) -> None:
    lacking = {
        "do": "lack_data",
        "at": "data 8",
        "rank": 1,
        "message": "the text of step 8 is gone",
    }
    run = launcher.run(half_done, *SETTINGS, faults=[lacking])
    assert run.exit_code == 3, run.output
    assert (run.told["cause"], run.told["rank"]) == ("the text of step 8 is gone", "1")
    (log,) = half_done.glob("logs/*/torchrun.log")
    assert set(re.findall(r"exitcode +: (-?\d+)", log.read_text())) == {"3"}
    last = str(half_done / "checkpoint/step-00000006")
    before = status(half_done)
    assert (before["state"], before["last_checkpoint"]) == ("failed", last)

    run = launcher.run(half_done, *SETTINGS, "--training.dataset_path=/nowhere.txt", ranks=1)
    assert run.exit_code == 3, run.output
    assert run.told["cause"] is not None and "/nowhere.txt: does not exist" in run.told["cause"]
    assert (run.told["step"], run.told["last_checkpoint"]) == (str(before["step"]), last)
    left = status(half_done)
    assert (left["state"], left["step"], left["last_checkpoint"]) == (
        "failed",
        before["step"],
        last,
    )


def test_an_error_that_nobody_expects_on_one_rank_ends_all(
    launcher: Launcher, half_done: Path
) -> None:
    crash = {"do": "crash", "at": "forward 8", "rank": 1, "message": "no such kernel"}
    run = launcher.run(half_done, *SETTINGS, faults=[crash])
    assert seconds_since(7, half_done) < 30
    assert run.exit_code == 1, run.output
    assert (run.told["cause"], run.told["rank"], run.told["step"]) == (
        "RuntimeError: no such kernel",
        "1",
        "8",
    )
    left = status(half_done)
    assert (left["state"], left["exit_code"], left["rank"]) == ("failed", 1, 1)
    assert none_lives(half_done)


# ----- RunFolder -----


def test_one_run_in_a_folder_whose_orphans_end_and_leave_it_to_the_next(
    launcher: Launcher, folder: Path
) -> None:
    settings = ["--checkpoint.keep_latest_k=1", "--checkpoint.interval=10"]
    first = launcher.start(launcher.train(folder, *settings, "--training.steps=100000"))
    deadline = time.monotonic() + SECONDS
    while not list(folder.glob("checkpoint/step-*")):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.2)
    second = launcher.run(folder, *settings, ranks=1)
    assert second.exit_code == 2, second.output
    assert re.search(
        rf'\[job\] dump_folder = "{folder}" belongs to a live run: process \d+ on ', second.output
    )
    assert status(folder)["state"] == "running"
    torchrun = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()[0]
    os.kill(int(torchrun), signal.SIGKILL)
    assert ended(first).exit_code == 6
    assert none_lives(folder)
    left = status(folder)
    assert (left["state"], left["exit_code"]) == ("failed", 6)
    assert left["cause"] == "torchrun, which had started this process, is gone"
    # The lock's file is still there, but nobody holds it.
    assert "process" in (folder / ".lock").read_text()
    (saved,) = committed_steps(folder / "checkpoint")
    third = launcher.run(folder, *settings, f"--training.steps={saved + 1}", ranks=1)
    assert third.exit_code == 0, third.output
    assert f"resumed from {folder}/checkpoint/step-{saved:08d}" in third.output


# ----- check_started_alike -----


def test_nodes_that_were_started_differently_train_nothing(
    launcher: Launcher, folder: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    others = [[], ["--optimizer.lr=0.5", f"--job.dump_folder={folder}-2"]]
    nodes = [
        launcher.start(
            launcher.train(folder, *SETTINGS, *other),
            ranks=1,
            nodes={"NNODES": "2", "NODE_RANK": str(rank), "RDZV_ENDPOINT": endpoint},
        )
        for rank, other in enumerate(others)
    ]
    host = socket.gethostname()
    for node in nodes:
        run = ended(node)
        assert run.exit_code == 2, run.output
        ranks = f"0.001 (rank 0 on {host}); 0.5 (rank 1 on {host})"
        assert f"[optimizer] lr differs between ranks: {ranks}" in run.output
        assert (
            f'[job] dump_folder differs between ranks: "{folder}" (rank 0 on {host}); "{folder}-2"'
            in run.output
        )
        assert run.output.count(" differs between ranks: ") == 2
    assert not (folder / "metrics.jsonl").exists()


# ----- Checkpointer: a full disk -----


def test_a_disk_that_somebody_else_fills_ends_the_run_with_its_cause(
    launcher: Launcher, small_disk: Path
) -> None:
    folder = small_disk / "run"
    fill = {"do": "fill_disk", "at": "forward 3", "rank": 0, "folder": str(small_disk)}
    run = launcher.run(folder, *SETTINGS, faults=[fill])
    assert run.exit_code == 7, run.output
    assert re.search(
        r"\.tmp-step-00000003 cannot be written: .*No space left on device", run.told["cause"] or ""
    )
    left = status(folder)
    assert (left["state"], left["exit_code"], left["step"]) == ("failed", 7, 3)
