"""Which kernel computes attention.

PyTorch chooses among the backends of scaled_dot_product_attention (SDPA) in a fixed order: cuDNN
first on Hopper and Blackwell (sm90, sm100) if its version has no known faults, flash attention
first elsewhere. That order is kept. On Hopper `sdpa_kernel(..., set_priority=True)` could not
replace it: the first choice in a process overwrites the order (torch 2.11 to 2.13).
"""

import torch
from torch.nn.attention import SDPBackend

from .flavors import ModelArgs


def attention_backend(
    args: ModelArgs, *, tp_degree: int, dtype: torch.dtype, device: torch.device
) -> str:
    """Return what computes this rank's attention: FLEX_ATTENTION or the name of an SDPA backend.

    MATH, of all backends the only one that is not fused, stores all S x S scores."""
    masked = args.document_bos_id is not None
    if masked and device.type == "cuda":
        return "FLEX_ATTENTION"

    # Tensors as the model passes them: [1, heads, S, Q], with S before the heads in memory.
    q, k, v = (
        torch.empty(
            (1, args.max_seq_len, heads // tp_degree, args.head_dim), dtype=dtype, device=device
        )
        .transpose(1, 2)
        .requires_grad_()
        for heads in (args.n_heads, args.n_kv_heads, args.n_kv_heads)
    )
    mask = None
    if masked:
        shape = (1, 1, args.max_seq_len, args.max_seq_len)
        mask = torch.ones(shape, dtype=torch.bool, device=device)
    chosen = torch._fused_sdp_choice(q, k, v, attn_mask=mask, is_causal=not masked, enable_gqa=True)
    return SDPBackend(chosen).name
