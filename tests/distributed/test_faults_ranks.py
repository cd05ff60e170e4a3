"""Runs of run_train.sh in which signals come, ranks die, hang or fail, and numbers go wrong: how
they end, what they report, and what is kept."""

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGQUIT, SIGSTOP, SIGTERM, SIGUSR1
from types import MappingProxyType
from typing import Any

import pytest
import torch
from faults import (
    Fault,
    assert_same_state,
    checkpoint,
    checkpoints,
    fault,
    records,
    reported,
    step_names,
    values,
)
from launching import ENV, FOLDER, ROOT
from torch.distributed import TCPStore

from torchtitan_lite.checkpoint.folders import steps_with_manifest
from torchtitan_lite.checkpoint.reading import SafeReader, open_checkpoint
from torchtitan_lite.run.agent import START_KEY
from torchtitan_lite.run.run_folder import LOCK_SECONDS

pytestmark = [pytest.mark.timed, pytest.mark.timeout(150)]
STEPS = 12
SECONDS = 70  # for a run, which then fails the test
VALIDATION = ["--validation.enable", "--validation.freq=4", "--validation.steps=2"]
VALIDATION += ["--validation.prompts=def", "--validation.max_new_tokens=2"]
SETTINGS = [f"--training.steps={STEPS}", "--checkpoint.interval=3", *VALIDATION]
TELLS = re.compile(
    r"exit code (?P<exit_code>\d+): (?P<cause>.*)\n(rank: (?P<rank>\d+)\n)?"
    r"(step: (?P<step>\d+)\nlast checkpoint: (?P<last_checkpoint>.*)\n)?"
    r"(?P<advice>the same command resumes\n)?"
    r"run folder: (?P<run_folder>.*)\nlogs: (?P<logs>.*)\n\Z"
)


@dataclass(frozen=True)
class Ended:
    """A run that has ended: its output, and the values in its last lines."""

    output: str
    told: dict[str, str]


def executable(path: Path, line: str) -> str:
    """Write a script of one line, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{line}\n")
    path.chmod(0o755)
    return str(path)


PLACES: dict[str, str] = {}
"""A path to fault_worker.py, and an environment that needs no installation, as variables."""
FAULTY = """
import os, sys

def be_faulty():
    if train := sys.modules.get("torchtitan_lite.train"):  # else this process is the agent
        train_without_faults = train.main

        def main():
            train.main = train_without_faults
            import fault_worker
            fault_worker.main(os.environ["FAULTS"])

        train.main = main

os.register_at_fork(after_in_child=be_faulty)
"""
"""Runs fault_worker.py in each worker that our launcher forks."""


@pytest.fixture(scope="module", autouse=True)
def places(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make PLACES, and the text that is trained on."""
    folder = tmp_path_factory.mktemp("places")
    executable(folder / "env/bin/python", f'exec {sys.executable} "$@"')
    stamp = f"{ROOT}\n{(ROOT / 'pyproject.toml').read_text()}"
    (folder / "env/torchtitan_lite.stamp").write_text(stamp)
    (folder / "sitecustomize.py").write_text(FAULTY)
    PLACES["PYTHONPATH"] = f"{ROOT}:{folder}:{FOLDER}"
    PLACES["VIRTUAL_ENV"], PLACES["XDG_CACHE_HOME"] = f"{folder}/env", f"{folder}/cache"
    PLACES["TEXT"] = f"{folder}/text.txt"
    Path(PLACES["TEXT"]).write_text(Path(json.__file__).with_name("decoder.py").read_text() * 4)


