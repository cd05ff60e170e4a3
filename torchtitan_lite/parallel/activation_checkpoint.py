"""Activation checkpointing: what the backward pass recomputes instead of keeping."""

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan_lite.config import ActivationCheckpointConfig
from torchtitan_lite.models.flavors import BLOCK_LINEARS

aten = torch.ops.aten
MATMULS = {aten.mm.default, aten._scaled_mm.default}
"""A float8 matmul is a matmul: aten.mm of float8 tensors where it is emulated or eager, _scaled_mm
where compiled."""
SAVED = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,  # in a compiled block
    torch.ops.higher_order.inductor_compiled_code,  # in an eager one, where FlexAttention alone is compiled
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    aten.max.default,  # the amax of a float8 cast of a tensor: small, and the recomputed cast needs nothing else
    aten.amax.default,  # and of its rows
}
"""What is kept besides every second matmul: dear to compute or to communicate, cheap to keep."""
LINEARS = tuple(BLOCK_LINEARS)
"""The linears of a block in the order in which its forward calls them."""


def _keep_every_second_matmul(
    seen: Counter[str], ctx: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
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


def recomputed_modules(
    model: nn.Module, ac: ActivationCheckpointConfig, *, compiled: bool, fused_attention: bool
) -> frozenset[str]:
    """Names of the linears and `attention` modules of `model`, still unwrapped, whose forward the
    backward pass will run again.

    A checkpointed block is run again up to the last tensor that backward needs: that is what w2
    read, so that w2 is not run, unless it is a float8 one in an eager block, which saves what it
    read after its matmul. Attention that is not one of the fused operators is no operator to
    keep."""
    layers = model.get_submodule("layers")
    names = []
    for i in ac.checkpointed_layers(len(list(layers.children()))):
        if ac.keeps_by_op:
            parts = [*LINEARS[1::2], *([] if fused_attention else ["attention"])]
        else:
            eager_float8 = (
                type(layers.get_submodule(f"{i}.{LINEARS[-1]}")) is not nn.Linear and not compiled
            )
            parts = [*LINEARS[: None if eager_float8 else -1], "attention"]
        names += [f"layers.{i}.{part}" for part in parts]
    return frozenset(names)


def apply_activation_checkpointing(model: nn.Module, ac: ActivationCheckpointConfig) -> None:
    """Wrap the blocks of `model` in place as [activation_checkpoint] says: none, all, every n-th,
    or all with the "op" policy, which keeps attention, the scattered sums of tensor parallelism and
    every second matmul."""
    contexts: dict[str, Any] = {"context_fn": _op_contexts} if ac.keeps_by_op else {}
    layers = model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList), "the blocks of a Transformer are a ModuleList"
    for i in ac.checkpointed_layers(len(layers)):
        layers[i] = checkpoint_wrapper(layers[i], preserve_rng_state=False, **contexts)
