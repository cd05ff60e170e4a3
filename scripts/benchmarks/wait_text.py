"""The part of waits.py that generates and evaluates text, against transformers and plain loops."""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import measure_pairs, seconds_of, tell
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from torchtitan_lite.catalog.flavors import FLAVORS
from torchtitan_lite.data.sources import open_source
from torchtitan_lite.data.tokenizer import SHIPPED_MODEL, build_tokenizer
from torchtitan_lite.models.generate import Sampling, generate_tokens
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.tools.evaluate import evaluate
from torchtitan_lite.tools.generate import load_model

NEW_TOKENS, PAIRS = 64, 5
SEQ_LEN, BATCH = 256, 8
"""Of the evaluation."""


def write_model(folder: Path) -> LlamaForCausalLM:
    """Write a Hugging Face model of random weights, as large as debugmodel_gqa, and return it."""
    args = FLAVORS["debugmodel_gqa"]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=args.dim,
            intermediate_size=args.ffn_dim,
            num_hidden_layers=args.n_layers,
            num_attention_heads=args.n_heads,
            num_key_value_heads=args.n_kv_heads,
            vocab_size=build_tokenizer("").vocab_size,
            max_position_embeddings=2048,
        )
    ).eval()
    model.save_pretrained(folder)
    return model


def measure() -> Iterator[dict[str, Any]]:
    """Yield seconds of generation and evaluation on the CPU, in float32."""
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        theirs = write_model(folder)
        ours, _ = load_model(
            folder, device=torch.device("cpu"), dtype=torch.float32, tokenizer_path=""
        )
        for batch in (1, 8):
            for prompt in (16, 512):
                yield from measure_generation(ours, theirs, batch=batch, prompt=prompt)
        yield measure_evaluation(folder, Path(name) / "text.txt")


def measure_generation(
    ours: Transformer, theirs: LlamaForCausalLM, *, batch: int, prompt: int
) -> Iterator[dict[str, Any]]:
    """Yield seconds to the first and to all tokens after random prompts, greedily."""
    size = theirs.config.vocab_size
    ids = torch.randint(3, size, (batch, prompt), generator=torch.Generator().manual_seed(0))
    greedy = Sampling(NEW_TOKENS, 0.0, 0, 1.0, 0)

    def generate_ours(count: int) -> list[list[int]]:
        rows = generate_tokens(ours, ids.tolist(), count=count, vocab_size=size, sampling=greedy)
        return list(rows)

    def generate_theirs(count: int) -> list[list[int]]:
        limits = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        new = theirs.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **limits)
        return new[:, prompt:].t().tolist()

    assert generate_ours(8) == generate_theirs(8), "the same model writes the same text"
    for count, what in ((1, "the first token"), (NEW_TOKENS, f"{NEW_TOKENS} tokens")):
        one, other = measure_pairs(
            partial(seconds_of, partial(generate_ours, count)),
            partial(seconds_of, partial(generate_theirs, count)),
            pairs=PAIRS,
        )
        title = f"generate, batch {batch}, prompt {prompt}: {what}, s"
        yield {"name": title, "peer": "transformers", "ours": one, "theirs": other}


def measure_evaluation(folder: Path, text: Path) -> dict[str, Any]:
    """Return seconds of an evaluation from the files to the loss."""
    texts = [row.text for chunk in open_source("pystdlib").chunks() for row in chunk()]
    text.write_text("".join(texts)[:150_000])
    words = [f"--training.seq_len={SEQ_LEN}", f"--training.local_batch_size={BATCH}"]
    words += [f"--model.tokenizer_path={SHIPPED_MODEL}"]
    losses = {}

    def ours() -> None:
        losses["ours"] = evaluate(folder, data=str(text), overrides=words)["loss"]
        torch.distributed.destroy_process_group()

    @torch.no_grad()
    def plain_loop() -> None:
        tokenizer = build_tokenizer("")
        model = LlamaForCausalLM.from_pretrained(folder).eval()
        ids = torch.tensor([tokenizer.bos_id, *tokenizer.encode(text.read_text())])
        windows = ids[: (len(ids) - 1) // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN)
        labels = ids[1 : windows.numel() + 1].view(-1, SEQ_LEN)
        total = 0.0
        for inputs, targets in zip(windows.split(BATCH), labels.split(BATCH), strict=True):
            logits = model(inputs).logits
            total += F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction="sum"
            ).item()
        losses["theirs"] = total / labels.numel()

    one, other = measure_pairs(
        lambda: seconds_of(ours), lambda: seconds_of(plain_loop), pairs=PAIRS
    )
    assert abs(losses["ours"] - losses["theirs"]) < 0.02, losses
    title = f"evaluate {len(text.read_text()) / 1e6:g} MB, s"
    return {"name": title, "peer": "plain loop", "ours": one, "theirs": other}


if __name__ == "__main__":
    tell(measure())
