"""Activation checkpointing: which operators each mode recomputes, in high precision and under
emulated float8, and that gradients do not change."""

from collections import Counter
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from sample_models import SMALL, on_meta, ready
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_lite.config import ActivationCheckpointConfig
from torchtitan_lite.models import llama3
from torchtitan_lite.models.llama3 import Transformer, document_mask
from torchtitan_lite.parallel.activation_checkpoint import (
    apply_activation_checkpointing,
    recomputed_modules,
)

# ----- apply_activation_checkpointing, recomputed_modules -----

ARGS = replace(SMALL, n_layers=4, vocab_size=48, max_seq_len=32)
BACKWARD_MATMULS = 2 * (4 * 7 + 1)
"""Two for each linear of four blocks, and for the output."""


class OpCounter(TorchDispatchMode):
    """Counts the calls of each aten operator; one on float8 tensors is one, whatever it does
    inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def checkpointing(mode: str, option: str = "op", **keys: bool) -> ActivationCheckpointConfig:
    keys = {"mode": mode, "selective_ac_option": option} | keys
    return ActivationCheckpointConfig.model_validate(keys)


def checkpointed(
    ac: ActivationCheckpointConfig, *, recipe: str | None = None, bos_id: int | None = None
) -> Transformer:
    model = on_meta(replace(ARGS, document_bos_id=bos_id), recipe)
    apply_activation_checkpointing(model, ac)
    return ready(model)


def recomputed(ac: ActivationCheckpointConfig, recipe: str | None) -> frozenset[str]:
    """What is counted as recomputed by an eager model."""
    linears = ("attention.wq", "feed_forward.w2")
    in_float8 = {f"layers.{i}.{name}" for i in range(4) for name in linears if recipe}
    return recomputed_modules(
        ac, n_layers=4, compiled=False, fused_attention=True, in_float8=in_float8
    )


NONE = checkpointing("none")
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@cache
def backward(
    ac: ActivationCheckpointConfig, *, recipe: str | None, bos_id: int | None = None
) -> tuple[Counter[str], list[torch.Tensor]]:
    """Calls of each operator in a backward pass, and the gradients."""
    model = checkpointed(ac, recipe=recipe, bos_id=bos_id)
    torch.manual_seed(0)
    loss = model(torch.randint(0, 48, (2, 32))).square().mean()
    with OpCounter() as counter:
        loss.backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert len(gradients) == 4 * 9 + 3
    return counter.calls, gradients


# Recomputation ends once everything saved is back: before w2, or behind it, as a linear in float8
# saves its input after its matmul.
@pytest.mark.parametrize(
    ("ac", "recipe", "blocks", "matmuls"),
    [
        (NONE, None, 0, 0),
        (checkpointing("full"), None, 4, 6),
        (checkpointing("full"), "tensorwise", 4, 7),
        (checkpointing("full"), "mxfp8", 4, 7),
        (checkpointing("full", early_stop=False), None, 4, 7),
        (checkpointing("selective", "2"), None, 2, 6),
        (checkpointing("selective", "3"), None, 2, 6),
        (checkpointing("selective", "4"), None, 1, 6),
    ],
)
def test_whole_blocks_are_recomputed(ac, recipe, blocks, matmuls):
    assert len(recomputed(ac, recipe)) == blocks * (matmuls + 1)  # and attention
    calls, gradients = backward(ac, recipe=recipe)
    assert calls["mm"] == BACKWARD_MATMULS + blocks * matmuls
    assert calls[FLASH] == blocks
    assert all(map(torch.equal, gradients, backward(NONE, recipe=recipe)[1]))


@pytest.mark.parametrize(
    ("recipe", "bos_id"),
    [(None, None), (None, 0), ("tensorwise", None), ("rowwise", None), ("mxfp8", 0)],
)
def test_op_recomputes_every_second_matmul_and_no_attention(recipe, bos_id):
    names = {name.rpartition(".")[2] for name in recomputed(checkpointing("selective"), recipe)}
    assert names == {"wk", "wo", "w3"}
    calls, gradients = backward(checkpointing("selective"), recipe=recipe, bos_id=bos_id)
    assert calls["mm"] == BACKWARD_MATMULS + 4 * 3  # wk, wo and w3 of each block
    assert FLASH not in calls
    kept, expected = backward(NONE, recipe=recipe, bos_id=bos_id)
    assert (calls["max"], calls["amax"]) == (kept["max"], kept["amax"])  # of casts
    assert all(map(torch.equal, gradients, expected))


def compiled_backward(
    ac: ActivationCheckpointConfig, *, recipe: str | None, mask: Any = None
) -> Counter[Any]:
    """Calls of each operator in the compiled backward pass of one block, without generating code
    for it."""
    calls: Counter[Any] = Counter()

    def count(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        calls.update(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=lambda graph, example_inputs: make_boxed_func(graph),
        bw_compiler=count,
        partition_fn=min_cut_rematerialization_partition,
    )
    model = checkpointed(ac, recipe=recipe)
    block = model.layers["0"]
    block.compile(backend=backend, fullgraph=True)
    block(
        torch.randn(1, 32, 64, requires_grad=True), model.rope_cos, model.rope_sin, mask
    ).sum().backward()
    return calls


@pytest.mark.parametrize(
    ("ac", "recipe", "recomputed"),
    [
        (checkpointing("full"), None, 6),
        (checkpointing("full", early_stop=False), None, 6),
        (checkpointing("full"), "tensorwise", 6),
        (checkpointing("selective"), None, 3),
        (checkpointing("selective"), "tensorwise", 3),
        pytest.param(checkpointing("full"), "mxfp8", 6, marks=pytest.mark.slow),
        pytest.param(checkpointing("selective"), "mxfp8", 3, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_block_recomputes_what_is_counted(ac, recipe, recomputed):
    names = recomputed_modules(ac, n_layers=1, compiled=True, fused_attention=True)
    assert sum(not name.endswith(".attention") for name in names) == recomputed
    assert compiled_backward(ac, recipe=recipe)[torch.ops.aten.mm.default] == 2 * 7 + recomputed


@pytest.mark.parametrize(("mode", "recomputed"), [("full", 1), ("selective", 0)])
def test_a_compiled_block_keeps_flex_attention_under_op(mode, recomputed, monkeypatch):
    monkeypatch.setattr(llama3, "create_mask", flex_attention.create_block_mask)  # as on CUDA
    monkeypatch.setattr(flex_attention, "_validate_device", lambda query, key, value: None)
    mask = document_mask(torch.zeros(1, 32, dtype=torch.long), torch.arange(32))
    calls = compiled_backward(checkpointing(mode), recipe=None, mask=mask)
    assert calls[torch.ops.higher_order.flex_attention_backward] == 1
    assert calls[torch.ops.higher_order.flex_attention] == recomputed


@pytest.mark.parametrize(("mode", "recomputed"), [("full", 4), ("selective", 0)])
def test_an_eager_block_keeps_compiled_attention_under_op(mode, recomputed, monkeypatch):
    assert llama3._compiled_flex_attention().get_compiler_config()["wrap_inductor_compiled_regions"]
    # In place of FlexAttention, whose backward pass needs a GPU.
    attend = partial(F.scaled_dot_product_attention, enable_gqa=True)
    compiled = torch.compile(attend, options={"wrap_inductor_compiled_regions": True})
    monkeypatch.setattr(llama3, "attend", compiled)
    model = checkpointed(checkpointing(mode), bos_id=0)
    loss = model(torch.randint(0, 48, (2, 32))).sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        loss.backward()
    assert sum(event.name == f"aten::{FLASH}" for event in profiler.events()) == recomputed


def test_attention_that_is_no_fused_operator_is_recomputed() -> None:
    ac = checkpointing("selective")
    names = recomputed_modules(ac, n_layers=4, compiled=False, fused_attention=False)
    attentions = {f"layers.{i}.attention" for i in range(4)}
    assert {name for name in names if name.endswith(".attention")} == attentions
