"""Generation: against transformers, against a forward pass without a cache, and its errors."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from sample_llamas import EACH_FAMILY, FAMILIES, build_hf
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

import torchtitan_lite
from torchtitan_lite.base.errors import CheckpointError, ConfigError, DataError, NumericError
from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.cli import run_command
from torchtitan_lite.data.tokenizer import SHIPPED_MODEL, Tokenizer, build_tokenizer
from torchtitan_lite.models import generate
from torchtitan_lite.models.generate import Sampling, continue_prompts, encode_prompt
from torchtitan_lite.models.llama3 import Transformer, rope_table
from torchtitan_lite.tools.generate import load_model

TOKENIZER = build_tokenizer("")
PROMPTS = ["def main(argv):", "import", "return", "", "class Parser:\n    def parse(self, text):"]


def save_hf(args: ModelArgs, folder: Path) -> transformers.LlamaForCausalLM:
    """A model with the vocabulary of the shipped tokenizer, saved with it."""
    llama = build_hf(replace(args, vocab_size=TOKENIZER.vocab_size))
    llama.save_pretrained(folder)
    shutil.copy(SHIPPED_MODEL, folder / "tokenizer.model")
    return llama


def load(folder: Path) -> tuple[Transformer, Tokenizer]:
    return load_model(folder, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face model."""
    path = tmp_path_factory.mktemp("hf")
    save_hf(FAMILIES["Llama 3.1"], path)
    return path


@pytest.fixture(scope="module")
def loaded(folder):
    return load(folder)


# ----- generate -----


def test_generate_is_the_library_for_a_program(folder, loaded):
    expected = continue_prompts(*loaded, PROMPTS, Sampling(5))
    assert torchtitan_lite.generate(str(folder), PROMPTS, Sampling(5)) == expected


# ----- continue_prompts, generate_tokens -----


@EACH_FAMILY
def test_greedy_decoding_is_transformers(args, tmp_path):
    llama, (model, tokenizer) = save_hf(args, tmp_path), load(tmp_path)
    samples = continue_prompts(model, tokenizer, PROMPTS, Sampling(12))
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        ids = torch.tensor([encode_prompt(prompt, tokenizer, context=48)])
        options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
        made = llama.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()
        size = ids.shape[1] + sample.tokens
        assert made[size:] == [tokenizer.eos_id] * (sample.ended_by == "eos")
        before = tokenizer.decode(ids[0].tolist())
        assert before + sample.text == tokenizer.decode(made[:size])
    assert len({sample.text for sample in samples}) == len(PROMPTS)


def test_the_cache_changes_nothing(folder):
    model, _ = load(folder)
    start = encode_prompt("for key in", TOKENIZER, context=48)
    options = {"vocab_size": TOKENIZER.vocab_size, "sampling": Sampling()}
    rows = generate.generate_tokens(model, [start], count=20, **options)
    tokens = [token for (token,) in rows]
    plain, _ = load(folder)
    plain.rope_cos, plain.rope_sin = rope_table(plain.args)
    logits = plain(torch.tensor([[*start, *tokens]]))[0]
    assert logits.argmax(-1)[len(start) - 1 : -1].tolist() == tokens


