"""Generate text from a model's weights, with a cache of keys and values.

Shapes: B prompts of the same length, S tokens of a call, T tokens so far, H heads, K key-value
heads, Q head_dim, D dim, V vocab_size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan_lite.base.errors import ConfigError, NumericError
from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.data.tokenizer import Tokenizer

from .llama3 import Attention, Transformer, rope_table

End = Literal["eos", "length", "context"]
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN's, which makes a plan for each length, and a text has as many as tokens."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen from the logits."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    """Divides the logits; below 0.001: the likeliest token always."""
    top_k: int = 0
    """Choose among so many of the likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that have this probability together (arXiv 1904.09751)."""
    seed: int = 0

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Return a token for each row of `logits` [B, V], int64 [B]. Raises NumericError."""
        if not logits.isfinite().all():
            raise NumericError(
                "the model's output is not finite: its weights have NaN, or values that overflow; "
                "name another step, or compute in another --dtype."
            )
        if self.temperature < 0.001:
            return logits.argmax(-1)
        scores, tokens = (logits.float() / self.temperature).sort(descending=True)
        if self.top_k:
            scores[:, self.top_k :] = -torch.inf
        probabilities = scores.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        probabilities = torch.where(before < self.top_p, probabilities, 0)
        chosen = torch.multinomial(probabilities.cpu(), 1, generator=generator)
        return tokens.gather(1, chosen.to(tokens.device)).squeeze(1)


@dataclass(frozen=True)
class Sample:
    """A prompt and what the model made of it."""

    prompt: str
    text: str
    tokens: int
    ended_by: End


class KVCache:
    """A layer's attention over all tokens so far: takes the place of `Attention.attend`."""

    def __init__(self) -> None:
        self._past: tuple[Tensor, Tensor] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        """Attend with `q` [B, H, S, Q] to `k` and `v` [B, K, S, Q] and to those of earlier calls. S
        is 1 in all calls but the first."""
        if self._past is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self._past, (k, v), strict=True))
        self._past = k, v  # [B, K, T, Q]
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)


def build_empty_model(args: ModelArgs, *, device: torch.device, dtype: torch.dtype) -> Transformer:
    """Build a model on one device, with weights of any values. Its rotary tables are empty: the
    context that a file states may be any number."""
    with torch.device("meta"):
        model = Transformer(replace(args, document_bos_id=None)).to(dtype).requires_grad_(False)
    model.rope_cos = model.rope_sin = torch.empty(0)
    return model.to_empty(device=device)


def encode_prompt(prompt: str, tokenizer: Tokenizer, *, context: int) -> list[int]:
    """Return the ids of a prompt, BOS first. Raises ConfigError if it fills the context."""
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    if len(ids) >= context:
        raise ConfigError(
            f"prompt {prompt[:40]!r} has {len(ids)} tokens, and the model's context {context}; "
            "shorten it."
        )
    return ids


def continue_prompts(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[str], sampling: Sampling
) -> list[Sample]:
    """Generate a text that follows each prompt, up to the end of a document or of the context, or
    to `max_new_tokens`. Prompts with equally many tokens are one batch. `model`, of
    `build_empty_model`, gets a cache."""
    context = model.args.max_seq_len
    texts = [_Text(encode_prompt(each, tokenizer, context=context), tokenizer) for each in prompts]

    # A batch goes on until all its texts have ended.
    for length in dict.fromkeys(len(text.prompt_ids) for text in texts):
        batch = [text for text in texts if len(text.prompt_ids) == length]
        count = min(sampling.max_new_tokens, context - length)
        ids = [text.prompt_ids for text in batch]
        size = tokenizer.vocab_size
        for row in generate_tokens(model, ids, count=count, vocab_size=size, sampling=sampling):
            for text, token in zip(batch, row, strict=True):
                text.add(token)
            if all(text.at_eos for text in batch):
                break

    samples = []
    for prompt, text in zip(prompts, texts, strict=True):
        at_limit: End = "length" if len(text.ids) == sampling.max_new_tokens else "context"
        ended_by = "eos" if text.at_eos else at_limit
        samples.append(Sample(prompt, text.decode(), len(text.ids), ended_by))
    return samples


class _Text:
    """The tokens that follow a prompt, as they come."""

    def __init__(self, prompt_ids: list[int], tokenizer: Tokenizer) -> None:
        self.prompt_ids, self._tokenizer = prompt_ids, tokenizer
        self._prompt_size = len(tokenizer.decode(prompt_ids))
        self.ids: list[int] = []
        self.at_eos = False

    def add(self, token: int) -> None:
        """Take the next token, unless the text has ended."""
        self.at_eos |= token == self._tokenizer.eos_id
        if not self.at_eos:
            self.ids.append(token)

    def decode(self) -> str:
        """Return the text, decoded after its prompt: some tokenizers drop a space at a start."""
        return self._tokenizer.decode([*self.prompt_ids, *self.ids])[self._prompt_size :]


@torch.inference_mode()
def generate_tokens(
    model: Transformer, ids: Sequence[list[int]], *, count: int, vocab_size: int, sampling: Sampling
) -> Iterator[list[int]]:
    """Yield the next token of each row of `ids` [B, S], below `vocab_size`, `count` times."""
    device = model.tok_embeddings.weight.device
    tokens, end = torch.tensor(ids, device=device), 0  # [B, S]
    tables = rope_table(replace(model.args, max_seq_len=tokens.shape[1] + count))
    cos, sin = (table.to(device) for table in tables)
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = KVCache()

    generator = torch.Generator().manual_seed(sampling.seed)
    for _ in range(count):
        start, end = end, end + tokens.shape[1]
        model.rope_cos, model.rope_sin = cos[start:end], sin[start:end]
        with sdpa_kernel(ATTENTION):
            # Only after the last token of x [B, S, D]; weight is [V, D].
            logits = model(tokens, lambda x, weight: F.linear(x[:, -1], weight))  # [B, V]
        chosen = sampling.choose(logits[:, :vocab_size], generator)
        yield chosen.tolist()
        tokens = chosen.unsqueeze(1)
