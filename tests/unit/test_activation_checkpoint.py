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
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from torchtitan_lite.config import ActivationCheckpointConfig, Float8Config
from torchtitan_lite.float8.convert import convert_linears
from torchtitan_lite.float8.selection import select_linears
from torchtitan_lite.metrics.flops import count_flops
from torchtitan_lite.models import llama3
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer, document_mask
from torchtitan_lite.parallel.activation_checkpoint import (
    apply_activation_checkpointing,
    recomputed_modules,
)

ARGS = ModelArgs(
    dim=64, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=48, max_seq_len=32
)
MASKED = replace(ARGS, document_bos_id=0)
RECIPES = (None, "tensorwise", "mxfp8")
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


def build_model(*, recipe: str | None, args: ModelArgs = ARGS) -> Transformer:
    with torch.device("meta"):
        model = Transformer(args)
    if recipe is not None:
        choices = select_linears(model, filter_fqns=(), tp_degree=1, tokens=64)
        convert_linears(model, choices, float8=Float8Config(recipe_name=recipe), emulate=True)
    return model


def materialise(
    ac: ActivationCheckpointConfig, *, recipe: str | None, args: ModelArgs = ARGS
) -> Transformer:
    """The model with its weights, checkpointed."""
    model = build_model(recipe=recipe, args=args)
    apply_activation_checkpointing(model, ac)
    model.to_empty(device="cpu")
    init_weights(model, seed=0)
    return model


@cache
def backward(
    ac: ActivationCheckpointConfig, *, recipe: str | None, args: ModelArgs = ARGS
) -> tuple[Counter[str], list[torch.Tensor]]:
    """Calls of each operator in a backward pass, and the gradients."""
    model = materialise(ac, recipe=recipe, args=args)
    torch.manual_seed(0)
    loss = model(torch.randint(0, 48, (2, 32))).square().mean()
    with OpCounter() as counter:
        loss.backward()
    return counter.calls, [
        parameter.grad for parameter in model.parameters() if parameter.grad is not None
    ]


NONE = ActivationCheckpointConfig(mode="none")
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("mode", "option", "blocks"),
    [
        ("none", "op", 0),
        ("full", "op", 4),
        ("selective", "2", 2),
        ("selective", "3", 2),
        ("selective", "4", 1),
    ],
)
def test_whole_blocks_are_recomputed(
    mode: str, option: str, blocks: int, recipe: str | None
) -> None:
    ac = ActivationCheckpointConfig.model_validate({"mode": mode, "selective_ac_option": option})
    calls, gradients = backward(ac, recipe=recipe)
    # Recomputation ends once everything saved is back: before w2, or, as a float8 linear saves its
    # input after its matmul, behind it.
    assert calls["mm"] == BACKWARD_MATMULS + blocks * (6 if recipe is None else 7)
    assert calls[FLASH] == blocks
    check_gradients(gradients, recipe=recipe)


def test_without_an_early_stop_blocks_are_recomputed_to_their_end() -> None:
    ac = ActivationCheckpointConfig(mode="full", early_stop=False)
    calls, gradients = backward(ac, recipe=None)
    assert calls["mm"] == BACKWARD_MATMULS + 4 * 7
    check_gradients(gradients, recipe=None)


@pytest.mark.parametrize("args", [ARGS, MASKED], ids=["causal", "masked"])
@pytest.mark.parametrize("recipe", [*RECIPES, "rowwise"])
def test_op_recomputes_every_second_matmul_and_no_attention(
    recipe: str | None, args: ModelArgs
) -> None:
    calls, gradients = backward(ActivationCheckpointConfig(), recipe=recipe, args=args)
    assert calls["mm"] == BACKWARD_MATMULS + 4 * 3  # wk, wo and w3 of each block
    assert FLASH not in calls
    kept, _ = backward(NONE, recipe=recipe, args=args)
    assert (calls["max"], calls["amax"]) == (kept["max"], kept["amax"])  # of casts
    check_gradients(gradients, recipe=recipe, args=args)


def check_gradients(
    gradients: list[torch.Tensor], *, recipe: str | None, args: ModelArgs = ARGS
) -> None:
    _, expected = backward(NONE, recipe=recipe, args=args)
    assert len(gradients) == len(expected) == 4 * 9 + 3
    for gradient, reference in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, reference)


MODES = [
    ("none", "op"),
    ("full", "op"),
    ("selective", "op"),
    ("selective", "2"),
    ("selective", "3"),
]