def test_ids_that_the_tokenizer_lacks_are_not_generated(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    build_hf(replace(FAMILIES["Llama 3.1"], vocab_size=20_000)).save_pretrained(tmp_path)
    (sample,) = continue_prompts(*load(tmp_path), [""], Sampling(20, temperature=100.0))
    assert sample.tokens == 20


def test_a_seed_gives_the_same_text_again(loaded):
    def text(seed):
        (sample,) = continue_prompts(*loaded, ["x"], Sampling(20, temperature=1.0, seed=seed))
        return sample.text

    assert text(1) == text(1) != text(2)


def test_a_text_ends_with_its_document(loaded, monkeypatch):
    ids = [*TOKENIZER.encode("a 語 b"), TOKENIZER.eos_id, *TOKENIZER.encode("c")]
    monkeypatch.setattr(generate, "generate_tokens", lambda *_, **__: ([each] for each in ids))
    (sample,) = continue_prompts(*loaded, ["x"], Sampling(40))
    assert (sample.text, sample.tokens, sample.ended_by) == ("a 語 b", len(ids) - 2, "eos")


def test_a_batch_goes_on_until_all_its_texts_have_ended(loaded, monkeypatch):
    one, other = TOKENIZER.encode("a b")[:2], TOKENIZER.eos_id
    rows = [[one[0], other], [one[1], one[0]], [other, one[0]], [one[0], one[0]]]
    monkeypatch.setattr(generate, "generate_tokens", lambda *_, **__: iter(rows))
    samples = continue_prompts(*loaded, ["x", "x"], Sampling(40))
    assert [(each.tokens, each.ended_by) for each in samples] == [(2, "eos"), (0, "eos")]


def test_a_text_ends_where_the_context_does(loaded, monkeypatch):
    monkeypatch.setattr(loaded[1], "eos_id", -1)
    room = 48 - 1 - len(TOKENIZER.encode("a"))
    for count, ended_by in ((99, "context"), (room, "length")):
        (sample,) = continue_prompts(*loaded, ["a"], Sampling(count))
        assert (sample.tokens, sample.ended_by) == (room, ended_by)
    with pytest.raises(ConfigError, match=r"prompt 'abc.*' has \d+ tokens, and .* context 48; sho"):
        continue_prompts(*loaded, ["abc " * 60], Sampling())


def test_a_context_of_any_length_takes_memory_for_the_text_alone(loaded, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "long")
    config = json.loads((folder / "config.json").read_text())
    longest = json.dumps(config | {"max_position_embeddings": 2**31 - 1})
    (tmp_path / "long/config.json").write_text(longest)
    texts = [
        continue_prompts(*each, ["def"], Sampling(5)) for each in (loaded, load(tmp_path / "long"))
    ]
    assert texts[0] == texts[1]


# ----- Sampling -----


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.7), (40, 0.5), (0, 1e-9)])
def test_sampling_chooses_among_the_tokens_that_transformers_leaves(top_k, top_p):
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(0)) * 2
    left = logits / 0.7
    for warper in [*([TopKLogitsWarper(top_k)] if top_k else []), TopPLogitsWarper(top_p)]:
        left = warper(None, left)
    expected = left.softmax(-1)
    sampling = Sampling(temperature=0.7, top_k=top_k, top_p=top_p)
    generator = torch.Generator().manual_seed(1)
    chosen = torch.stack([sampling.choose(logits, generator) for _ in range(3000)])  # [n, B]
    counts = torch.stack([row.bincount(minlength=100) for row in chosen.T]) / len(chosen)
    assert ((counts > 0) <= (expected > 0)).all()
    assert (counts - expected).abs().max() < 0.04


def test_a_temperature_near_0_takes_the_likeliest():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert Sampling(temperature=1e-300).choose(logits, torch.Generator()).item() == 1


# ----- generate: the command -----


def test_the_command_prints_each_prompt_with_its_text(folder, capsys):
    words = ["generate", str(folder), "def", "import", "--max-new-tokens", "5"]
    run_command([*words, "--json"])
    samples = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["prompt"], each["tokens"]) for each in samples] == [("def", 5), ("import", 5)]
    texts = [f"{each['prompt']}{each['text']}\n" for each in samples]
    for prompts, expected in ((["def", "import"], "".join(texts)), (["import"], texts[1])):
        run_command(["generate", str(folder), *prompts, "--max-new-tokens", "5"])
        assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["{hf}"], ConfigError, "arguments are required: PROMPT"),
        (["{hf}", "a", "--max-new-tokens", "0"], ConfigError, "-tokens: 0 must be .* from 1 to"),
        (["{hf}", "a", "--temperature", "nan"], ConfigError, "nan must be a number from 0 to 100"),
        (["{hf}", "a", "--top-k", "-1"], ConfigError, "--top-k: -1 must be a whole number from 0"),
        (["{hf}", "a", "--top-p", "0"], ConfigError, "--top-p: 0 must be a number from 1e-06 to 1"),
        (["{hf}", "a", "--seed", str(2**63)], ConfigError, "--seed: .* from 0 to"),
        (["{hf}", "a", "--device", "cuda:7"], ConfigError, "--device cuda:7: "),
        (["{hf}", "a", "--device", "tpu"], ConfigError, "--device tpu: "),
        (["{hf}", "a", "--device", "meta"], ConfigError, "--device meta: "),
        (["{hf}", "a\udcff"], DataError, r"tokenizer .* fails: .*"),
        (
            ["{small}", "a", "--tokenizer", ""],
            ConfigError,
            "has 2256 ids, more than .* 50",
        ),
        (["{hf}/none", "a"], CheckpointError, "/none is missing"),
    ],
)
def test_errors(words, error, message, folder, tmp_path):
    build_hf(FAMILIES["Llama 3"]).save_pretrained(tmp_path)
    with pytest.raises(error, match=message):
        run_command(["generate", *(word.format(hf=folder, small=tmp_path) for word in words)])


def test_an_evaluation_names_its_own_option(folder, tmp_path):
    message = r'^evaluate --data = ".*/nothing": .*/nothing: does not exist; name a folder'
    with pytest.raises(DataError, match=message):
        run_command(["evaluate", str(folder), "--data", str(tmp_path / "nothing")])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_give_no_numbers_are_an_error(temperature, tmp_path):
    llama = save_hf(FAMILIES["Llama 3"], tmp_path)
    llama.model.norm.weight.data[0] = torch.nan
    llama.save_pretrained(tmp_path)
    with pytest.raises(NumericError, match="the model's output is not finite: its weights have"):
        run_command(["generate", str(tmp_path), "a", "--temperature", str(temperature)])
