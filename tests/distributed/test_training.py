"""Runs of real processes: compiled, resumed, stopped, validated, profiled."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from launching import ENV, ask, losses, read_records, torchrun, train, train_arguments

FLOAT8_GATHER = ["--float8.enable_float8_linear", "--float8.enable_fsdp_float8_all_gather"]
STEPS = "--training.steps"


def status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "status.json").read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of six bf16 steps on two processes."""
    return losses(tmp_path_factory.mktemp("plain") / "run", f"{STEPS}=6", processes=2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("float8", [[], FLOAT8_GATHER], ids=["bf16", "float8"])
def test_compiled_blocks_and_loss_train_as_eager_ones_do(float8: list[str], tmp_path: Path) -> None:
    settings = [f"{STEPS}=4", "--activation_checkpoint.mode=selective", *float8]
    eager = losses(tmp_path / "eager", *settings, processes=2)
    compiled = losses(tmp_path / "compiled", *settings, "--compile.enable", processes=2)
    assert compiled == pytest.approx(eager, rel=1e-3)


@pytest.mark.timeout(300)
def test_under_tensor_parallelism_a_rank_takes_no_code_that_was_compiled_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [f"{STEPS}=4", "--parallelism.tensor_parallel_degree=2", "--activation_checkpoint.mode=full"]
    eager = losses(tmp_path / "eager", *settings, processes=2)
    monkeypatch.setitem(ENV, "TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    for cache in ("cold", "warm"):
        compiled = losses(tmp_path / cache, *settings, "--compile.enable", processes=2)
        assert compiled == pytest.approx(eager, rel=1e-3), f"with a {cache} cache"


@pytest.mark.timeout(120)
def test_a_logged_step_reads_nothing_that_another_does_not(tmp_path: Path) -> None:
    settings = [f"{STEPS}=6", "--metrics.log_freq=3", "--float8.enable_float8_linear"]
    *steps, last = ask("reads_worker.py", "--job.dump_folder", str(tmp_path), *settings, processes=2)
    # In each step what the ranks agree on before its two forward passes, and the state of the CPU's random generator:
    # both are on the CPU on any device. In the last step the values of all six, and the records of steps 1, 3 and 6.
    assert steps == [{"tolist": 2, "numpy": 1}] * 5
    assert last == {"tolist": 2 + 6 + 3, "numpy": 1}


@pytest.mark.timeout(120)
def test_validation_is_the_same_on_any_number_of_processes_and_moves_nothing(tmp_path: Path) -> None:
    settings = [f"{STEPS}=2", "--validation.enable", "--validation.freq=1", "--validation.steps=3"]
    found = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        result = torchrun(*train_arguments(folder, *settings), processes=processes)
        assert result.returncode == 0, result.stdout + result.stderr
        found.append([float(loss) for loss in re.findall(r"validation_loss (\S+)", result.stdout)])
    assert len(found[0]) == 2 and found[0][1] < 9
    assert found[1] == pytest.approx(found[0], rel=5e-4)


@pytest.mark.timeout(120)
def test_offload_determinism_and_resharding_change_no_loss(plain: list[float], tmp_path: Path) -> None:
    settings = [
        "--training.enable_cpu_offload", "--debug.deterministic", "--training.gc_freq=2",
        "--parallelism.fsdp_reshard_after_forward=never", "--optimizer.implementation=foreach",
    ]  # fmt: skip
    assert losses(tmp_path / "run", f"{STEPS}=6", *settings, processes=2) == pytest.approx(plain, rel=1e-5)


@pytest.mark.timeout(120)
def test_a_run_leaves_its_config_status_curves_and_traces_and_moves_an_earlier_one_aside(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, f"{STEPS}=2", "--profiling.enable_profiling", "--profiling.profile_freq=2", processes=2)
    assert {path.name for path in folder.iterdir()} == {
        ".lock", "config.toml", "metrics.jsonl", "profile_traces", "status.json", "tb"
    }  # fmt: skip
    traces = [f"step-00000002/rank{rank}_trace.json" for rank in range(2)]
    assert (
        sorted(str(path.relative_to(folder / "profile_traces")) for path in folder.glob("profile_traces/*/*")) == traces
    )
    first = status(folder)
    assert (first["state"], first["step"], first["exit_code"], first["last_checkpoint"]) == ("done", 2, 0, None)
    # The resolved config alone repeats the run.
    before = [record["loss"] for record in read_records(folder)]
    arguments = ["-m", "torchtitan_lite.train", "--job.config_file", str(folder / "config.toml")]
    assert torchrun(*arguments, processes=2).returncode == 0
    assert [record["loss"] for record in read_records(folder)] == before
    (previous,) = (folder / "previous").iterdir()
    assert [record["loss"] for record in read_records(previous)] == before
