"""What each mode recomputes, counted, in high precision and under emulated float8; and that it changes no gradient."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_lite.config import ActivationCheckpointConfig, Float8Config
from torchtitan_lite.float8.convert import convert_linears
from torchtitan_lite.float8.selection import select_linears
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.parallel.activation_checkpoint import apply_activation_checkpointing

ARGS = ModelArgs(dim=64, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=48, max_seq_len=32)
BACKWARD_MATMULS = 2 * (4 * 7 + 1)
"""Two for each linear of four blocks, and for the output."""


class OpCounter(TorchDispatchMode):
    """Counts the calls of each aten operator; one on float8 tensors is one, whatever it does inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] = self.calls.get(func.overloadpacket.__name__, 0) + 1
        return func(*args, **(kwargs or {}))


def backward(ac: ActivationCheckpointConfig, *, float8: bool) -> tuple[dict[str, int], list[torch.Tensor]]:
    """Calls of each operator in a backward pass, and the gradients."""
    with torch.device("meta"):
        model = Transformer(ARGS)
    if float8:
        choices = select_linears(model, filter_fqns=(), sharded_dims={}, tp_degree=1, tokens=64)
        convert_linears(model, choices, float8=Float8Config(enable_float8_linear=True), emulate=True)
    apply_activation_checkpointing(model, ac)
    model.to_empty(device="cpu")
    init_weights(model, seed=0)
    torch.manual_seed(0)
    loss = model(torch.randint(0, 48, (2, 32))).square().mean()
    with OpCounter() as counter:
        loss.backward()
    return counter.calls, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


NONE = ActivationCheckpointConfig(mode="none")
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize("float8", [False, True], ids=["high-precision", "float8"])
@pytest.mark.parametrize(
    ("mode", "option", "blocks"),
    [("none", "op", 0), ("full", "op", 4), ("selective", "2", 2), ("selective", "3", 2), ("selective", "4", 1)],
)
def test_whole_blocks_are_recomputed(mode: str, option: str, blocks: int, float8: bool) -> None:
    ac = ActivationCheckpointConfig.model_validate({"mode": mode, "selective_ac_option": option})
    calls, gradients = backward(ac, float8=float8)
    # Recomputation ends once everything saved is back: before w2, or, as a Float8Linear saves its input after its
    # matmul, behind it.
    assert calls["mm"] == BACKWARD_MATMULS + blocks * (7 if float8 else 6)
    assert calls.get(FLASH, 0) == blocks
    check_gradients(gradients, float8=float8)


@pytest.mark.parametrize("float8", [False, True], ids=["high-precision", "float8"])
def test_op_recomputes_every_second_matmul_and_no_attention(float8: bool) -> None:
    calls, gradients = backward(ActivationCheckpointConfig(), float8=float8)
    assert calls["mm"] == BACKWARD_MATMULS + 4 * 3  # wk, wo and w3 of each block
    assert FLASH not in calls
    check_gradients(gradients, float8=float8)


def check_gradients(gradients: list[torch.Tensor], *, float8: bool) -> None:
    _, expected = backward(NONE, float8=float8)
    assert len(gradients) == len(expected) == 4 * 9 + 3
    for gradient, reference in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, reference)


def test_none_leaves_the_model_as_it_is() -> None:
    with torch.device("meta"):
        model = Transformer(ARGS)
    before = [type(layer) for layer in model.layers]
    apply_activation_checkpointing(model, NONE)
    assert [type(layer) for layer in model.layers] == before
    assert isinstance(model, nn.Module)
