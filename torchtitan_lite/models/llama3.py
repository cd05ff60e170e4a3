"""Llama as published by Meta, from Llama 2 to Llama 3.2.

Shapes: B batch, S seq_len, D dim, H heads, K key-value heads, Q head_dim, F ffn_dim, V vocab_size.
Under tensor parallelism H, K and F are this rank's share.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)

from torchtitan_lite.catalog.flavors import ModelArgs

Mask = Tensor | BlockMask | None
"""The keys to which each query attends; None: those up to its own position."""

# FlexAttention is compiled even if blocks are not: eager, it computes S x S values. The compiler is
# loaded at the first use.
_compile_once = cache(torch.compile)


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    # Wrapped as one operator, so that activation checkpointing can keep its output.
    return torch.compile(flex_attention, options={"wrap_inductor_compiled_regions": True})


def rope_frequencies(args: ModelArgs) -> Tensor:
    """Return the rotation per position, in radians, of each pair of dimensions, [Q/2] float32.

    RoFormer (arXiv 2104.09864), with Llama 3.1's scaling: wavelengths longer than the old context
    are stretched by `factor`, short ones kept, and those between interpolated."""
    frequencies = args.rope_theta ** -(torch.arange(0, args.head_dim, 2).double() / args.head_dim)
    if (scaling := args.rope_scaling) is not None:
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
    return frequencies.float()


def rope_table(args: ModelArgs) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of all positions' angles, each [max_seq_len, Q/2] float32."""
    angles = torch.outer(torch.arange(args.max_seq_len).float(), rope_frequencies(args))
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate dimensions (0, 1), (2, 3), ... of each head of `x` [B, S, H, Q], in float32: the pairs
    of Meta's checkpoints. `cos` and `sin` are [S, Q/2] or [B, S, Q/2]."""
    pairs = x.float().unflatten(-1, (-1, 2))  # [B, S, H, Q/2, 2]
    if torch.compiler.is_compiling():
        # The compiler has no complex numbers. It fuses this form into one kernel, but would store a
        # tensor that is stacked from two halves.
        cos, sin = (table[..., None, :, None] for table in (cos, sin))  # [(B,) S, 1, Q/2, 1]
        rotated = pairs * cos + pairs.flip(-1) * (sin * torch.arange(-1, 2, 2, device=x.device))
    else:
        turns = torch.complex(cos.float(), sin.float()).unsqueeze(-2)  # [(B,) S, 1, Q/2]
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * turns)
    return rotated.flatten(-2).to(x.dtype)


def document_starts(tokens: Tensor, *, bos_id: int) -> Tensor:
    """Return for each of `tokens` [B, S] the index of the `bos_id` at which its document starts,
    [B, S]; 0 before the first one."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(tokens == bos_id, index, 0).cummax(1).values


def document_mask(starts: Tensor, queries: Tensor) -> Tensor | BlockMask:
    """Let the `queries` [s] of a sequence, by index, attend to the keys of their own document up to
    themselves. `starts` [B, S] is from `document_starts`.

    Return a BlockMask for FlexAttention, which does not train on CPU: there return booleans
    [B, 1, s, S], True for keys that take part."""
    batch_size, seq_len = starts.shape

    def sees(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        query = queries[row]
        return (starts[b, query] <= key) & (key <= query)

    create: Any = _compile_once(create_block_mask) if starts.is_cuda else create_mask
    return create(sees, batch_size, None, len(queries), seq_len, device=starts.device)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Return the attention [B, H, S, Q] of `q` [B, H, S, Q] to `k` and `v` [B, K, S, Q], causal if
    `mask` is None."""
    if isinstance(mask, BlockMask):
        if torch.compiler.is_compiling():  # it is compiled with its block
            return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        return _compiled_flex_attention()(q, k, v, block_mask=mask, enable_gqa=True)

    dtype = q.dtype
    if not q.is_cuda and q.shape[-1] <= 32:  # on CPU float32 is then up to 2.7 times as fast
        q, k, v = q.float(), k.float(), v.float()
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return out.to(dtype)


