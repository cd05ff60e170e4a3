"""What happens to pipelines when a rank of one stage is stopped, is killed, hangs, or has bad
numbers."""

from pathlib import Path
from signal import SIGKILL, SIGTERM

import pytest
import torch
from faults import (
    NOTE,
    assert_same_state,
    checkpoint,
    checkpoints,
    fail,
    fault,
    finish,
    records,
    reported,
    run,
    samples,
    step_names,
    values,
)
from matrix import EVENLY, PP, STEPS

from torchtitan_lite.checkpoint.reading import SafeReader

pytestmark = pytest.mark.timeout(300)
PIPELINE = (f"{PP}=2", *EVENLY)


# ----- pipeline_parallel_degree: faults of stages -----


def test_a_stopped_and_a_killed_pipeline_goes_on_bit_for_bit(tmp_path: Path) -> None:
    settings = (*PIPELINE, f"{STEPS}=12", "--float8.enable_float8_linear")
    settings += ("--validation.enable", "--validation.freq=3", "--validation.steps=2")
    straight, folder = tmp_path / "straight", tmp_path / "run"
    finish(straight, *settings, "--checkpoint.interval=12", faults=[NOTE])

    term = fault("send", "validation 3", 0, number=SIGTERM)  # which the next start makes first
    run(folder, *settings, faults=[NOTE, term])
    assert reported(folder, "state", "step") == ["stopped", 3]
    assert checkpoints(folder) == step_names(2, 3)

    kill = fault("send", "forward 8", 1, number=SIGKILL)
    assert run(folder, *settings, faults=[NOTE, kill]).returncode != 0
    assert checkpoints(folder)[-1] == "step-00000006"
    output = finish(folder, *settings, faults=[NOTE])
    assert f"resumed from {checkpoint(folder, 6)}" in output

    assert list(records(folder)) == list(range(1, 13))
    for key in ("loss", "grad_norm"):
        assert values(folder, key) == values(straight, key)
    losses = [values(each, "validation_loss", "validation.jsonl") for each in (folder, straight)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert samples(folder) == samples(straight)
    assert_same_state(checkpoint(folder, 12), checkpoint(straight, 12))


def test_a_stage_that_sleeps_ends_the_run_and_is_named(tmp_path: Path) -> None:
    """The other stage waits for it in a transfer, which on CPU keeps its first time-out."""
    asleep = fault("sleep", "forward 4", 1, seconds=600)
    timeouts = ("--comm.init_timeout_seconds=30", "--comm.train_timeout_seconds=5")
    code, cause = fail(tmp_path, *PIPELINE, *timeouts, faults=[asleep])
    assert (code, *reported(tmp_path, "rank")) == (6, 1)
    assert "rank 1 is in no collective, but at step 4, forward and backward, at" in cause
    assert "rank 0 waited at step 4, forward and backward, in _wait_batch_p2p" in cause
    assert records(tmp_path).keys() == {1, 2, 3}
    assert reported(tmp_path, "last_checkpoint") == [str(checkpoint(tmp_path, 2))]


def test_bad_gradients_of_one_stage_update_none(tmp_path: Path) -> None:
    """The loss is finite, and so are the gradients of the last stage."""
    settings = (*PIPELINE, f"{STEPS}=4", "--checkpoint.interval=1")
    finish(tmp_path, *settings, faults=[fault("spoil_gradients", "gradients 3", 0)])
    assert values(tmp_path, "skipped_steps") == [0, 0, 1, 1]
    assert None not in values(tmp_path, "loss")
    saved = [SafeReader(checkpoint(tmp_path, step)).read_whole() for step in range(1, 5)]
    names = [name for name in saved[0] if name.startswith("model.")]
    assert len(names) == 2 * 9 + 3
    for before, after, same in zip(saved, saved[1:], (False, True, False), strict=False):
        assert {torch.equal(before[name], after[name]) for name in names} == {same}
