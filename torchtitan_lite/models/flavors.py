"""Dimensions, linear names and linear shapes of every Llama 3 flavor. Standard library only, so
that a config is checked without importing torch.

Shapes: D dim, H heads, K key-value heads, Q head_dim, F ffn_dim, V vocab_size.
"""

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency scaling of rotary embeddings (Llama 3.1 model card, `rope_scaling` of
    type "llama3")."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True)
class ModelArgs:
    """What a Llama 3 transformer is made of. `vocab_size = 0` means: as many as the tokenizer has.
    Unless `document_bos_id` is None, attention stays within documents, and each starts with that
    id."""

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
    document_bos_id: int | None = None

    @property
    def head_dim(self) -> int:
        """Q, the width of one attention head."""
        return self.dim // self.n_heads


# Meta's published dimensions (Llama 3 and 3.1 model cards). The Llama 3.1 models reach 131072
# tokens by RoPE scaling.
FLAVORS = {
    "debugmodel": ModelArgs(
        dim=256, n_layers=6, n_heads=16, n_kv_heads=8, ffn_dim=768, vocab_size=0
    ),
    "debugmodel_4layers": ModelArgs(
        dim=256, n_layers=4, n_heads=16, n_kv_heads=8, ffn_dim=768, vocab_size=0
    ),
    "8B": ModelArgs(),
    "70B": ModelArgs(dim=8192, n_layers=80, n_heads=64, ffn_dim=28672),
    "405B": ModelArgs(
        dim=16384,
        n_layers=126,
        n_heads=128,
        ffn_dim=53248,
        max_seq_len=131072,
        rope_scaling=RopeScaling(),
    ),
}


def find_flavor(name: str) -> ModelArgs | None:
    """Return the dimensions of a flavor, or of a flavor with another number of layers:
    `8B_16layers` is 8B with 16 layers. None if there is no such flavor."""
    if name in FLAVORS:
        return FLAVORS[name]
    match = re.fullmatch(r"(.+)_([1-9]\d{0,3})layers", name)
    if match is None or match[1] not in FLAVORS:
        return None
    return replace(FLAVORS[match[1]], n_layers=int(match[2]))


def block_linear_shapes(args: ModelArgs) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of the seven linears of a transformer block, by their name within
    the block."""
    kv_dim = args.n_kv_heads * args.head_dim
    return {
        "attention.wq": (args.dim, args.dim),
        "attention.wk": (kv_dim, args.dim),
        "attention.wv": (kv_dim, args.dim),
        "attention.wo": (args.dim, args.dim),
        "feed_forward.w1": (args.ffn_dim, args.dim),
        "feed_forward.w2": (args.dim, args.ffn_dim),
        "feed_forward.w3": (args.ffn_dim, args.dim),
    }
