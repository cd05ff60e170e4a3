"""What training loses to kills, to full disks and to changes between two runs, of real
processes."""

import re
from pathlib import Path
from signal import SIGKILL

import kill_runs
import pytest
import torch
from faults import (
    NOTE,
    assert_same_state,
    checkpoint,
    checkpoints,
    command,
    fail,
    fault,
    finish,
    records,
    refuse,
    reported,
    run,
    samples,
    step_names,
    values,
)
from matrix import EVENLY, PP, PRECOMPUTE, STEPS

from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.checkpoint.folders import step_folder
from torchtitan_lite.checkpoint.reading import SafeReader, open_checkpoint
from torchtitan_lite.models.hf_llama import hf_config
from torchtitan_lite.models.llama3 import Transformer

pytestmark = pytest.mark.timeout(300)

INTERVAL, ASYNC = "--checkpoint.interval", "--checkpoint.async_mode=async"
FLOAT8 = ["--float8.enable_float8_linear", "--float8.enable_fsdp_float8_all_gather"]
KILLS = 4  # of a run, half of them in a save
VALIDATION = ["--validation.enable", "--validation.freq=3"]
VALIDATION += ["--validation.dataset_path=torchtitan_lite/models/init.py"]
RESUMED = [ASYNC, "--debug.deterministic", *VALIDATION]


def trained(folder: Path, step: int) -> dict[int, tuple[float, ...]]:
    """Loss, norm of the gradient, learning rate and tokens of each step up to the last, `step`."""
    found = {
        n: (line["loss"], line["grad_norm"], line["lr"], line["tokens"])
        for n, line in records(folder).items()
    }
    assert list(found) == list(range(1, step + 1))
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of 20 steps."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    finish(folder, f"{INTERVAL}=20", faults=[NOTE])
    return folder


