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
from sample_llamas import FAMILIES, build_hf
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from torchtitan_lite import generate
from torchtitan_lite.cli import run_command
from torchtitan_lite.data.tokenizer import SHIPPED_MODEL, build_tokenizer
from torchtitan_lite.errors import CheckpointError, ConfigError, NumericError
from torchtitan_lite.generate import Generator, Sampling, encode_prompt, load_generator
from torchtitan_lite.models.flavors import ModelArgs

CPU = torch.device("cpu")
TOKENIZER = build_tokenizer("")
PROMPTS = ["def main(argv):", "import", "", "class Parser:\n    def parse(self, text):"]


def wide(args: ModelArgs) -> ModelArgs:
    """The dimensions with the vocabulary of the shipped tokenizer."""
    return replace(args, vocab_size=TOKENIZER.vocab_size)


def save_hf(args: ModelArgs, folder: Path) -> transformers.LlamaForCausalLM:
    llama = build_hf(wide(args))
    llama.save_pretrained(folder)
    shutil.copy(SHIPPED_MODEL, folder / "tokenizer.model")
    return llama


def load(folder: Path) -> Generator:
    return load_generator(folder, device=CPU, dtype=torch.float32)


def greedy(llama: transformers.LlamaForCausalLM, prompt: str, count: int) -> list[int]:
    """The tokens that transformers generates, without the end of a text."""
    ids = torch.tensor([[TOKENIZER.bos_id, *TOKENIZER.encode(prompt)]])
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0}
    made = llama.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :]
    return [token for token in made.tolist() if token != TOKENIZER.eos_id]


@pytest.mark.parametrize("args", FAMILIES.values(), ids=FAMILIES)
def test_greedy_decoding_is_transformers(
    args: ModelArgs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama, count = save_hf(args, tmp_path), 12
    generator = load(tmp_path)
    expected = [greedy(llama, prompt, count) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    monkeypatch.setattr(Generator, "_text", lambda self, start, made: json.dumps(made))
    for prompts in (*([prompt] for prompt in PROMPTS), PROMPTS):  # each alone, then as a batch
        samples = generator.run(prompts, max_new_tokens=count, sampling=Sampling())
        for sample in samples:
            assert json.loads(sample.text) == expected[PROMPTS.index(sample.prompt)]


def test_ids_that_the_tokenizer_lacks_are_not_generated(tmp_path: Path) -> None:
    save_hf(FAMILIES["Llama 3.1"], tmp_path)
    build_hf(replace(FAMILIES["Llama 3.1"], vocab_size=20_000)).save_pretrained(tmp_path)
    (sample,) = load(tmp_path).run([""], max_new_tokens=20, sampling=Sampling(100.0))
    assert sample.tokens == 20


def test_the_cache_changes_nothing(tmp_path: Path) -> None:
    save_hf(FAMILIES["Llama 3.1"], tmp_path)
    generator, (args, read, _) = load(tmp_path), generate.open_source(tmp_path)
    plain = generate.build_plain_model(args, read, device=CPU, dtype=torch.float32)
    start = encode_prompt("for key in", TOKENIZER, context=48)
    tokens = [row[0] for row in generator._tokens([start], count=20, sampling=Sampling())]
    logits = plain(torch.tensor([[*start, *tokens]]))[0]
    assert logits.argmax(-1)[len(start) - 1 : -1].tolist() == tokens


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.7), (40, 0.5), (0, 1e-9)])
def test_sampling_chooses_among_the_tokens_that_transformers_leaves(
    top_k: int, top_p: float
) -> None:
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(0)) * 2
    left = logits / 0.7
    ids: Any = None
    for warper in [*([TopKLogitsWarper(top_k)] if top_k else []), TopPLogitsWarper(top_p)]:
        left = warper(ids, left)
    expected = left.softmax(-1)
    sampling, generator = Sampling(0.7, top_k, top_p), torch.Generator().manual_seed(1)
    chosen = torch.stack([sampling.choose(logits, generator) for _ in range(3000)])  # [n, B]
    counts = torch.stack([row.bincount(minlength=100) for row in chosen.T]) / len(chosen)
    assert ((counts > 0) <= (expected > 0)).all()
    assert (counts - expected).abs().max() < 0.04


def test_a_seed_gives_the_same_text_again(tmp_path: Path) -> None:
    save_hf(FAMILIES["Llama 3"], tmp_path)
    generator = load(tmp_path)

    def text(seed: int) -> str:
        sampling = Sampling(temperature=1.0, seed=seed)
        return generator.run(["x"], max_new_tokens=20, sampling=sampling)[0].text

    assert text(1) == text(1) != text(2)