def recompute_of(model: Transformer, ac: ActivationCheckpointConfig) -> int:
    """FLOPs per token that the ledger counts as recomputed on meta, where attention is no fused
    operator."""
    in_float8 = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear
    }
    ledger = count_flops(
        model,
        ARGS,
        seq_len=32,
        high_precision="fp32",
        float8_matmuls={},
        recomputed=recomputed_modules(
            model, ac, compiled=False, fused_attention=False, in_float8=in_float8
        ),
    )
    return sum(ledger.recompute.values())


@cache
def pytorch_count(ac: ActivationCheckpointConfig, recipe: str | None) -> int:
    """FLOPs of a forward and a backward pass on meta."""
    model = build_model(recipe=recipe)
    apply_activation_checkpointing(model, ac)
    tokens = torch.zeros(2, 32, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("mode", "option"), MODES)
def test_what_is_counted_as_recomputed_is_what_pytorch_counts(
    mode: str, option: str, recipe: str | None, early_stop: bool
) -> None:
    ac = ActivationCheckpointConfig.model_validate(
        {"mode": mode, "selective_ac_option": option, "early_stop": early_stop}
    )
    expected = recompute_of(build_model(recipe=recipe), ac)
    assert pytorch_count(ac, recipe) - pytorch_count(NONE, recipe) == 2 * 32 * expected
    assert (expected == 0) == (mode == "none")


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
    model = materialise(ac, recipe=recipe)
    torch._dynamo.reset()
    block = model.layers["0"]
    block.compile(backend=backend, fullgraph=True)
    block(
        torch.randn(1, 32, 64, requires_grad=True), model.rope_cos, model.rope_sin, mask
    ).sum().backward()
    return calls


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("mode", "early_stop"), [("full", True), ("full", False), ("selective", True)]
)
def test_a_compiled_block_recomputes_what_is_counted(
    mode: str, early_stop: bool, recipe: str | None
) -> None:
    ac = ActivationCheckpointConfig.model_validate({"mode": mode, "early_stop": early_stop})
    model = build_model(recipe=recipe)
    linears = [
        name
        for name in recomputed_modules(model, ac, compiled=True, fused_attention=True)
        if name.startswith("layers.0.") and isinstance(model.get_submodule(name), nn.Linear)
    ]
    assert len(linears) == {"full": 6, "selective": 3}[mode]
    assert compiled_backward(ac, recipe=recipe)[torch.ops.aten.mm.default] == 2 * 7 + len(linears)


@pytest.mark.parametrize(("mode", "recomputed"), [("full", 1), ("selective", 0)])
def test_a_compiled_block_keeps_flex_attention_under_op(
    mode: str, recomputed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama3, "create_mask", flex_attention.create_block_mask)  # as on CUDA
    monkeypatch.setattr(flex_attention, "_validate_device", lambda query, key, value: None)
    mask = document_mask(torch.zeros(1, 32, dtype=torch.long), torch.arange(32))
    calls = compiled_backward(
        ActivationCheckpointConfig.model_validate({"mode": mode}), recipe=None, mask=mask
    )
    assert calls[torch.ops.higher_order.flex_attention_backward] == 1
    assert calls[torch.ops.higher_order.flex_attention] == recomputed


@pytest.mark.parametrize(("mode", "recomputed"), [("full", 4), ("selective", 0)])
def test_an_eager_block_keeps_attention_that_alone_is_compiled_under_op(
    mode: str, recomputed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llama3._compiled_flex_attention().get_compiler_config()["wrap_inductor_compiled_regions"]
    # In place of FlexAttention, whose backward pass needs a GPU.
    attend = partial(F.scaled_dot_product_attention, enable_gqa=True)
    compiled = torch.compile(attend, options={"wrap_inductor_compiled_regions": True})
    monkeypatch.setattr(llama3, "attend", compiled)
    model = materialise(
        ActivationCheckpointConfig.model_validate({"mode": mode}), recipe=None, args=MASKED
    )
    loss = model(torch.randint(0, 48, (2, 32))).sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        loss.backward()
    assert sum(event.name == f"aten::{FLASH}" for event in profiler.events()) == recomputed


def test_attention_that_is_no_fused_operator_is_recomputed() -> None:
    names = recomputed_modules(
        build_model(recipe=None),
        ActivationCheckpointConfig(),
        compiled=False,
        fused_attention=False,
    )
    assert {name for name in names if name.endswith(".attention")} == {
        f"layers.{i}.attention" for i in range(4)
    }


def test_none_leaves_the_model_as_it_is() -> None:
    with torch.device("meta"):
        model = Transformer(ARGS)
    before = [type(layer) for layer in model.layers.values()]
    apply_activation_checkpointing(model, NONE)
    assert [type(layer) for layer in model.layers.values()] == before
    assert isinstance(model, nn.Module)
