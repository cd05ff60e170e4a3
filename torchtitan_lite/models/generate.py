"""Generate text from a model's weights, with a cache of keys and values.

Weights are read in high precision and computed in bfloat16 or float32, never in float8.

Shapes: B prompts, S tokens of a call, T tokens so far, K key-value heads, Q head_dim, V vocab_size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan_lite.base.errors import ConfigError, NumericError
from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.data.tokenizer import Tokenizer

from .llama3 import Attention, Transformer, attend, rope_table

End = Literal["eos", "length", "context"]
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN's, which makes a plan for each length, and a text has as many as tokens."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from the logits. Raises ConfigError for values out of range."""

    temperature: float = 0.0
    """Divides the logits; 0: the likeliest token always."""
    top_k: int = 0
    """Choose among so many of the likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that have this probability together (arXiv 1904.09751)."""
    seed: int = 0

    def __post_init__(self) -> None:
        in_range = 0.001 <= self.temperature <= 100
        for name, rule, holds in (
            ("temperature", "0, or 0.001 to 100", self.temperature == 0 or in_range),
            ("top-k", "0 or more", self.top_k >= 0),
            ("top-p", "above 0, at most 1", 0 < self.top_p <= 1),
            ("seed", "0 to 2^63 - 1", 0 <= self.seed < 2**63),
        ):
            if not holds:
                value = getattr(self, name.replace("-", "_"))
                raise ConfigError(f"--{name} {value} must be {rule}")

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Choose the next token of each prompt, [B], by its `logits` [B, V]. `generator` is of the
        CPU, so that a seed chooses alike on all devices. Raises NumericError unless all logits are
        finite."""
        if not logits.isfinite().all():
            raise NumericError(
                "the model's output is not finite: its weights have NaN, or values that overflow; "
                "name another step, or compute in another --dtype."
            )
        if self.temperature == 0:
            return logits.argmax(-1)
        scores, tokens = (logits.float() / self.temperature).sort(descending=True)
        if self.top_k:
            scores[:, self.top_k :] = -torch.inf
        probabilities = scores.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        probabilities = torch.where(before < self.top_p, probabilities, 0)
        chosen = torch.multinomial(probabilities.cpu(), 1, generator=generator)
        return tokens.gather(1, chosen.to(tokens.device)).squeeze(1)


class KVCache:
    """A layer's attention over all tokens so far: takes the place of `Attention.attend`."""

    def __init__(self, args: ModelArgs, *, batch: int, length: int, like: Tensor) -> None:
        self._k, self._v = like.new_empty(2, batch, args.n_kv_heads, length, args.head_dim)
        self._length = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Keep `k` and `v` [B, K, S, Q], and attend to all that are kept."""
        start, self._length = self._length, self._length + k.shape[2]
        self._k[:, :, start : self._length] = k
        self._v[:, :, start : self._length] = v
        return attend(q, self._k[:, :, : self._length], self._v[:, :, : self._length], mask)


@dataclass(frozen=True)
class Sample:
    """A prompt and what the model made of it."""

    prompt: str
    text: str
    tokens: int
    ended_by: End


def encode_prompt(prompt: str, tokenizer: Tokenizer, *, context: int) -> list[int]:
    """Return the ids of a prompt, BOS first. Raises ConfigError if it fills the context, or is not
    UTF-8."""
    if prompt != prompt.encode(errors="replace").decode():
        raise ConfigError(f"prompt {ascii(prompt[:40])} is not UTF-8")
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    if len(ids) >= context:
        raise ConfigError(
            f"prompt {prompt[:40]!r} has {len(ids)} tokens, and the model's context {context}; "
            "shorten it."
        )
    return ids


class Generator:
    """A model on one device, with its tokenizer."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer) -> None:
        self._model, self._tokenizer, self._args = model, tokenizer, model.args
        if tokenizer.vocab_size > model.args.vocab_size:
            raise ConfigError(
                f"tokenizer {tokenizer.path} has {tokenizer.vocab_size} ids, more than the model's "
                f"{model.args.vocab_size}; name the model's own by --tokenizer."
            )

    def run(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        ignore_eos: bool = False,
        write: Callable[[str], object] | None = None,
    ) -> list[Sample]:
        """Continue each of `prompts`, and return them in order. The batch ends where its longest
        text reaches the context. `write` gets the text of the first one as it comes."""
        context = self._args.max_seq_len
        starts = [encode_prompt(prompt, self._tokenizer, context=context) for prompt in prompts]
        made: list[list[int]] = [[] for _ in starts]
        room = context - max(map(len, starts))
        ended: list[End] = ["context" if room < max_new_tokens else "length"] * len(starts)
        done, printed = [False] * len(starts), ""

        tokens = self._tokens(starts, count=min(room, max_new_tokens), sampling=sampling)
        for row in tokens:
            for index, token in enumerate(row):
                if done[index]:
                    continue
                if token == self._tokenizer.eos_id and not ignore_eos:
                    done[index], ended[index] = True, "eos"
                else:
                    made[index].append(token)
            text = self._text(starts[0], made[0]) if write else ""
            if write and not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a part of a character
                write(text[len(printed) :])
                printed = text
            if all(done):
                break
        texts = list(map(self._text, starts, made))
        if write:
            write(texts[0][len(printed) :])
        return [Sample(*each) for each in zip(prompts, texts, map(len, made), ended, strict=True)]

    def _text(self, start: list[int], made: list[int]) -> str:
        """Return the text of the tokens `made` after those of a prompt."""
        # Some tokenizers drop a space at the start of a text.
        prompt = self._tokenizer.decode(start)
        return self._tokenizer.decode([*start, *made])[len(prompt) :]

    @torch.inference_mode()
    def _tokens(
        self, starts: list[list[int]], *, count: int, sampling: Sampling
    ) -> Iterator[list[int]]:
        """Yield the next token of each prompt, `count` times. Prompts are padded on the left."""
        model, like = self._model, self._model.tok_embeddings.weight
        device = like.device
        longest = max(map(len, starts))
        padding = torch.tensor([longest - len(start) for start in starts], device=device)
        rows = [[0] * (longest - len(start)) + start for start in starts]
        tokens = torch.tensor(rows, device=device)  # [B, S]
        generator = torch.Generator().manual_seed(sampling.seed)

        size = {"batch": len(starts), "length": longest + count}
        tables = rope_table(replace(self._args, max_seq_len=longest + count))
        model.rope_cos, model.rope_sin = (table.to(device) for table in tables)
        for module in model.modules():
            if isinstance(module, Attention):
                module.attend = KVCache(self._args, **size, like=like)
        for length in range(longest, longest + count):
            logits = self._logits(tokens, length, padding)[:, : self._tokenizer.vocab_size]
            chosen = sampling.choose(logits, generator)
            yield chosen.tolist()
            tokens = chosen.unsqueeze(1)

    def _logits(self, tokens: Tensor, length: int, padding: Tensor) -> Tensor:
        """Return the logits [B, V] after `tokens` [B, S], the last S of `length` places. The first
        `padding` [B] places of each prompt are padding."""
        model, places = self._model, torch.arange(length, device=tokens.device)  # [T]
        queries = places[-tokens.shape[1] :]  # [S]
        positions = (queries - padding[:, None]).clamp(min=0)  # [B, S]
        # A place of padding attends to itself, as a softmax over nothing is not a number. Flash
        # attention takes no mask, and whole prompts of one length need none.
        earlier = (places <= queries[:, None]) & (places >= padding[:, None, None])  # [B, S, T]
        mask: Tensor | None = (earlier | (places == queries[:, None])).unsqueeze(1)
        if len(queries) == length and not padding.any():
            mask = None

        x = model.tok_embeddings(tokens)
        with sdpa_kernel(ATTENTION):
            for layer in model.layers.values():
                x = layer(x, model.rope_cos[positions], model.rope_sin[positions], mask)
        logits: Tensor = model.output(model.norm(x[:, -1:]))
        return logits.squeeze(1)


def build_empty_model(args: ModelArgs, *, device: torch.device, dtype: torch.dtype) -> Transformer:
    """Build a model on one device, with weights of any values. Its rotary tables are empty: the
    context that a file states may be any number."""
    with torch.device("meta"):
        model = Transformer(args).to(dtype).requires_grad_(False)
    model.rope_cos = model.rope_sin = torch.empty(0)
    return model.to_empty(device=device)