def test_each_prompt_ends_at_its_own_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_hf(FAMILIES["Llama 3"], tmp_path)
    generator, eos = load(tmp_path), TOKENIZER.eos_id
    a, b = TOKENIZER.encode("ab")[0], TOKENIZER.encode("b")[0]
    rows = [[a, b], [eos, b], [a, eos], [a, b]]
    monkeypatch.setattr(Generator, "_tokens", lambda *_, count, **__: iter(rows[:count]))
    written: list[str] = []
    samples = generator.run(
        ["1", "22"], max_new_tokens=9, sampling=Sampling(), write=written.append
    )
    assert [(each.tokens, each.ended_by) for each in samples] == [(1, "eos"), (2, "eos")]
    assert "".join(written) == samples[0].text == TOKENIZER.decode([a])


def test_a_text_ends_where_the_context_does(tmp_path: Path) -> None:
    save_hf(FAMILIES["Llama 3"], tmp_path)
    generator = load(tmp_path)
    (sample,) = generator.run(["a"], max_new_tokens=99, sampling=Sampling(), ignore_eos=True)
    assert (sample.tokens, sample.ended_by) == (48 - 1 - len(TOKENIZER.encode("a")), "context")
    with pytest.raises(ConfigError, match=r"prompt 'abc.*' has \d+ tokens, and .* context 48; sho"):
        generator.run(["abc " * 60], max_new_tokens=9, sampling=Sampling())


def test_characters_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_hf(FAMILIES["Llama 3"], tmp_path)
    generator, text = load(tmp_path), "a 語😀 b"
    ids = TOKENIZER.encode(text)
    assert len(ids) > len(text)  # most are bytes
    monkeypatch.setattr(Generator, "_tokens", lambda *_, **__: ([token] for token in ids))
    written: list[str] = []
    (sample,) = generator.run(["x"], max_new_tokens=40, sampling=Sampling(), write=written.append)
    assert sample.text == "".join(written) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in written)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "--temperature -1.0 must be 0, or 0.001 to 100"),
        ({"temperature": 1e-300}, "--temperature 1e-300 must be 0, or 0.001 to 100"),
        ({"temperature": float("nan")}, "--temperature nan must be"),
        ({"top_k": -1}, "--top-k -1 must be 0 or more"),
        ({"top_p": 0.0}, "--top-p 0.0 must be above 0, at most 1"),
        ({"seed": -1}, "--seed -1 must be 0 to"),
    ],
)
def test_values_out_of_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**values)


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_hf(FAMILIES["Llama 3"], tmp_path)
    source = str(tmp_path)
    run_command(["generate", source, "def", "--max-new-tokens", "5", "--json"])
    sample = json.loads(capsys.readouterr().out)
    assert (sample["prompt"], sample["tokens"]) == ("def", 5)
    run_command(["generate", source, "def", "--max-new-tokens", "5"])
    assert capsys.readouterr().out == f"def{sample['text']}\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("def\n\nimport\n"))
    run_command(["generate", source, "--file", "-", "--max-new-tokens", "5"])
    assert capsys.readouterr().out.startswith(f"def{sample['text']}\n\nimport")


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
        (["{hf}/none", "a"], CheckpointError, "/none is missing"),
    ],
)
def test_errors(words: list[str], error: Any, message: str, tmp_path: Path) -> None:
    save_hf(FAMILIES["Llama 3"], tmp_path)
    with pytest.raises(error, match=message):
        run_command(["generate", *(word.format(hf=tmp_path) for word in words)])


def test_a_closed_standard_input_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ConfigError, match="--file - cannot be read"):
        run_command(["generate", "x", "--file", "-"])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_give_no_numbers_are_an_error(
    temperature: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama = save_hf(FAMILIES["Llama 3"], tmp_path)
    llama.model.norm.weight.data[0] = torch.nan
    llama.save_pretrained(tmp_path)
    with pytest.raises(NumericError, match="the model's output is not finite: its weights have"):
        run_command(["generate", str(tmp_path), "a", "--temperature", str(temperature)])
    assert capsys.readouterr().out == "a\n"


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: Path) -> None:
    build_hf(FAMILIES["Llama 3"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has 2256 ids, more than the model's 50; name .*--tok"):
        load_generator(tmp_path, device=CPU, dtype=torch.float32, tokenizer_path="")
