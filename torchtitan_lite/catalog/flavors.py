"""Dimensions, linear names and linear shapes of every Llama flavor.

Shapes: D dim, H heads, K key-value heads, Q head_dim, F ffn_dim, V vocab_size.
"""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of rotary frequencies, Hugging Face's `rope_type` "llama3"."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelArgs:
    """Dimensions of a Llama transformer.

    `vocab_size = 0` takes the tokenizer's. With `tie_embeddings`, the embedding and the projection
    to the vocabulary are one matrix. With a `document_bos_id`, attention stays within documents,
    each of which starts with that id."""

    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int = 8
    ffn_dim: int = 14336
    vocab_size: int = 128256
    max_seq_len: int = 8192
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    document_bos_id: int | None = None

    @property
    def head_dim(self) -> int:
        """Q, the width of one attention head."""
        return self.dim // self.n_heads

    @property
    def q_dim(self) -> int:
        """H * Q, the width of all query heads together."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """K * Q, the width of all key heads together, and of all value heads."""
        return self.n_kv_heads * self.head_dim


_LLAMA_3_8B = ModelArgs()
_LLAMA_3_70B = ModelArgs(dim=8192, n_layers=80, n_heads=64, ffn_dim=28672)
_LLAMA_3_1: dict[str, Any] = {"max_seq_len": 131072, "rope_scaling": RopeScaling()}
_LLAMA_3_2 = _LLAMA_3_1 | {"rope_scaling": RopeScaling(factor=32.0), "tie_embeddings": True}
_SMALL: dict[str, Any] = {"n_kv_heads": 4, "vocab_size": 0, "tie_embeddings": True}
_DEBUG = ModelArgs(dim=256, n_layers=6, n_heads=16, n_kv_heads=16, ffn_dim=768, vocab_size=0)

FLAVORS = {
    # torchtitan's, and one with grouped-query attention.
    "debugmodel": replace(_DEBUG, **_LLAMA_3_1),
    "debugmodel_gqa": replace(_DEBUG, n_kv_heads=8),
    # For one GPU with 24 GB; named by their parameters with a vocabulary of 32,000.
    "150M": ModelArgs(dim=768, n_layers=20, n_heads=12, ffn_dim=2048, **_SMALL),
    "350M": ModelArgs(dim=1024, n_layers=28, n_heads=16, ffn_dim=2816, **_SMALL),
    # Llama 3.2, 3.1 and 3, as in their model cards.
    "1B": ModelArgs(dim=2048, n_layers=16, n_heads=32, ffn_dim=8192, **_LLAMA_3_2),
    "3B": ModelArgs(dim=3072, n_layers=28, n_heads=24, ffn_dim=8192, **_LLAMA_3_2),
    "8B": replace(_LLAMA_3_8B, **_LLAMA_3_1),
    "70B": replace(_LLAMA_3_70B, **_LLAMA_3_1),
    "405B": ModelArgs(dim=16384, n_layers=126, n_heads=128, ffn_dim=53248, **_LLAMA_3_1),
    "3-8B": _LLAMA_3_8B,
    "3-70B": _LLAMA_3_70B,
}


@dataclass(frozen=True)
class BlockLinear:
    """One of a block's seven linears. Sizes are the names of `ModelArgs` attributes."""

    out_features: str
    in_features: str
    reads: str  # the tensor; linears that read the same one share its gather and its float8 cast


BLOCK_LINEARS = {
    "attention.wq": BlockLinear("q_dim", "dim", "attention_norm"),
    "attention.wk": BlockLinear("kv_dim", "dim", "attention_norm"),
    "attention.wv": BlockLinear("kv_dim", "dim", "attention_norm"),
    "attention.wo": BlockLinear("dim", "q_dim", "attention"),
    "feed_forward.w1": BlockLinear("ffn_dim", "dim", "ffn_norm"),
    "feed_forward.w3": BlockLinear("ffn_dim", "dim", "ffn_norm"),
    "feed_forward.w2": BlockLinear("dim", "ffn_dim", "gated"),
}
"""By name within the block, in the order in which its forward calls them."""
OUTPUT = "output"  # the projection to the vocabulary, the only linear outside the blocks

COLUMN_SPLIT = {"attention": ("wq", "wk", "wv"), "feed_forward": ("w1", "w3")}
"""Linears that tensor parallelism splits by columns (out_features), by module of a block."""
ROW_SPLIT = {"attention": "wo", "feed_forward": "w2"}
"""The linear of each module that it splits by rows (in_features), and whose outputs it sums."""


def block_linear_shapes(args: ModelArgs) -> dict[str, tuple[int, int]]:
    """Return (out_features, in_features) of each linear of a block, by its name in the block."""
    return {
        name: (getattr(args, linear.out_features), getattr(args, linear.in_features))
        for name, linear in BLOCK_LINEARS.items()
    }