class Attention(nn.Module):
    """Causal self-attention in which each key-value head serves H/K query heads."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.q_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.kv_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.kv_dim, bias=False)
        self.wo = nn.Linear(args.q_dim, args.dim, bias=False)
        self.attend: Callable[..., Tensor] = attend
        """Replaced if other ranks have a part of the keys and values."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        """Attend within `x` [B, S, D]."""
        heads = (-1, self.head_dim)
        q = apply_rope(self.wq(x).unflatten(-1, heads), cos, sin)  # [B, S, H, Q]
        k = apply_rope(self.wk(x).unflatten(-1, heads), cos, sin)  # [B, S, K, Q]
        v = self.wv(x).unflatten(-1, heads)  # [B, S, K, Q]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, H or K, S, Q]
        return self.wo(self.attend(q, k, v, mask).transpose(1, 2).flatten(-2))  # [B, S, D]


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): w2(silu(w1 x) * w3 x)."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.ffn_dim, bias=False)
        self.w2 = nn.Linear(args.ffn_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward layer to `x` [B, S, D]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(args)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = FeedForward(args)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        """Apply the block to `x` [B, S, D]."""
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Output(nn.Linear):
    """The projection to the vocabulary, which a `head` can fuse with the loss."""

    def forward(self, x: Tensor, head: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """Return the logits [B, S, V] of `x` [B, S, D], or `head(x, weight)`, weight [V, D]."""
        return super().forward(x) if head is None else head(x, self.weight)


class Transformer(nn.Module):
    """A Llama 3 language model. Build it on meta, then call `to_empty` and `init_weights`.

    A stage of a pipeline has some of the `layers`, and None for the ends that other stages have."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        cos, sin = rope_table(args)
        self.rope_cos: Tensor = nn.Buffer(cos, persistent=False)
        self.rope_sin: Tensor = nn.Buffer(sin, persistent=False)
        blocks = {str(i): TransformerBlock(args) for i in range(args.n_layers)}
        self.layers = nn.ModuleDict(blocks)
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output = Output(args.dim, args.vocab_size, bias=False)
        self.tie_weights()
        self.shard_sequence: Callable[[Tensor, int], Tensor] = lambda x, dim: x
        """Returns what this rank computes of a tensor whose given dimension is a sequence."""

    def tie_weights(self) -> None:
        """If `tie_embeddings`, make the embedding's weight the output's, after it was replaced."""
        if self.args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def _apply(self, *args: Any, **kwargs: Any) -> "Transformer":
        # `to_empty` replaces each parameter of each module.
        super()._apply(*args, **kwargs)
        self.tie_weights()
        return self

    def forward(
        self,
        tokens: Tensor,
        head: Callable[[Tensor, Tensor], Tensor] | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Return logits [B, s, V] for the token after each of `tokens` [B, S], of this rank's part
        of each sequence; with a `head`, its result, see `Output`.

        `hidden` [B, s, D] is the residual stream from the stage before. A stage without an output
        returns its own."""
        if self.args.tie_embeddings:
            tied = self.output.weight is self.tok_embeddings.weight
            assert tied, "something has replaced parameters"
        seq_len = tokens.shape[1]

        # With a document mask, positions restart at each document.
        if (bos_id := self.args.document_bos_id) is None:
            tables = self.rope_cos[:seq_len], self.rope_sin[:seq_len]
            cos, sin = (self.shard_sequence(table, 0) for table in tables)
            mask = None  # the tables are [s, Q/2]
        else:
            index = self.shard_sequence(torch.arange(seq_len, device=tokens.device), 0)  # [s]
            starts = document_starts(tokens, bos_id=bos_id)
            positions = index - starts[:, index]
            cos, sin = self.rope_cos[positions], self.rope_sin[positions]  # [B, s, Q/2]
            mask = document_mask(starts, index)

        if hidden is None:
            hidden = self.tok_embeddings(self.shard_sequence(tokens, 1))
        x = hidden  # [B, s, D]
        for layer in self.layers.values():
            x = layer(x, cos, sin, mask)
        if self.output is None:
            return x
        x = self.norm(x)
        # A Float8Linear, which can replace the Output, takes no head.
        return self.output(x) if head is None else self.output(x, head)
