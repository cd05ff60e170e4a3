"""Generation: against transformers, against a forward pass without a cache, and its errors."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sample_llamas import EACH_FAMILY, FAMILIES, build_hf
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from torchtitan_lite.base.errors import CheckpointError, ConfigError, NumericError
from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.cli import run_command
from torchtitan_lite.data.tokenizer import SHIPPED_MODEL, build_tokenizer
from torchtitan_lite.models.generate import Generator, Sampling, encode_prompt
from torchtitan_lite.models.llama3 import rope_table
from torchtitan_lite.tools import generate

CPU = torch.device("cpu")
TOKENIZER = build_tokenizer("")
PROMPTS = ["def main(argv):", "import", "", "class Parser:\n    def parse(self, text):"]


def save_hf(args: ModelArgs, folder: Path) -> transformers.LlamaForCausalLM:
    """A model with the vocabulary of the shipped tokenizer, saved with it."""
    llama = build_hf(replace(args, vocab_size=TOKENIZER.vocab_size))
    llama.save_pretrained(folder)
    shutil.copy(SHIPPED_MODEL, folder / "tokenizer.model")
    return llama


def load(folder: Path, **options: Any) -> Generator:
    return generate.load_generator(folder, device=CPU, dtype=torch.float32, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face model."""
    path = tmp_path_factory.mktemp("hf")
    save_hf(FAMILIES["Llama 3.1"], path)
    return path


@pytest.fixture(scope="module")
def generator(folder):
    return load(folder)


def set_tokens(monkeypatch: pytest.MonkeyPatch, rows: list[list[int]]) -> None:
    """Have the model generate these tokens, a row for each place."""
    monkeypatch.setattr(Generator, "_tokens", lambda *_, count, **__: iter(rows[:count]))


# ----- Generator -----


def greedy(llama: transformers.LlamaForCausalLM, prompt: str, count: int) -> list[int]:
    """The tokens that transformers generates, without the end of a text."""
    ids = torch.tensor([[TOKENIZER.bos_id, *TOKENIZER.encode(prompt)]])
    settings = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0}
    made = llama.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :]
    return [token for token in made.tolist() if token != TOKENIZER.eos_id]


