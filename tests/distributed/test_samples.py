"""Samples that a run generates at its validations."""

import json
from pathlib import Path

import pytest
import torch
from launching import finish, losses, torchrun, train_arguments

from torchtitan_lite.generate import Sampling, load_generator

PROMPTS = ["def main(", "import"]
WORDS = [
    "--training.steps=3",
    "--training.mixed_precision_param=float32",
    "--float8.enable_float8_linear=false",
]
SAMPLING = [
    "--validation.enable",
    "--validation.freq=2",
    "--validation.steps=1",
    f"--validation.prompts={json.dumps(PROMPTS)}",
    "--validation.max_new_tokens=12",
    "--checkpoint.enable",
]


# ----- Samples, validation.prompts -----


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param([], id="FSDP", marks=pytest.mark.quick),
        pytest.param(["--parallelism.tensor_parallel_degree=2"], id="TP"),
        pytest.param(["--parallelism.pipeline_parallel_degree=2"], id="PP"),
    ],
)
def test_the_texts_are_those_of_the_checkpoint_and_move_nothing(
    layout: list[str], tmp_path: Path
) -> None:
    finish(*train_arguments(tmp_path / "with", *WORDS, *layout, *SAMPLING), processes=2)
    lines = (tmp_path / "with/samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert [each["step"] for each in samples] == [2, 2, 3, 3]
    assert [each["prompt"] for each in samples] == PROMPTS * 2

    generator = load_generator(tmp_path / "with", device=torch.device("cpu"), dtype=torch.float32)
    texts = generator.run(PROMPTS, max_new_tokens=12, sampling=Sampling())
    assert [each["text"] for each in samples[2:]] == [each.text for each in texts]
    assert len({each["text"] for each in samples}) > 1

    without = losses(tmp_path / "without", *WORDS, *layout, *SAMPLING[:3], processes=2)
    metrics = (tmp_path / "with/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in metrics] == without


@pytest.mark.timeout(200)
def test_a_prompt_that_fills_a_sequence_is_refused_at_the_start(tmp_path: Path) -> None:
    words = ["--validation.enable", f"--validation.prompts={json.dumps(['word ' * 80])}"]
    result = torchrun(*train_arguments(tmp_path, *words), processes=1)
    assert "tokens, and the model's context 64; shorten it." in result.stdout
    assert not (tmp_path / "metrics.jsonl").exists() or not (tmp_path / "metrics.jsonl").read_text()
