"""Runs of real processes: validated, offloaded, profiled, and what they leave behind."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from faults import reported
from launching import (
    ENV,
    ROOT,
    ask,
    finish,
    launcher,
    read_losses,
    train,
    train_arguments,
    train_together,
)
from matrix import PP, STEPS


# ----- Trainer, log_freq -----
@pytest.mark.timeout(300)
def test_a_logged_step_reads_nothing_that_another_does_not(tmp_path: Path) -> None:
    settings = [f"{STEPS}=6", "--metrics.log_freq=3", "--float8.enable_float8_linear"]
    settings.append("--training.document_mask")  # whose figures are counted on the device
    folder = f"--job.dump_folder={tmp_path}"
    _, *steps, last = ask("reads_worker.py", folder, *settings, processes=2)
    # Each step reads the ranks' agreement before its forward passes, on the CPU on any device. The
    # last step also reads the values of steps 2 to 6. In the first step, ranks also agree on which
    # operations ran.
    assert steps == [{"tolist": 1}] * 4
    assert last == {"tolist": 1 + 5}


# ----- convert_linears -----
@pytest.mark.timeout(300)
def test_a_run_in_bf16_does_not_load_torchao(tmp_path: Path) -> None:
    command = [sys.executable, *launcher(1), *train_arguments(tmp_path, f"{STEPS}=1")]
    env = ENV | {"PYTHONPROFILEIMPORTTIME": "1"}
    for settings, loads in ([], False), (["--float8.enable_float8_linear"], True):
        result = subprocess.run(
            [*command, *settings], cwd=ROOT, env=env, capture_output=True, text=True, check=True
        )
        assert ("torchao.float8" in result.stderr) == loads


# ----- validation.enable -----
@pytest.mark.quick
@pytest.mark.timeout(300)
def test_validation_is_the_same_on_any_number_of_processes_and_moves_nothing(
    tmp_path: Path,
) -> None:
    settings = [f"{STEPS}=2", "--validation.enable", "--validation.freq=1", "--validation.steps=-1"]
    settings.append(f"--validation.dataset_path={ROOT}/tests/distributed/text.txt")
    found = []
    for name, processes, degrees in (("one", 1, []), ("FSDP", 2, []), ("PP", 2, [f"{PP}=2"])):
        arguments = train_arguments(tmp_path / name, *settings, *degrees)
        output = finish(*arguments, processes=processes)
        found.append([float(loss) for loss in re.findall(r"validation_loss (\S+)", output)])
    assert len(found[0]) == 2 and found[0][1] < 9
    assert found[1:] == [pytest.approx(found[0], rel=5e-4)] * 2


# ----- enable_cpu_offload, deterministic, fsdp_reshard_after_forward -----
@pytest.mark.timeout(300)
def test_offload_determinism_and_resharding_change_no_loss(tmp_path: Path) -> None:
    others = [
        "--training.enable_cpu_offload", "--debug.deterministic", "--training.gc_freq=2",
        "--parallelism.fsdp_reshard_after_forward=never", "--optimizer.implementation=foreach",
    ]  # fmt: skip
    runs = {"plain": [f"{STEPS}=6"], "others": [f"{STEPS}=6", *others]}
    train_together(tmp_path, runs, processes=2)
    plain, found = (read_losses(tmp_path / name) for name in runs)
    assert found == pytest.approx(plain, rel=1e-5)


# ----- RunFolder, config.toml, status -----
@pytest.mark.timeout(300)
def test_a_run_leaves_its_config_status_curves_and_traces_and_moves_an_earlier_one_aside(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "a run"
    traced = ["--profiling.enable_profiling", "--profiling.profile_freq=2"]
    train(folder, f"{STEPS}=2", *traced, "--metrics.save_for_all_ranks", processes=2)
    assert {path.name for path in (folder / "tb").iterdir()} == {"rank_0", "rank_1"}
    assert {path.name for path in folder.iterdir()} == {
        ".lock", "config.toml", "metrics.jsonl", "profile_traces", "status.json", "tb"
    }  # fmt: skip
    traces = folder / "profile_traces"
    ranks = [traces / f"step-00000002/rank{rank}_trace.json" for rank in range(2)]
    assert sorted(traces.glob("*/*")) == ranks
    keys = ("state", "step", "exit_code", "last_checkpoint", "total_steps", "loss", "eta_s", "tps")
    *first, tps = reported(folder, *keys)
    assert reported(folder, "device", "world_size") == ["CPU", 2]
    # The resolved config alone repeats the run.
    before = read_losses(folder)
    arguments = ["-m", "torchtitan_lite.train", "--job.config_file", str(folder / "config.toml")]
    output = finish(*arguments, processes=2)
    assert read_losses(folder) == before
    (previous,) = (folder / "previous").iterdir()
    assert read_losses(previous) == before

    # What the run said, and how far it got.
    (curves,) = re.findall(r"curves: (.*)", output)
    *command, option, shown = shlex.split(curves)
    assert (option, shown) == ("--logdir", str(folder))
    subprocess.run([*command, "--version"], check=True, timeout=120)
    assert first == ["done", 2, 0, None, 2, before[-1], 0.0] and tps > 0


# ----- gc_freq, profile_freq -----
@pytest.mark.timeout(300)
def test_garbage_collection_and_traces_are_in_no_steps_time(tmp_path: Path) -> None:
    settings = [f"{STEPS}=6", "--training.gc_freq=3"]
    settings += ["--profiling.enable_profiling", "--profiling.profile_freq=4"]
    output = finish(*train_arguments(tmp_path, *settings), processes=1)
    outside = re.findall(r"step (\d)/6  (gc|profiling)_s \d", output)
    assert outside == [("1", "gc"), ("3", "gc"), ("4", "profiling"), ("6", "gc")]
