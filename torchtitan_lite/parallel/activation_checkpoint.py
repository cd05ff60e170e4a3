"""Activation checkpointing: what the backward pass recomputes instead of keeping."""

from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan_lite.catalog.flavors import BLOCK_LINEARS
from torchtitan_lite.config import ActivationCheckpointConfig
from torchtitan_lite.models.llama3 import Transformer

aten = torch.ops.aten
MATMULS = {aten.mm.default, aten._scaled_mm.default}
"""Matmuls of linears. In float8: mm if eager or emulated, _scaled_mm if compiled."""
SAVED = {
    # Attention: fused, in a compiled block, and in an eager block, where it alone is compiled.
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
    torch.ops.higher_order.inductor_compiled_code,
    # The sums that tensor parallelism scatters.
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    # The amax of a float8 cast, of a tensor and of its rows: small, and with it the cast can be
    # recomputed without a second pass over its input.
    aten.max.default,
    aten.amax.default,
}
"""Operators besides matmuls whose outputs the "op" policy keeps: expensive to recompute, small."""


def _op_contexts() -> Any:
    # Counts start at 0 for each block and pass: the recomputation must decide as the forward did.
    seen: Counter[bool] = Counter()

    def keep_every_second_matmul(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op in SAVED
        if op in MATMULS:
            seen[ctx.is_recompute] += 1
            keep = seen[ctx.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(keep_every_second_matmul)


def recomputed_modules(
    ac: ActivationCheckpointConfig,
    *,
    n_layers: int,
    compiled: bool,
    fused_attention: bool,
    in_float8: Collection[str] = (),
) -> frozenset[str]:
    """Return the names of the linears and `attention` modules whose forward runs again in backward.

    A block is recomputed up to the last tensor that its backward pass needs, the input of w2.
    Eager, w2 runs again without early_stop, or if it is among the linears `in_float8`, which save
    their input after their matmul. Attention that is not fused has no operator whose output can be
    kept."""
    *others, w2 = linears = list(BLOCK_LINEARS)
    names = []
    for i in ac.checkpointed_layers(n_layers):
        if ac.keeps_by_op:  # every second matmul is kept, from the first on
            parts = linears[1::2] if fused_attention else [*linears[1::2], "attention"]
        elif compiled or (ac.early_stop and f"layers.{i}.{w2}" not in in_float8):
            parts = [*others, "attention"]
        else:
            parts = [*linears, "attention"]

        names += [f"layers.{i}.{part}" for part in parts]
    return frozenset(names)


def apply_activation_checkpointing(model: Transformer, ac: ActivationCheckpointConfig) -> None:
    """Wrap the blocks of `model` in place as [activation_checkpoint] selects them."""
    contexts: dict[str, Any] = {"context_fn": _op_contexts} if ac.keeps_by_op else {}
    checkpointed = {str(i) for i in ac.checkpointed_layers(model.args.n_layers)}
    for i in checkpointed & model.layers.keys():
        model.layers[i] = checkpoint_wrapper(
            model.layers[i], preserve_rng_state=False, early_stop=ac.early_stop, **contexts
        )