@EACH_FAMILY
def test_greedy_decoding_is_transformers(args, tmp_path, monkeypatch):
    llama, count = save_hf(args, tmp_path), 12
    generator = load(tmp_path)
    expected = [greedy(llama, prompt, count) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    monkeypatch.setattr(Generator, "_text", lambda self, start, made: json.dumps(made))
    for prompts in (*([prompt] for prompt in PROMPTS), PROMPTS):  # each alone, then as a batch
        for sample in generator.run(prompts, max_new_tokens=count, sampling=Sampling()):
            assert json.loads(sample.text) == expected[PROMPTS.index(sample.prompt)]


def test_ids_that_the_tokenizer_lacks_are_not_generated(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    build_hf(replace(FAMILIES["Llama 3.1"], vocab_size=20_000)).save_pretrained(tmp_path)
    (sample,) = load(tmp_path).run([""], max_new_tokens=20, sampling=Sampling(100.0))
    assert sample.tokens == 20


def test_the_cache_changes_nothing(generator, folder):
    args, read, _ = generate.open_source(folder)
    plain = generate.build_plain_model(args, read, device=CPU, dtype=torch.float32)
    plain.rope_cos, plain.rope_sin = rope_table(args)
    start = encode_prompt("for key in", TOKENIZER, context=48)
    tokens = [row[0] for row in generator._tokens([start], count=20, sampling=Sampling())]
    logits = plain(torch.tensor([[*start, *tokens]]))[0]
    assert logits.argmax(-1)[len(start) - 1 : -1].tolist() == tokens


def test_a_seed_gives_the_same_text_again(generator):
    def text(seed):
        sampling = Sampling(temperature=1.0, seed=seed)
        return generator.run(["x"], max_new_tokens=20, sampling=sampling)[0].text

    assert text(1) == text(1) != text(2)


def test_each_prompt_ends_at_its_own_end(generator, monkeypatch):
    a, b, eos = TOKENIZER.encode("ab")[0], TOKENIZER.encode("b")[0], TOKENIZER.eos_id
    set_tokens(monkeypatch, [[a, b], [eos, b], [a, eos], [a, b]])
    written: list[str] = []
    options = {"max_new_tokens": 9, "sampling": Sampling(), "write": written.append}
    samples = generator.run(["1", "22"], **options)
    assert [(each.tokens, each.ended_by) for each in samples] == [(1, "eos"), (2, "eos")]
    assert "".join(written) == samples[0].text == TOKENIZER.decode([a])


def test_a_context_of_any_length_takes_memory_for_the_text_alone(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "long")
    config = json.loads((folder / "config.json").read_text())
    longest = json.dumps(config | {"max_position_embeddings": 2**31 - 1})
    (tmp_path / "long/config.json").write_text(longest)
    options = {"max_new_tokens": 5, "sampling": Sampling()}
    made = [load(path).run(["def"], **options) for path in (folder, tmp_path / "long")]
    assert made[0] == made[1]


def test_a_text_ends_where_the_context_does(generator):
    options = {"sampling": Sampling(), "ignore_eos": True}
    (sample,) = generator.run(["a"], max_new_tokens=99, **options)
    room = 48 - 1 - len(TOKENIZER.encode("a"))
    assert (sample.tokens, sample.ended_by) == (room, "context")
    (sample,) = generator.run(["a"], max_new_tokens=room, **options)
    assert (sample.tokens, sample.ended_by) == (room, "length")
    with pytest.raises(ConfigError, match=r"prompt 'abc.*' has \d+ tokens, and .* context 48; sho"):
        generator.run(["abc " * 60], max_new_tokens=9, sampling=Sampling())


def test_characters_are_written_whole(generator, monkeypatch):
    text, written = "a 語😀 b", list[str]()
    ids = TOKENIZER.encode(text)
    assert len(ids) > len(text)  # most are bytes
    set_tokens(monkeypatch, [[token] for token in ids])
    options = {"max_new_tokens": 40, "sampling": Sampling(), "write": written.append}
    (sample,) = generator.run(["x"], **options)
    assert sample.text == "".join(written) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in written)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    build_hf(FAMILIES["Llama 3"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has 2256 ids, more than the model's 50; name .*--tok"):
        load(tmp_path, tokenizer_path="")


# ----- Sampling -----


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.7), (40, 0.5), (0, 1e-9)])
def test_sampling_chooses_among_the_tokens_that_transformers_leaves(top_k, top_p):
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(0)) * 2
    left = logits / 0.7
    for warper in [*([TopKLogitsWarper(top_k)] if top_k else []), TopPLogitsWarper(top_p)]:
        left = warper(None, left)
    expected = left.softmax(-1)
    sampling, generator = Sampling(0.7, top_k, top_p), torch.Generator().manual_seed(1)
    chosen = torch.stack([sampling.choose(logits, generator) for _ in range(3000)])  # [n, B]
    counts = torch.stack([row.bincount(minlength=100) for row in chosen.T]) / len(chosen)
    assert ((counts > 0) <= (expected > 0)).all()
    assert (counts - expected).abs().max() < 0.04


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "--temperature -1.0 must be 0, or 0.001 to 100"),
        ({"temperature": 1e-300}, "--temperature 1e-300 must be"),
        ({"temperature": 101.0}, "--temperature 101.0 must be"),
        ({"temperature": float("nan")}, "--temperature nan must be"),
        ({"top_k": -1}, "--top-k -1 must be 0 or more"),
        ({"top_p": 0.0}, "--top-p 0.0 must be above 0, at most 1"),
        ({"top_p": 1.1}, "--top-p 1.1 must be above 0, at most 1"),
        ({"seed": -1}, "--seed -1 must be 0 to"),
        ({"seed": 2**63}, "--seed 9223372036854775808 must be 0 to"),
    ],
)
def test_values_out_of_range(values, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**values)


# ----- generate: the command -----


def test_the_command(folder, capsys, monkeypatch):
    def run(*words):
        run_command(["generate", str(folder), *words, "--max-new-tokens", "5"])
        return capsys.readouterr().out

    sample = json.loads(run("def", "--json"))
    assert (sample["prompt"], sample["tokens"]) == ("def", 5)
    assert run("def") == f"def{sample['text']}\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("def\n\nimport\n"))
    assert run("--file", "-").startswith(f"def{sample['text']}\n\nimport")


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["{hf}"], ConfigError, "no prompt; give one after SOURCE"),
        (["{hf}", "a", "--max-new-tokens", "0"], ConfigError, "--max-new-tokens 0 must be 1"),
        (["{hf}", "a", "--device", "cuda:7"], ConfigError, "--device cuda:7: "),
        (["{hf}", "a", "--device", "tpu"], ConfigError, "--device tpu: "),
        (["{hf}", "a", "--device", "meta"], ConfigError, "--device meta: "),
        (["{hf}", "a\udcff"], ConfigError, r"prompt 'a\\udcff' is not UTF-8"),
        (["{hf}", "--file", "{hf}/none"], ConfigError, "--file .*/none cannot be read"),
        (["{hf}", "--file", "-"], ConfigError, "--file - cannot be read"),
        (
            ["{hf}", "--file", "/dev/zero"],
            ConfigError,
            "--file /dev/zero has more than 10,000",
        ),
        (["{hf}/none", "a"], CheckpointError, "/none is missing"),
    ],
)
def test_errors(words, error, message, folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)  # closed
    with pytest.raises(error, match=message):
        run_command(["generate", *(word.format(hf=folder) for word in words)])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_give_no_numbers_are_an_error(temperature, tmp_path, capsys):
    llama = save_hf(FAMILIES["Llama 3"], tmp_path)
    llama.model.norm.weight.data[0] = torch.nan
    llama.save_pretrained(tmp_path)
    with pytest.raises(NumericError, match="the model's output is not finite: its weights have"):
        run_command(["generate", str(tmp_path), "a", "--temperature", str(temperature)])
    assert capsys.readouterr().out == "a\n"