# ----- Checkpointer -----
@pytest.mark.parametrize(
    ("settings", "resumed_settings"),
    [
        pytest.param([], RESUMED, id="bf16", marks=pytest.mark.quick),
        pytest.param([*FLOAT8, PRECOMPUTE], [ASYNC], id="float8"),
    ],
)
def test_a_run_in_two_parts_is_one_in_one_part_bit_for_bit(
    settings: list[str], resumed_settings: list[str], straight: Path, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    if not settings:
        whole = straight
    else:
        finish(whole, *settings, f"{INTERVAL}=20", faults=[NOTE])
        assert trained(whole, 20) != trained(straight, 20)
    resumed_settings = [*settings, *resumed_settings, f"{INTERVAL}=4"]
    finish(parts, *resumed_settings, f"{STEPS}=10", faults=[NOTE])
    finish(parts, *resumed_settings, faults=[NOTE])
    assert trained(parts, 20) == trained(whole, 20)
    assert samples(parts) == samples(whole)
    assert_same_state(checkpoint(parts, 20), checkpoint(whole, 20))
    assert checkpoints(parts) == step_names(4, 8, 10, 12, 16, 20)


# ----- kill_runs, Checkpointer -----
@pytest.mark.timeout(600)
def test_kills_at_any_moment_cost_steps_and_nothing_else(tmp_path: Path) -> None:
    settings = [f"{INTERVAL}=2", "--checkpoint.keep_latest_k=3", "--lr_scheduler.total_steps=1000"]
    kills, same = kill_runs.kill_runs(
        lambda folder: command(folder, *settings), folder=tmp_path, kills=KILLS, seed=0
    )
    assert [kill.broken for kill in kills] == [[]] * KILLS
    assert [kill.in_save for kill in kills][1::2] == [True] * (KILLS // 2)
    assert max(kill.trained - kill.newest for kill in kills) <= 2
    assert kills[-1].newest > kills[0].newest
    assert same


# ----- Checkpointer, find_resume -----
@pytest.mark.timeout(600)
def test_another_layout_goes_on_from_the_same_state_with_the_same_samples(tmp_path: Path) -> None:
    batch = ["--training.global_batch_size=12", f"{INTERVAL}=20"]
    straight, folder = tmp_path / "straight", tmp_path / "run"
    finish(straight, *batch, f"{STEPS}=19", faults=[NOTE])
    finish(folder, *batch, f"{STEPS}=3", faults=[NOTE])
    cp, tp = (f"--parallelism.{kind}_parallel_degree=2" for kind in ("context", "tensor"))
    pp = [f"{PP}=2", *EVENLY]
    layouts = [(2, [cp]), (2, pp), (1, []), (4, [*pp, tp]), (3, []), (4, [cp, tp])]
    layouts += [(2, FLOAT8), (2, [])]
    for number, (processes, settings) in enumerate(layouts, start=1):
        before, last = 2 * number + 1, 2 * number + 3
        faults = [NOTE, fault("save_what_is_loaded", "start")]
        finish(folder, *batch, f"{STEPS}={last}", *settings, faults=faults, processes=processes)
        assert_same_state(checkpoint(folder, before), step_folder(folder / "loaded", before))
    assert samples(folder) == samples(straight)
    assert list(trained(folder, 19)) == list(trained(straight, 19))
    assert values(folder, "loss") == pytest.approx(values(straight, "loss"), rel=5e-4)


# ----- Checkpointer: async_mode -----


def test_saves_that_are_slow_in_the_background_are_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    faults = [fault("sleep", "saving 8", seconds=3), fault("sleep", "written 10", 0, seconds=3)]
    output = finish(folder, f"{STEPS}=10", ASYNC, faults=faults)
    assert checkpoints(folder) == step_names(2, 4, 6, 8, 10)
    # The optimizer counts its steps: the count is that of the snapshot.
    count = "optimizer.norm.weight.step"
    for step in (2, 4, 6, 8, 10):
        open_checkpoint(checkpoint(folder, step), hashes=True)
        assert SafeReader(checkpoint(folder, step)).read_whole([count])[count] == step
    assert list(records(folder)) == list(range(1, 11))
    events = re.findall(r"step +(\d+)/10  loss|saved .*step-0*(\d+)", output)
    order = [int(step) if step else -int(save) for step, save in events]
    # Step 9 trains during the slow save; the save of step 10 waits for it, and the run's end too.
    assert order[-4:] == [9, 10, -8, -10]
    assert reported(folder, "last_checkpoint") == [str(checkpoint(folder, 10))]


def test_a_save_that_fails_in_the_background_stops_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    limit = fault("limit_files", "saving 20", 1, size=100_000)
    code, cause = fail(folder, f"{STEPS}=1000", ASYNC, f"{INTERVAL}=20", faults=[limit])
    assert code == 7
    assert re.match(r"\[checkpoint\] .*\.tmp-step-00000020 .*rank 1: .*File too large", cause)
    assert checkpoints(folder) == []
    assert max(records(folder)) < 40  # long before the next save, which would wait for it


# ----- Checkpointer: a full disk -----
@pytest.mark.quick
def test_a_full_disk_keeps_the_checkpoint_before(small_disk: Path) -> None:
    folder = small_disk / "run"
    code, cause = fail(folder, f"{STEPS}=5")
    assert code == 7
    assert re.search(r"step-00000004 cannot be written: .*No space left on device", cause)
    assert list(records(folder)) == [1, 2, 3, 4]
    assert checkpoints(folder) == step_names(2)
    open_checkpoint(checkpoint(folder, 2), hashes=True)
    assert reported(folder, "last_checkpoint") == [str(checkpoint(folder, 2))]


# ----- metrics.jsonl, metrics/writers -----
def test_each_step_is_recorded_once_also_after_a_crash(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator  # takes a second

    folder = tmp_path / "run"
    settings = ["--metrics.enable_tensorboard", "--metrics.log_freq=3"]
    run(folder, *settings, faults=[fault("send", "committed 4", 0, number=SIGKILL)])
    assert checkpoints(folder) == step_names(2, 4)
    assert list(records(folder)) == [1, 2, 3, 4]  # as they stood when step 4 was committed
    finish(folder, *settings, f"{STEPS}=6", "--checkpoint.load_step=2")
    logged = [1, 2, 3, 4, 6]  # the first, each third, and what was saved
    assert list(records(folder)) == logged
    assert len(list((folder / "tb").glob("events.*"))) == 2
    events = event_accumulator.EventAccumulator(str(folder / "tb"))
    events.Reload()
    points = events.Scalars("loss_metrics/global_avg_loss")
    assert [point.step for point in points] == logged
    assert [point.value for point in points] == pytest.approx(values(folder, "loss"), rel=1e-6)


# ----- last_save_model_only, initial_load_path -----
def test_a_run_that_ended_with_weights_alone_goes_on_from_an_earlier_step(
    straight: Path, tmp_path: Path
) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    weights = ["--checkpoint.last_save_model_only", "--checkpoint.export_dtype=bfloat16"]
    finish(folder, f"{STEPS}=4", "--checkpoint.enable_first_step_checkpoint", *weights)
    assert checkpoints(folder) == step_names(1, 2, 4)
    tensors = SafeReader(checkpoint(folder, 4)).tensors
    assert {entry.dtype for entry in tensors.values()} == {"bfloat16"} and len(tensors) == 21
    # Started again, it has nothing left to train, but exports what a killed start has not.
    finish(folder, f"{STEPS}=4", "--checkpoint.last_save_in_hf", *weights)
    assert (folder / "checkpoint/step-00000004-hf/config.json").is_file()
    code, cause = refuse(folder, f"{STEPS}=6")
    assert code == 4
    assert re.search(r"step-00000004 has only weights, .* Set load_step to an earlier step", cause)

    # Another run goes on from all of its second step.
    initial = f"--checkpoint.initial_load_path={checkpoint(folder, 2)}"
    settings = [initial, "--checkpoint.initial_load_model_only=false", "--checkpoint.load_only"]
    finish(other, f"{STEPS}=6", *settings, faults=[NOTE])
    assert not (other / "checkpoint").exists()
    assert list(records(other)) == [3, 4, 5, 6]
    assert values(other, "loss") == values(straight, "loss")[2:6]
    assert samples(other) == {step: samples(straight)[step] for step in range(3, 7)}


# ----- initial_load_in_hf, last_save_in_hf -----
def test_a_hugging_face_model_is_trained_and_given_back(tmp_path: Path) -> None:
    import transformers  # takes seconds

    args = ModelArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=2256)
    theirs, folder = tmp_path / "theirs", tmp_path / "run"
    torch.manual_seed(0)
    dimensions = hf_config(args, dtype=torch.float32, bos_id=1, eos_id=2)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**dimensions))
    llama.save_pretrained(theirs)
    initial = [f"--checkpoint.initial_load_path={theirs}", "--checkpoint.initial_load_in_hf"]
    output = finish(folder, f"{STEPS}=1", *initial, "--checkpoint.last_save_in_hf")
    assert f"weights from {theirs}, of Hugging Face" in output

    # Its end again, after a kill during the export.
    exported = folder / "checkpoint" / "step-00000001-hf"
    draft = exported.rename(exported.with_name(f".tmp-{exported.name}"))
    finish(folder, f"{STEPS}=1", "--checkpoint.last_save_in_hf")
    assert not draft.exists()

    tensors = SafeReader(checkpoint(folder, 1)).read_whole()
    model = Transformer(args)
    model.load_state_dict({name: tensors[f"model.{name}"] for name in model.state_dict()})
    after = transformers.AutoModelForCausalLM.from_pretrained(exported)
    moved = llama.lm_head.weight - after.lm_head.weight
    assert 0 < moved.abs().max() < 1.1e-3  # by one step of a learning rate of 1e-3
    tokens = torch.arange(64).reshape(2, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), after(tokens).logits, rtol=1e-4, atol=1e-5)