def start_run(
    folder: Path,
    *overrides: str,
    faults: Sequence[Fault] = (),
    ranks: int = 2,
    restarts: int = 0,
    nodes: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[str]:
    """Start a run of faults.toml in `folder` by run_train.sh. `nodes` are the variables of one node
    of several."""
    env = {"FAULTS": json.dumps(faults), "NGPU": str(ranks), "MAX_RESTARTS": str(restarts)}
    env["CONFIG_FILE"] = str(FOLDER / "faults.toml")
    text = f"--training.dataset_path={PLACES['TEXT']}"
    return subprocess.Popen(
        [ROOT / "run_train.sh", f"--job.dump_folder={folder}", text, *overrides],
        cwd=ROOT, env=ENV | PLACES | env | nodes,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def train(folder: Path, *overrides: str, code: int, **how: Any) -> Ended:
    """Run in `folder`, wait for the end, and assert that it ended with the exit code `code`."""
    return ended(start_run(folder, *overrides, **how), code=code)


def ended(process: subprocess.Popen[str], *, code: int) -> Ended:
    """Wait for the end of a run with the exit code `code`, and return how it ended."""
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == code, output
    told = TELLS.search(output)
    return Ended(output, told.groupdict("") if told else {})


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


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A run folder. Processes of its runs that outlive the test are killed."""
    yield tmp_path / "run"
    for process in living(tmp_path / "run"):
        with suppress(ProcessLookupError):
            os.kill(process, SIGKILL)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without faults."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    train(folder, *SETTINGS, code=0)
    return folder


@pytest.fixture
def half_done(straight: Path, folder: Path) -> Path:
    """A folder of a run that continues after step 6."""
    shutil.copytree(checkpoint(straight, 6), checkpoint(folder, 6))
    for file in (straight / "status.json", *straight.glob("*.jsonl")):
        shutil.copy(file, folder)
    return folder


def assert_same_run(folder: Path, straight: Path) -> None:
    """Assert that two finished runs agree in every bit."""
    assert reported(folder, "state") == ["done"]
    for key, of in (("loss", "metrics"), ("validation_loss", "validation"), ("text", "samples")):
        assert values(folder, key, f"{of}.jsonl") == values(straight, key, f"{of}.jsonl")
    assert_same_state(checkpoint(straight, STEPS), checkpoint(folder, STEPS))


# ----- StopSignal, launch: signals -----


def test_a_signal_anywhere_stops_all_ranks_at_one_step_and_loses_nothing(
    straight: Path, folder: Path
) -> None:
    def stopped(*faults: Fault, by: str = "SIGTERM") -> int:
        """Run with faults that stop it, and return the step after which it stopped."""
        settings = [*SETTINGS, "--checkpoint.async_mode=async"]
        run = train(folder, *settings, faults=faults, code=75)
        step = int(run.told["step"])
        assert [run.told["cause"]] == reported(folder, "cause")
        assert run.told["cause"] == f"stopped by {by} after step {step}"
        assert run.told["last_checkpoint"] == str(checkpoint(folder, step))
        assert run.told["advice"]
        open_checkpoint(checkpoint(folder, step), hashes=True)
        assert list(records(folder)) == list(range(1, step + 1))
        return step

    def slow_forward(step: int, *, to: str, number: int = SIGTERM) -> list[Fault]:
        """A signal to rank 0's parents while a forward pass takes long, as when it compiles."""
        at = f"forward {step}"
        return [fault("send", at, 0, number=number, to=to), fault("await_signal", at, 0)]

    assert stopped(*slow_forward(1, to="run_train.sh", number=SIGUSR1), by="SIGUSR1") == 1
    # to one rank, between the two forward passes of a step
    assert stopped(fault("send", "accumulation 2", 1, number=SIGQUIT), by="SIGQUIT") == 2
    assert stopped(fault("send", "validation 4", 0, number=SIGINT), by="SIGINT") == 4
    in_save = stopped(
        fault("send", "written 6", 1, number=SIGTERM), fault("sleep", "written 6", 1, seconds=2)
    )
    assert 6 <= in_save < STEPS
    assert checkpoints(folder) == step_names(*sorted({1, 2, 3, 4, 6, in_save}))
    assert stopped(*slow_forward(in_save + 1, to="torchrun")) == in_save + 1
    train(folder, *SETTINGS, code=0)
    assert_same_run(folder, straight)


@pytest.mark.parametrize("numbers", [(SIGKILL,), (SIGTERM, SIGKILL)])
def test_a_run_whose_launcher_is_killed_stops_and_saves(
    half_done: Path, numbers: tuple[int, ...]
) -> None:
    signals = [fault("send", "forward 8", 0, number=n, to="run_train.sh") for n in numbers]
    process = start_run(half_done, *SETTINGS, faults=signals)
    process.communicate(timeout=SECONDS)
    assert none_lives(half_done)
    assert reported(half_done, "state", "exit_code") == ["stopped", 75]
    open_checkpoint(Path(*reported(half_done, "last_checkpoint")), hashes=True)


def test_a_second_signal_ends_a_run_at_once_and_tears_no_checkpoint(
    straight: Path, half_done: Path
) -> None:
    # Not SIGINT, which a shell script that was started in the background ignores.
    term = fault("send", "written 9", 1, number=SIGTERM, to="run_train.sh")
    waits = [fault("sleep", "written 9", 1, seconds=seconds) for seconds in (5, 600)]
    faults = [term, waits[0], term, waits[1]]
    run = train(half_done, *SETTINGS, faults=faults, code=6)
    assert run.told["cause"] == "stopped by a second Ctrl-C or signal without saving"
    assert run.told["last_checkpoint"] == str(checkpoint(half_done, 6))
    assert checkpoints(half_done) == [".tmp-step-00000009", "step-00000006"]
    assert none_lives(half_done)
    train(half_done, *SETTINGS, code=0)
    assert checkpoints(half_done) == step_names(6, 9, 12)
    assert_same_run(half_done, straight)


def test_a_signal_to_every_process_leaves_the_save_its_time(half_done: Path) -> None:
    term = fault("send", "written 9", 1, number=SIGTERM)
    pause = fault("sleep", "written 9", 1, seconds=1)  # else torchrun sees two signals as one
    signals = [term | {"to": "torchrun"}, pause, term, term | {"to": "run_train.sh"}]
    faults = [*signals, pause | {"seconds": LOCK_SECONDS + 5}]
    run = train(half_done, *SETTINGS, faults=faults, code=75)
    assert run.told["cause"] == "stopped by SIGTERM after step 9"
    assert run.told["last_checkpoint"] == str(checkpoint(half_done, 9))
    assert none_lives(half_done)


@pytest.mark.parametrize("node_rank", ["0", "1"])
def test_a_signal_while_other_nodes_are_awaited_ends_the_run(node_rank: str, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as node_0:
        endpoint = node_0.getsockname()
        if node_rank == "0":
            node_0.close()
        nodes = two_nodes(node_rank, port=endpoint[1])
        process = start_run(folder, nodes=nodes)
        if node_rank == "1":
            node_0.accept()  # it waits for an answer, in C++
        else:
            store = TCPStore(*endpoint, timeout=timedelta(seconds=SECONDS))
            store.wait([START_KEY])
        process.send_signal(SIGTERM)
        run = ended(process, code=75)
    assert run.told["cause"] == "stopped by SIGTERM before the first step"
    assert not living(folder)


def two_nodes(rank: int | str, *, port: int) -> dict[str, str]:
    """Return the variables of run_train.sh on one of two nodes, which meet at a port."""
    return {"NNODES": "2", "NODE_RANK": str(rank), "RDZV_ENDPOINT": f"127.0.0.1:{port}"}


def test_a_signal_while_some_ranks_still_start_ends_the_run(folder: Path) -> None:
    # Rank 1 has not got so far that it handles signals, and rank 0 waits for it.
    faults = [
        fault("sleep", "start", 1, seconds=8),
        fault("send", "start", 1, number=SIGTERM, to="run_train.sh"),
        fault("sleep", "start", 1, seconds=600),
    ]
    run = train(folder, faults=faults, code=75)
    assert run.told["cause"] == "stopped by SIGTERM before the first step"
    assert none_lives(folder)


KILL = fault("send", "forward 8", 1, number=SIGKILL)


# ----- launch: MAX_RESTARTS -----


@pytest.mark.quick
def test_a_restart_continues_from_its_jobs_checkpoint_whatever_load_step_says(
    straight: Path, folder: Path
) -> None:
    settings = [*SETTINGS, "--checkpoint.load_step=0"]
    run = train(folder, *settings, faults=[KILL], restarts=1, code=0)
    assert run.output.count(f"resumed from {checkpoint(folder, 6)}") == 1
    assert not (folder / "previous").exists()
    assert_same_run(folder, straight)


@pytest.mark.quick
def test_a_stop_in_the_last_validation_is_no_reason_to_start_again_and_no_end(
    straight: Path, half_done: Path
) -> None:
    term = fault("send", f"validation {STEPS}", 1, number=SIGTERM)
    train(half_done, *SETTINGS, faults=[term], restarts=1, code=75)
    assert reported(half_done, "state", "step") == ["stopped", STEPS]
    train(half_done, *SETTINGS, code=0)
    assert_same_run(half_done, straight)


# ----- launch, Status: a killed rank -----


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_rank_that_is_always_killed_ends_the_run(restarts: int, half_done: Path) -> None:
    always = KILL | {"always": True}
    run = train(half_done, *SETTINGS, faults=[always], restarts=restarts, code=6)
    assert run.output.count(f"resumed from {checkpoint(half_done, 6)}") == 1 + restarts
    assert reported(half_done, "state", "exit_code", "rank") == ["failed", 6, 1]
    assert "rank 1 was killed by SIGKILL\nexit code 6: rank 1 " in run.output
    assert [run.told["cause"]] == reported(half_done, "cause")
    assert (run.told["rank"], run.told["step"]) == ("1", "8")
    assert run.told["last_checkpoint"] == str(checkpoint(half_done, 6))
    assert run.told["run_folder"] == str(half_done)
    assert (Path(run.told["logs"]) / "torchrun.log").is_file()


def assert_named(run: Ended, folder: Path, *, found: str, step: int) -> None:
    """Assert that the report names rank 1, for which rank 0 waited at a step, and that no process
    of the run is left."""
    at = f"step {step}, forward and backward, "
    assert f"rank 1 {found} {at}at " in run.told["cause"]
    assert f"; rank 0 waited at {at}in all_gather" in run.told["cause"]
    assert reported(folder, "state", "exit_code", "rank") == ["failed", 6, 1]
    assert none_lives(folder)


def seconds_since(step: int, folder: Path) -> float:
    """Return the seconds since a step ended."""
    return time.time() - records(folder)[step]["time"]


# ----- Watchdog, train_timeout_seconds -----


@pytest.mark.quick
def test_a_rank_that_sleeps_ends_the_run_and_is_named(half_done: Path) -> None:
    asleep = fault("sleep", "accumulation 8", 1, seconds=600)
    settings = [*SETTINGS, "--comm.train_timeout_seconds=5"]
    run = train(half_done, *settings, faults=[asleep], code=6)
    assert seconds_since(7, half_done) < 5 + 30
    assert_named(run, half_done, found="is in no collective, but at", step=8)


def test_a_stopped_rank_ends_the_run_and_is_named_also_right_after_a_resume(
    half_done: Path,
) -> None:
    # Late, because ranks post where they are once a second, and because rank 0's collective must
    # time out before the watchdog loses patience with the stopped rank.
    late = fault("sleep", "forward 7", 1, seconds=5)
    stopped = fault("send", "forward 7", 1, number=SIGSTOP)
    # The time-out up to the first step: the other one applies after it.
    settings = [*SETTINGS, "--comm.init_timeout_seconds=15"]
    run = train(half_done, *settings, faults=[late, stopped], code=6)
    assert time.time() - reported(half_done, "started")[0] < 15 + 30
    assert_named(run, half_done, found="was stopped and is killed now; last seen at", step=7)


# ----- UpdateGuard, loss_spike_factor, max_consecutive_skips -----


def test_steps_whose_numbers_are_bad_on_one_rank_update_no_rank(folder: Path) -> None:
    settings = [
        "--training.steps=6", "--training.loss_spike_factor=3", "--checkpoint.interval=1",
        "--parallelism.data_parallel_replicate_degree=2",
    ]  # fmt: skip
    note = fault("note_weights", "start")
    bad = fault("scale_loss", "forward 3", 1, factor=math.nan)
    stop = fault("send", "forward 4", 0, number=SIGTERM)
    train(folder, *settings, faults=[note, bad, stop], code=75)
    # It is a spike compared with the losses before the stop.
    spike = fault("scale_loss", "forward 5", 1, factor=100.0)
    # Only this replica's gradients are bad, after the ranks have exchanged them.
    broken = fault("spoil_gradients", "gradients 6", 1)
    train(folder, *settings, faults=[note, spike, broken], code=0)
    assert values(folder, "skipped_steps") == [0, 0, 1, 1, 2, 3]
    assert [step for step in range(2, 7) if changed_tensors(folder, step)] == [2, 4]
    weights = [(folder / f"weights-{rank}.jsonl").read_text() for rank in range(2)]
    assert weights[0].count("\n") == 6
    assert weights[0] == weights[1]


def changed_tensors(folder: Path, step: int) -> list[str]:
    """Return the names of the tensors that a step has changed."""
    before, after = (SafeReader(checkpoint(folder, each)).read_whole() for each in (step - 1, step))
    return [name for name in before if not torch.equal(before[name], after[name])]


def test_bad_numbers_in_each_step_end_the_run_and_none_is_saved(folder: Path) -> None:
    settings = ["--training.steps=12", "--training.max_consecutive_skips=3"]
    settings.append("--checkpoint.interval=2")
    spike = fault("scale_loss", "forward 2", 1, factor=100.0)
    steps = range(4, 13)
    bad = [fault("scale_loss", f"accumulation {step}", 1, factor=math.nan) for step in steps]
    train(folder, *settings, faults=[spike, *bad], code=5)
    assert re.match(
        r"\[training\] max_consecutive_skips = 3: .* 3 steps up to 6 .*"
        r"step 6: loss = nan, grad_norm = nan\. Lower \[optimizer\] lr",
        *reported(folder, "cause"),
    )
    # A spike is no reason to skip a step unless spikes are looked for.
    assert values(folder, "skipped_steps") == [0, 0, 0, 1, 2, 3]
    assert values(folder, "loss")[1] > 10 * values(folder, "loss")[0]
    assert checkpoints(folder) == step_names(2, 4)
    tensors = SafeReader(checkpoint(folder, 4)).read_whole().values()
    assert all(tensor.isfinite().all() for tensor in tensors)


# ----- launch, Status: errors of one rank -----


def test_data_that_one_rank_lacks_ends_all_and_a_refused_start_keeps_what_is_known(
    half_done: Path,
) -> None:
    lacking = fault("lack_data", "data 8", 1, message="the text of step 8 is gone")
    run = train(half_done, *SETTINGS, faults=[lacking], code=3)
    assert (run.told["cause"], run.told["rank"]) == ("the text of step 8 is gone", "1")
    (log,) = half_done.glob("logs/*/torchrun.log")
    assert set(re.findall(r"exitcode +: (-?\d+)", log.read_text())) == {"3"}
    last = str(checkpoint(half_done, 6))
    before = reported(half_done, "state", "step", "last_checkpoint")
    assert before[::2] == ["failed", last]

    nowhere = "--training.dataset_path=/nowhere.txt"
    run = train(half_done, *SETTINGS, nowhere, ranks=1, code=3)
    assert "/nowhere.txt: does not exist" in run.told["cause"]
    assert reported(half_done, "state", "step", "last_checkpoint") == before


def test_an_error_that_nobody_expects_on_one_rank_ends_all(half_done: Path) -> None:
    crash = fault("crash", "forward 8", 1, message="no such kernel")
    run = train(half_done, *SETTINGS, faults=[crash], code=1)
    assert seconds_since(7, half_done) < 30
    assert run.told["cause"] == "RuntimeError: no such kernel"
    assert (run.told["rank"], run.told["step"]) == ("1", "8")
    assert reported(half_done, "state", "exit_code", "rank") == ["failed", 1, 1]
    assert none_lives(half_done)


# ----- RunFolder -----
def test_one_run_in_a_folder_whose_orphans_end_and_leave_it_to_the_next(folder: Path) -> None:
    settings = ["--checkpoint.keep_latest_k=1", "--checkpoint.interval=10"]
    first = start_run(folder, *settings, "--training.steps=100000")
    deadline = time.monotonic() + SECONDS
    while not list(folder.glob("checkpoint/step-*")):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.2)
    second = train(folder, *settings, ranks=1, code=2)
    live = rf'\[job\] dump_folder = "{folder}" belongs to a live run, process \d+ on '
    assert re.search(live, second.output)
    assert reported(folder, "state") == ["running"]
    torchrun = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()[0]
    os.kill(int(torchrun), SIGKILL)
    ended(first, code=6)
    assert none_lives(folder)
    assert reported(folder, "state", "exit_code") == ["failed", 6]
    assert reported(folder, "cause") == ["torchrun, which had started this process, is gone"]
    (saved,) = steps_with_manifest(folder / "checkpoint")
    third = train(folder, *settings, f"--training.steps={saved + 1}", ranks=1, code=0)
    assert f"resumed from {checkpoint(folder, saved)}" in third.output


# ----- check_started_alike, Launch: several nodes -----


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_node_that_is_started_again_ends_and_leaves_the_run_alone(
    straight: Path, folder: Path
) -> None:
    port = free_port()

    def start(rank: int, *faults: Fault, nodes: int = 2) -> subprocess.Popen[str]:
        at = two_nodes(rank, port=port) | {"NNODES": str(nodes)}
        return start_run(folder, *SETTINGS, ranks=1, nodes=at, faults=faults)

    waits = fault("await_file", "forward 8", 0, file=str(folder / "go on"))
    run = [start(0, waits), start(1)]
    while not (folder / "checkpoint/step-00000006").exists():
        time.sleep(0.1)
    refusals = [start(1), start(0), start(2, nodes=4)]
    told = [
        "NODE_RANK=1: .* this node already",
        f"port {port} .* in use",
        "NNODES=4 on node 2.* NNODES=2",
    ]
    for process, message in zip(refusals, told, strict=True):
        assert re.search(message, ended(process, code=2).output)
    (folder / "go on").touch()
    for process in run:
        ended(process, code=0)
    assert_same_run(folder, straight)


def test_nodes_that_were_started_differently_train_nothing(folder: Path) -> None:
    port = free_port()
    others = [[], ["--optimizer.lr=0.5", f"--job.dump_folder={folder}-2"]]
    processes = [
        start_run(folder, *SETTINGS, *other, ranks=1, nodes=two_nodes(rank, port=port))
        for rank, other in enumerate(others)
    ]
    host, differs = socket.gethostname(), "differs between ranks:"
    for process in processes:
        output = ended(process, code=2).output
        assert (
            f"[optimizer] lr {differs} 0.001 (rank 0 on {host}); 0.5 (rank 1 on {host})" in output
        )
        assert f'dump_folder {differs} "{folder}" (rank 0 on {host}); "{folder}-2"' in output
        assert output.count(f" {differs} ") == 2 * 2  # in the log and in the report
    assert not (folder / "metrics.jsonl").exists()


# ----- Checkpointer: a full disk -----
def test_a_disk_that_somebody_else_fills_ends_the_run_with_its_cause(small_disk: Path) -> None:
    folder = small_disk / "run"
    fill = fault("fill_disk", "forward 3", 0, folder=str(small_disk))
    run = train(folder, *SETTINGS, faults=[fill], code=7)
    full = r"\.tmp-step-00000003 cannot be written: .*No space left on device"
    assert re.search(full, run.told["cause"])
    assert reported(folder, "state", "exit_code", "step") == ["failed", 7, 3]
