"""Activation checkpointing: what the backward pass recomputes instead of keeping."""

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan_lite.config import ActivationCheckpointConfig

aten = torch.ops.aten
MATMULS = {aten.mm.default, aten._scaled_mm.default}
"""A float8 matmul is a matmul: aten.mm of float8 tensors where it is emulated or eager, _scaled_mm where compiled."""
SAVED = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    aten.max.default,  # the amax of a float8 cast: small, and the recomputed cast needs nothing else
}
"""What is kept besides every second matmul: dear to compute or to communicate, cheap to keep."""


def _keep_every_second_matmul(seen: Counter[str], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op in MATMULS:
        phase = "recompute" if ctx.is_recompute else "forward"
        seen[phase] += 1
        keep = seen[phase] % 2 == 1
    else:
        keep = op in SAVED
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _op_contexts() -> Any:
    # A new count for each block and pass: the recomputation must decide as the forward did.
    return create_selective_checkpoint_contexts(partial(_keep_every_second_matmul, Counter()))


def apply_activation_checkpointing(model: nn.Module, ac: ActivationCheckpointConfig) -> None:
    """Wrap the blocks of `model` in place as [activation_checkpoint] says: none, all, every n-th, or all with the "op"
    policy, which keeps attention, the scattered sums of tensor parallelism and every second matmul."""
    if ac.mode == "none":
        return
    by_op = ac.mode == "selective" and ac.selective_ac_option == "op"
    every = int(ac.selective_ac_option) if ac.mode == "selective" and not by_op else 1
    contexts: dict[str, Any] = {"context_fn": _op_contexts} if by_op else {}
    layers = model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList), "the blocks of a Transformer are a ModuleList"
    for i, block in enumerate(layers):
        if i % every == 0:
            layers[i] = checkpoint_wrapper(block, preserve_rng_state=False, **contexts)
