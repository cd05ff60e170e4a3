"""Evaluation: the run's own validation, transformers' loss of a Hugging Face model, and tasks of
lm-evaluation-harness, where the [eval] extra is installed."""

import json
import math
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import warm
from faults import values
from launching import ENV, FOLDER, ROOT, finish, train_arguments

from torchtitan_lite.base.errors import ConfigError, DataError
from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.cli import run_command
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


# ----- evaluate_tasks -----

ROLLING = """task: text
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/text.jsonl}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""
CHOICE = """task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choice.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
CONTEXT = ARGS.max_seq_len


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tasks that need no network. The text has whole windows of CONTEXT tokens."""
    pytest.importorskip("lm_eval")
    for name in ("HF_HOME", "HF_HUB_OFFLINE"):
        monkeypatch.setitem(ENV, name, {"HF_HOME": f"{tmp_path}/cache"}.get(name, "1"))
    tokenizer = build_tokenizer("")
    text = tokenizer.decode(tokenizer.encode("The text of a task, and so on. " * 60)[: 4 * CONTEXT])
    assert len(tokenizer.encode(text)) == 4 * CONTEXT
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, task in (("text", ROLLING), ("choice", CHOICE)):
        (folder / f"{name}.yaml").write_text(task.replace("FOLDER", str(folder)))
    (folder / "text.txt").write_text(text)
    (folder / "text.jsonl").write_text(json.dumps({"text": text}))
    row = {"question": "The text of a", "choices": [" task", "qq"], "answer": 0}
    (folder / "choice.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    return folder


@pytest.mark.timeout(400)
def test_a_task_has_the_bits_per_byte_of_its_text(hf_dir: Path, tasks: Path) -> None:
    length = [f"--training.seq_len={CONTEXT}", *WORDS[1:]]
    expected, _ = evaluate(hf_dir, "--data", tasks / "text.txt", *length)
    found = {}
    for begins in (False, True):
        fields = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": begins}
        (hf_dir / "tokenizer_config.json").write_text(json.dumps(fields))
        results, _ = evaluate(hf_dir, "--tasks", "text", "--include-path", tasks)
        found[begins] = results["text"]["bits_per_byte,none"]
    assert found[False] == pytest.approx(expected["bits_per_byte"], rel=1e-5)
    # The BOS of the tokenizer follows the harness's, is predicted, and shifts the windows.
    assert found[True] == pytest.approx(expected["bits_per_byte"], rel=2 / CONTEXT)
    assert found[True] != pytest.approx(expected["bits_per_byte"], rel=1e-4)


@pytest.mark.timeout(400)
def test_tasks_of_a_run(tmp_path: Path, tasks: Path) -> None:
    words = ["--training.steps=4", "--checkpoint.enable"]
    words += [f"--training.dataset_path={tasks}/text.txt"]
    finish(*train_arguments(tmp_path / "run", *words), processes=1)
    run, options = tmp_path / "run", ["--include-path", tasks, "--limit", "2"]
    results, _ = evaluate(run, "--tasks", "text", "choice", *options)
    assert (results["choice"]["sample_len"], results["choice"]["acc,none"]) == (2, 1.0)
    exact = ["--training.mixed_precision_param=float32", "--float8.enable_float8_linear=false"]
    loss, _ = evaluate(run, "--data", tasks / "text.txt", *exact)
    bits = results["text"]["bits_per_byte,none"]
    assert bits == pytest.approx(loss["bits_per_byte"], rel=0.05)

    _, log = evaluate(run, "--tasks", "texts", "--include-path", tasks, code=2)
    assert '; did you mean "text"?' in log
    _, log = evaluate(run, "--tasks", "hellaswag", code=3)
    assert re.search("--tasks hellaswag: .*hellaswag.*HF_DATASETS_OFFLINE=1", log)


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A replacement of lm_eval: its arguments, and an error that it raises if there is one."""
    fake = SimpleNamespace(arguments={}, error=None)
    names = ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface", "lm_eval.tasks")
    for name in names:
        module: Any = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        if parent := name.rpartition(".")[0]:
            setattr(sys.modules[parent], name.rpartition(".")[2], module)

    def simple_evaluate(model: str, weights: Any, names: Any, **options: Any) -> dict[str, Any]:
        print("progress")
        fake.arguments = options | {"model": model, "model_args": weights, "tasks": names}
        if fake.error:
            raise fake.error
        return {"results": {"arc_easy": {"acc,none": 0.5}}}

    lm_eval: Any = sys.modules["lm_eval"]
    lm_eval.simple_evaluate = simple_evaluate
    lm_eval.utils = SimpleNamespace(make_table=lambda results: f"table of {[*results]}")
    lm_eval.tasks.TaskManager = lambda **_: SimpleNamespace(all_tasks=["arc_easy", "hellaswag"])
    return fake


@pytest.mark.quick
def test_tasks_and_options_reach_the_harness(
    hf_dir: Path, harness: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    (hf_dir / "tokenizer_config.json").write_text("{}")
    words = ["evaluate", str(hf_dir), "--tasks", "arc_easy", "--tasks", "hellaswag"]
    run_command([*words, "--limit", "2", "--num-fewshot", "0"])
    assert capsys.readouterr().out == "table of ['results']\n"
    given = harness.arguments
    assert (given["tasks"], given["limit"]) == (["arc_easy", "hellaswag"], 2)
    assert (given["model"], given["num_fewshot"]) == ("hf", 0)
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    assert given["model_args"] == {"pretrained": str(hf_dir), "dtype": dtype}  # no remote code
    run_command([*words, "--json"])
    assert json.loads(capsys.readouterr().out) == {"arc_easy": {"acc,none": 0.5}}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (ConnectionError("no hub"), "arc_easy: no hub; .* HF_DATASETS_OFFLINE=1"),
        (ValueError("5 examples"), "arc_easy: 5 examples$"),
        (ImportError("sklearn"), "arc_easy: sklearn$"),
    ],
)
def test_errors_of_tasks(
    raised: Exception, message: str, hf_dir: Path, harness: SimpleNamespace
) -> None:
    (hf_dir / "tokenizer_config.json").write_text("{}")
    harness.error = raised
    with pytest.raises(DataError, match=f"^--tasks {message}"):
        run_command(["evaluate", str(hf_dir), "--tasks", "arc_easy"])


@pytest.mark.quick
def test_what_the_harness_cannot_read_is_an_error(hf_dir: Path, harness: SimpleNamespace) -> None:
    with pytest.raises(DataError, match=r"/hf has no tokenizer .* tokenizer_config\.json"):
        run_command(["evaluate", str(hf_dir), "--tasks", "arc_easy"])
    with pytest.raises(ConfigError, match='arc_esy is not known .*; did you mean "arc_easy"'):
        run_command(["evaluate", str(hf_dir), "--tasks", "arc_esy"])
    assert not harness.arguments


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "one of the arguments --data --tasks is required"),
        (["--data", "a", "--tasks", "b"], "--tasks: not allowed with argument --data"),
        (["--data", "a", "--num-fewshot", "0"], "^--num-fewshot has no effect on --data"),
        (["--data", "a", "--include-path", "b"], "^--include-path has no effect on --data"),
        (["--tasks", "a", "--debug.seed=1"], "^--debug.seed=1 has no effect on --tasks"),
        (["--tasks", "a"], r'^--tasks needs the package lm_eval.*; .*"torchtitan-lite\[eval\]"'),
    ],
)
def test_words_that_an_evaluation_refuses(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=message):
        run_command(["evaluate", "x", *words])
