"""What others count as the FLOPs of training one token of a Llama model, forward and backward, for
comparison only."""

from dataclasses import dataclass

from .dimensions import Dimensions


@dataclass(frozen=True)
class Formula:
    """One way of counting."""

    name: str
    used_by: str
    flops_per_token: int
    differs: str
    """What it counts otherwise than this project's `palm` convention does."""


def list_formulas(d: Dimensions, *, parameters: int, seq_len: int) -> list[Formula]:
    """The formulas in use elsewhere, on the same model of so many `parameters`, with its input
    embedding. Formulas for a batch are divided by its tokens."""
    full_attention = 12 * d.n_layers * d.n_heads * d.head_dim * seq_len
    attention_weights = d.dim * d.head_dim * (2 * d.n_heads + 2 * d.n_kv_heads)
    block_weights = attention_weights + 3 * d.dim * d.ffn_dim
    # 96 B s l h^2 (1 + s / 6h + V / 16 l h) per batch, arXiv 2104.04473 (SC21), equation 3.
    megatron_paper = (
        96 * d.n_layers * d.dim**2 + 16 * d.n_layers * d.dim * seq_len + 6 * d.dim * d.vocab_size
    )

    def xtuner(*, recompute: bool) -> int:
        # (3 + AC) L (8 B s h^2 + 4 B s^2 h / (1 + causal) + 4 r B s h^2) + 6 B s h V per batch, r =
        # 1.5 ffn / h.
        layer = 8 * d.dim**2 + 2 * seq_len * d.dim + 6 * d.ffn_dim * d.dim
        return (4 if recompute else 3) * d.n_layers * layer + 6 * d.dim * d.vocab_size

    return [
        Formula(
            "6 N + 12 L H Q T, N = all parameters",
            "PaLM (arXiv 2204.02311, appendix B), nanoGPT, fms-fsdp",
            6 * parameters + full_attention,
            "the embedding look-up and the norms as if they were matmuls",
        ),
        Formula(
            "6 N + 12 L H Q T, N without the input embedding",
            "torchtitan",
            6 * (parameters - d.vocab_size * d.dim) + full_attention,
            "the norms as if they were matmuls",
        ),
        Formula(
            "96 L h^2 (1 + T / 6h + V / 16Lh)",
            "Megatron-LM, the paper (SC21)",
            megatron_paper,
            "every forward twice (full recompute), a GELU MLP 4h wide, as many key-value heads as heads",
        ),
        Formula(
            "6 (linear weights) + 6 L H Q T",
            "Megatron-LM, the code",
            6 * (d.n_layers * block_weights + d.dim * d.vocab_size) + full_attention // 2,
            "half of the attention, the part that the causal mask leaves",
        ),
        Formula(
            "3 L (8h^2 + 2Th + 6 ffn h) + 6hV",
            "XTuner ThroughputHook",
            xtuner(recompute=False),
            "half of the attention; as many key-value heads as heads",
        ),
        Formula(
            "4 L (8h^2 + 2Th + 6 ffn h) + 6hV",
            "XTuner ThroughputHook with activation checkpointing",
            xtuner(recompute=True),
            "half of the attention; as many key-value heads as heads; every block's forward twice",
        ),
    ]
