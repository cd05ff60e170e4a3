"""Which kernel computes attention: PyTorch's own choice, and the fastest that the device offers,
found by trying.

Shapes: B batch, S seq_len, H heads, K key-value heads, Q head_dim. Under tensor parallelism H and K
are this rank's share.
"""

import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .flavors import ModelArgs

FUSED = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
"""Kernels of SDPA that never have S x S values in memory. Which of them can share a key-value head
among query heads without repeating it, on what device, trying tells."""
TRIALS = 5


def attention_inputs(
    args: ModelArgs, *, batch_size: int, tp_degree: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, H, S, Q], keys and values [B, K, S, Q] of a rank, that require gradients; no
    values are set. In memory S comes before the heads, as in the model."""
    shapes = (
        (batch_size, args.max_seq_len, heads // tp_degree, args.head_dim)
        for heads in (args.n_heads, args.n_kv_heads, args.n_kv_heads)
    )
    q, k, v = (
        torch.empty(shape, dtype=dtype, device=device).transpose(1, 2).requires_grad_()
        for shape in shapes
    )
    return q, k, v


def attention_backend(
    args: ModelArgs, *, tp_degree: int, dtype: torch.dtype, device: torch.device
) -> str:
    """What computes this rank's attention: FLEX_ATTENTION, or the SDPA backend that PyTorch
    chooses, such as FLASH_ATTENTION."""
    masked = args.document_bos_id is not None
    if masked and device.type == "cuda":
        return "FLEX_ATTENTION"
    mask = (
        torch.ones(1, 1, args.max_seq_len, args.max_seq_len, dtype=torch.bool, device=device)
        if masked
        else None
    )
    return _choice(
        *attention_inputs(args, batch_size=1, tp_degree=tp_degree, dtype=dtype, device=device), mask
    ).name


def _choice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> SDPBackend:
    """The backend that PyTorch takes for causal attention, or for attention under `mask`."""
    return SDPBackend(
        torch._fused_sdp_choice(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    )


def time_backends(q: Tensor, k: Tensor, v: Tensor) -> dict[str, float]:
    """Median seconds of causal attention, forward and backward, by each of the FUSED backends that
    can. The inputs are set to random values, on which a GPU's speed depends."""
    generator = torch.Generator(q.device).manual_seed(0)
    with torch.no_grad():
        for tensor in (q, k, v):
            tensor.normal_(generator=generator)
    seconds = {}
    for backend in FUSED:
        try:
            # Allowed alone, a backend that cannot compute attention warns why it cannot.
            with sdpa_kernel([backend, SDPBackend.MATH], set_priority=True):
                if _choice(q, k, v) != backend:
                    continue
                _time(q, k, v)  # the first call may build a plan
                seconds[backend.name] = statistics.median(_time(q, k, v) for _ in range(TRIALS))
        except RuntimeError:  # cuDNN may find no kernel only when it is called
            continue
    return seconds


def _time(q: Tensor, k: Tensor, v: Tensor) -> float:
    began = time.perf_counter()
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.autograd.grad(output, (q, k, v), torch.ones_like(output))
    if q.is_cuda:
        torch.cuda.synchronize(q.device)
    return time.perf_counter() - began


def prefer_backend(name: str) -> None:
    """Have PyTorch take the backend called `name` before others, from now on in this process, where
    it can. What was compiled with another is not taken from the compiler's cache, which does not
    tell them apart."""
    # On Hopper a process's first choice sets an order of its own (torch 2.11 to 2.13): that must be
    # before this one.
    _choice(*torch.empty(3, 1, 1, 1, 8, device="cuda" if torch.cuda.is_available() else "cpu"))
    chosen = getattr(SDPBackend, name)
    order = [chosen, *(other for other in (*FUSED, SDPBackend.MATH) if other != chosen)]
    torch._C._set_sdp_priority_order([int(backend.value) for backend in order])
    torch.compiler.config.cache_key_tag += f" {name}"
