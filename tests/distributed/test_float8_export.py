"""Runs of two processes in float8, exported in float8: what transformers computes, and this
project, against the export in bfloat16."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
import warm
from launching import ENV, FOLDER, ROOT, finish, read_losses, train, train_arguments
from torch import Tensor

from torchtitan_lite.checkpoint.folders import find_checkpoints
from torchtitan_lite.checkpoint.hf_export import export_hf
from torchtitan_lite.data.tokenizer import build_tokenizer
from torchtitan_lite.tools.generate import generate

pytestmark = pytest.mark.timeout(500)

TEXT = FOLDER / "text.txt"
SEQ_LEN = 64
COMMON = ["--training.steps=12", "--checkpoint.enable", "--float8.enable_float8_linear"]
TP, PP = (f"--parallelism.{kind}_parallel_degree=2" for kind in ("tensor", "pipeline"))
ROWWISE, FILTERS = "--float8.recipe_name=rowwise", "--float8.filter_fqns=wo,layers.0"
RUNS = {
    "TP, tied": ([TP, "--model.tie_embeddings"], 42),
    "PP, filtered": ([PP, ROWWISE, FILTERS], 30),
}
"""Overrides of each run, and how many of its 42 linears train in float8."""


def windows() -> tuple[Tensor, Tensor]:
    """Tokens and labels [B, S] of a text on which no run trains."""
    (ids,) = build_tokenizer("").encode_documents([TEXT.read_text()])
    count = (len(ids) - 1) // SEQ_LEN * SEQ_LEN
    tokens, labels = (torch.tensor(ids[at : at + count]).view(-1, SEQ_LEN) for at in (0, 1))
    return tokens, labels


@torch.no_grad()
def read_by_transformers(folder: Path) -> tuple[Tensor, float]:
    """The logits of a model on the text, and its loss."""
    auto = transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    tokens, labels = windows()
    logits = model(tokens).logits
    return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()


def evaluate(source: Path) -> float:
    """The loss of `torchtitan-lite evaluate` on the text."""
    words = ["--data", str(TEXT), f"--training.seq_len={SEQ_LEN}", "--json"]
    command = ["-m", "torchtitan_lite", "evaluate", str(source), *words]
    result = warm.python(command, cwd=ROOT, env=ENV, timeout=200)
    assert result.returncode == 0, result.stderr
    loss: float = json.loads(result.stdout)["loss"]
    return loss


# ----- export_hf, HfReader -----
@pytest.mark.parametrize(("overrides", "count"), RUNS.values(), ids=RUNS)
def test_an_export_in_float8_predicts_a_text_as_its_run_does(
    overrides: list[str], count: int, tmp_path: Path
) -> None:
    run, float8, bf16 = (tmp_path / each for each in ("run", "float8", "bf16"))
    losses = [record["loss"] for record in train(run, *COMMON, *overrides, processes=2)]
    (step_dir,) = find_checkpoints(run)
    export_hf(step_dir, float8, dtype="float8")
    export_hf(step_dir, bf16, dtype="bfloat16")

    expected, bf16_loss = read_by_transformers(bf16)
    logits, float8_loss = read_by_transformers(float8)
    assert 20 * math.log10((expected.norm() / (logits - expected).norm()).item()) > 30
    # The run's own float8, and what this project computes in bfloat16 with the export.
    for loss in (float8_loss, evaluate(run), evaluate(float8)):
        assert math.exp(loss) == pytest.approx(math.exp(bf16_loss), rel=5e-3)

    # Another run starts where this one has ended.
    loading = ["--checkpoint.enable", f"--checkpoint.initial_load_path={float8}"]
    words = train_arguments(tmp_path / "tuned", *loading, "--training.steps=1", *overrides)
    output = finish(*words, processes=2)
    assert f"its {count} float8 weights are converted to torch.float32" in output
    assert read_losses(tmp_path / "tuned")[0] < losses[0] - 0.5
    (sample,) = generate(float8, ["The"])
    assert sample.tokens > 0
