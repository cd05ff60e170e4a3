"""Zero-bubble schedules run the backward pass of a stage in two parts. These tests say with what
that is right, and fail once torch has fixed what config/pipeline.py refuses."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from torchtitan_lite.config import ActivationCheckpointConfig, Float8Config
from torchtitan_lite.float8.convert import convert_linears
from torchtitan_lite.float8.observe import StepObserver
from torchtitan_lite.float8.selection import select_linears
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.models.loss import CrossEntropy
from torchtitan_lite.parallel.activation_checkpoint import apply_activation_checkpointing
from torchtitan_lite.parallel.microbatches import ModelLoss
from torchtitan_lite.parallel.parallelize import compile_blocks
from torchtitan_lite.parallel.pipeline import cut_stage

ARGS = ModelArgs(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=64)
TOKENS = torch.arange(32).view(2, 16)
HIDDEN = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1))


def last_stage(*, float8: bool = False, full: bool = False, compiled: bool = False) -> Transformer:
    with torch.device("meta"):
        model = Transformer(replace(ARGS, max_seq_len=16))
    if float8:
        choices = select_linears(model, filter_fqns=(), tp_degree=1, tokens=32)
        convert_linears(model, choices, float8=Float8Config(), emulate=True)
    stage = cut_stage(model, ("layers.1", "norm", "output"))
    mode = "full" if full else "none"
    apply_activation_checkpointing(stage, ActivationCheckpointConfig(mode=mode))
    if compiled:
        compile_blocks(stage)
    stage.to_empty(device="cpu")
    init_weights(stage, seed=0)
    return stage


def gradients(stage: Transformer, *, in_two_parts: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradients of the hidden state and, by name, of the weights."""
    loss = ModelLoss(stage, CrossEntropy(compiled=False, repeatable=True), gathers_logits=False)
    hidden = HIDDEN.clone().requires_grad_()
    out = loss(TOKENS, TOKENS, hidden, scale=1 / 32)
    if in_two_parts:
        _, groups = stage_backward_input([out], None, [hidden], stage.parameters())
        stage_backward_weight(stage.parameters(), groups)
    else:
        out.backward()
    assert hidden.grad is not None
    return hidden.grad, {name: weight.grad for name, weight in stage.named_parameters()}


def differs(make: Callable[[], Transformer]) -> bool:
    """Whether the backward pass in two parts fails, or has other gradients than in one."""
    expected_hidden, expected = gradients(make(), in_two_parts=False)
    try:
        hidden, found = gradients(make(), in_two_parts=True)
    except RuntimeError:
        return True
    close = [torch.allclose(hidden, expected_hidden, rtol=1e-4, atol=1e-7)]
    for name, weight in expected.items():
        close.append(
            found[name] is not None and torch.allclose(found[name], weight, rtol=1e-4, atol=1e-7)
        )
    return not all(close)


def matmuls(*, in_two_parts: bool, **stage: bool) -> int:
    """The matmuls of the forward and backward pass."""
    with StepObserver() as observer:
        gradients(last_stage(**stage), in_two_parts=in_two_parts)
    return observer.matmuls.total()


def test_eager_stages_have_the_same_gradients_in_two_parts_and_in_bf16_for_the_same_matmuls() -> (
    None
):
    assert not differs(last_stage)
    assert matmuls(in_two_parts=True) == matmuls(in_two_parts=False)


def test_compiled_stages_are_still_refused_for_a_reason() -> None:
    """pytorch/pytorch#161904"""
    assert differs(lambda: last_stage(compiled=True))


@pytest.mark.parametrize("stage", [{"float8": True}, {"full": True}])
def test_float8_and_checkpointing_still_repeat_matmuls(stage: dict[str, bool]) -> None:
    """pytorch/pytorch#164756"""
    assert matmuls(in_two_parts=True, **stage) > matmuls(in_two_parts=False, **stage)
