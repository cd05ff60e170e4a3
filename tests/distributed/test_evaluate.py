"""Evaluation: the run's own validation, and transformers' loss of a Hugging Face model."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import warm
from faults import values
from launching import ENV, FOLDER, ROOT, finish, train_arguments

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.data.tokenizer import SHIPPED_MODEL, build_tokenizer
from torchtitan_lite.models.hf_llama import hf_config
from torchtitan_lite.tools import evaluate as evaluation

SIZES = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96}
ARGS = ModelArgs(**SIZES, vocab_size=2256, max_seq_len=64)
SEQ_LEN = 32
TP, PP, CP = (
    f"--parallelism.{kind}_parallel_degree=2" for kind in ("tensor", "pipeline", "context")
)
SHAPE = ["--validation.seq_len=96", "--validation.local_batch_size=3"]
COMPILED = ["--compile.enable", "--compile.backend=aot_eager"]
ROWWISE, MASK = "--float8.recipe_name=rowwise", "--training.document_mask"
POD = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
POD |= {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
"""Variables of a process of a job, which a command ignores."""
TEXT = "The text of an evaluation: 語 and 😀, and so on. " * 40


def evaluate(*words: str | Path, code: int = 0) -> tuple[dict[str, Any], str]:
    """Return the figures of `evaluate` and what it logged. It must end with the exit code."""
    command = ["-m", "torchtitan_lite", "evaluate", *map(str, words), "--json"]
    result = warm.python(command, cwd=ROOT, env=ENV | POD, timeout=200)
    assert result.returncode == code, result.stderr
    return json.loads(result.stdout or "{}"), result.stderr


# ----- evaluate -----


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("overrides", "rel"),
    [
        pytest.param([TP, ROWWISE, MASK], 5e-4, id="TP, masked", marks=pytest.mark.quick),
        # Its microbatches, of one sequence, have float8 scales of their own.
        pytest.param([PP, "--training.local_batch_size=8"], 1e-6, id="PP"),
        pytest.param([CP, MASK, *SHAPE], 5e-4, id="CP, own shape", marks=pytest.mark.quick),
        pytest.param([TP, *SHAPE, *COMPILED], 5e-4, id="TP, own shape, compiled"),
    ],
)
def test_the_loss_is_the_runs_last_validation_loss(
    overrides: list[str], rel: float, tmp_path: Path
) -> None:
    text = f"{FOLDER}/text.txt"
    words = ["--training.steps=3", "--validation.enable", "--validation.steps=-1"]
    words += [f"--validation.dataset_path={text}", "--checkpoint.enable", *overrides]
    words += ["--checkpoint.last_save_in_hf", "--float8.enable_float8_linear"]
    finish(*train_arguments(tmp_path, *words), processes=2)
    expected = values(tmp_path, "validation_loss", "validation.jsonl")[-1]
    length = f"--training.seq_len={96 if SHAPE[0] in overrides else 64}"
    found, _ = evaluate(tmp_path, "--data", text, length)
    assert found["loss"] == pytest.approx(expected, rel=rel)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


@pytest.fixture
def hf_dir(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = hf_config(ARGS, dtype=torch.float32, bos_id=1, eos_id=2)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    llama.save_pretrained(tmp_path / "hf")
    shutil.copy(SHIPPED_MODEL, tmp_path / "hf/tokenizer.model")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "hf"


WORDS = [f"--training.seq_len={SEQ_LEN}", "--training.mixed_precision_param=float32"]


@pytest.mark.quick
@pytest.mark.timeout(300)
def test_a_hugging_face_model_has_transformers_loss(hf_dir: Path) -> None:
    data = hf_dir.parent / "text.txt"
    # A batch has no more than the text.
    found, _ = evaluate(hf_dir, "--data", data, *WORDS, "--training.local_batch_size=65536")
    (ids,) = build_tokenizer("").encode_documents([TEXT])
    count = (len(ids) - 1) // SEQ_LEN * SEQ_LEN
    tokens, labels = (torch.tensor(ids[at : at + count]).view(-1, SEQ_LEN) for at in (0, 1))
    llama = transformers.LlamaForCausalLM.from_pretrained(hf_dir)
    with torch.no_grad():
        logits = llama(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    assert found["tokens"] == count
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    text = TEXT.encode()[: found["bytes"]].decode(errors="ignore")
    assert 0 <= len(build_tokenizer("").encode(text)) - count <= 2
    assert found["bits_per_byte"] == pytest.approx(loss * count / math.log(2) / found["bytes"])


@pytest.mark.timeout(300)
def test_a_loss_that_overflows_is_an_error(hf_dir: Path) -> None:
    llama = transformers.LlamaForCausalLM.from_pretrained(hf_dir)
    llama.lm_head.weight.data *= 1e38
    llama.model.norm.weight.data *= 1e30
    llama.save_pretrained(hf_dir)
    _, log = evaluate(hf_dir, "--data", hf_dir.parent / "text.txt", *WORDS, code=3)
    assert re.search(r"the loss is (nan|inf): ", log)


@pytest.mark.parametrize(
    "word", ["--validation.enable=false", "--checkpoint.enable", "--job.config_file", "--a-b.c"]
)
def test_keys_without_effect_are_refused(word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{word} has no effect in an evaluation; leave it out"):
        evaluation.evaluate(tmp_path, data="y", overrides=["--debug.seed", "1", word])


def test_a_compilers_cache_that_is_unusable_is_refused(
    hf_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/dev/null/cache")
    with pytest.raises(ConfigError, match="TORCHINDUCTOR_CACHE_DIR=/dev/null/cache: cannot be wr"):
        evaluation.evaluate(hf_dir, data="y", overrides=[])


@pytest.mark.timeout(300)
def test_a_text_shorter_than_a_window_is_an_error(hf_dir: Path) -> None:
    (hf_dir.parent / "text.txt").write_text("short")
    _, log = evaluate(hf_dir, "--data", hf_dir.parent / "text.txt", *WORDS, code=3)
    assert "Traceback" not in log and "tokens" in log.splitlines()[-1]
