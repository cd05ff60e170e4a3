"""Samples that a run generates at its validations."""

import json
from pathlib import Path

import pytest
import torch
from launching import finish, losses, read_losses, torchrun, train_arguments
from matrix import PP, TP

from torchtitan_lite.models.generate import Sampling, continue_prompts
from torchtitan_lite.tools.generate import load_model

PROMPTS = ["def main(", "import"]
WORDS = ["--training.steps=3", "--training.mixed_precision_param=float32"]
WORDS += ["--validation.enable", "--validation.freq=2", "--validation.steps=1"]
SAMPLING = [f"--validation.prompts={json.dumps(PROMPTS)}", "--validation.max_new_tokens=12"]
SAVE = "--checkpoint.enable"


# ----- Samples, validation.prompts -----


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param([], id="FSDP", marks=pytest.mark.quick),
        pytest.param([f"{TP}=2"], id="TP"),
        pytest.param([f"{PP}=2"], id="PP"),
    ],
)
def test_the_texts_are_those_of_the_checkpoint_and_move_nothing(
    layout: list[str], tmp_path: Path
) -> None:
    finish(*train_arguments(tmp_path / "with", *WORDS, *layout, *SAMPLING, SAVE), processes=2)
    lines = (tmp_path / "with/samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert [each["step"] for each in samples] == [2, 2, 3, 3]
    assert [each["prompt"] for each in samples] == PROMPTS * 2

    loaded = load_model(tmp_path / "with", device=torch.device("cpu"), dtype=torch.float32)
    texts = [sample.text for sample in continue_prompts(*loaded, PROMPTS, Sampling(12))]
    assert [each["text"] for each in samples[2:]] == texts
    assert len({each["text"] for each in samples}) > 1

    without = losses(tmp_path / "without", *WORDS, *layout, processes=2)
    assert read_losses(tmp_path / "with") == without


@pytest.mark.timeout(200)
def test_a_prompt_that_fills_a_sequence_is_refused_at_the_start(tmp_path: Path) -> None:
    words = ["--validation.enable", f"--validation.prompts={json.dumps(['word ' * 80])}"]
    result = torchrun(*train_arguments(tmp_path, *words), processes=1)
    assert "tokens, and the model's context 64; shorten it." in result.stdout
    assert not any(path.read_text() for path in tmp_path.glob("metrics.jsonl"))
