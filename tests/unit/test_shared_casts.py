"""Compiled float8 casts each tensor once, and computes the same as without that pass."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._inductor import config

from torchtitan_lite.config import Float8Config
from torchtitan_lite.float8.convert import convert_linears
from torchtitan_lite.float8.graph_passes import add_passes
from torchtitan_lite.float8.recipes import RECIPES
from torchtitan_lite.float8.selection import select_linears
from torchtitan_lite.models.flavors import FLAVORS
from torchtitan_lite.models.llama3 import Transformer

N, D, F, KV = 64, 256, 896, 128  # tokens, dim, ffn_dim, width of all keys: 8B's over 16
ARGS = replace(
    FLAVORS["8B"],
    dim=D,
    n_heads=2,
    n_kv_heads=1,
    ffn_dim=F,
    n_layers=1,
    vocab_size=16,
    max_seq_len=N,
)


def build_block() -> nn.Module:
    """A block on CPU with real float8 matmuls, which PyTorch has there too."""
    with torch.device("meta"):
        model = Transformer(ARGS)
    choices = select_linears(
        model, filter_fqns=(), tp_degree=1, tokens=N, recipe=RECIPES["tensorwise"]
    )
    float8 = Float8Config.model_validate({"recipe_name": "tensorwise"})
    convert_linears(model, choices, float8=float8, emulate=False)
    block = model.layers["0"].to_empty(device="cpu").bfloat16()
    for weight in block.parameters():
        nn.init.normal_(weight, std=0.02)
    return block


def count_casts(*, shared: bool) -> list[int]:
    """Float8 elements that the compiler's kernels write, forward and backward."""
    found: list[int] = []

    def count(nodes: list) -> list:
        outputs = [out.node for node in nodes if not node.is_extern() for out in node.get_outputs()]
        float8 = (torch.float8_e4m3fn, torch.float8_e5m2)
        found.append(sum(int(out.get_numel()) for out in outputs if out.get_dtype() in float8))
        return nodes

    block = build_block()
    x = torch.randn(1, N, D).bfloat16().requires_grad_()
    cos, sin = torch.randn(2, N, ARGS.head_dim // 2)
    torch._dynamo.reset()
    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    settings = {"fx_graph_cache": False, "_post_fusion_custom_pass": count}
    with uncached, config.patch(post_grad_custom_post_pass=None, **settings):
        if shared:
            add_passes(["post_grad_custom_post_pass"])
        torch.compile(block, fullgraph=True)(x, cos, sin, None).sum().backward()
    return found


@pytest.fixture(scope="module")
def weights() -> int:
    """Elements of a block's linears."""
    return D * (2 * D + 2 * KV) + 3 * D * F


def test_each_input_is_cast_once(weights: int) -> None:
    # The inputs of wq, wk and wv; of wo; of w1 and w3; of w2.
    inputs = N * (3 * D + F)
    # The gradient of each output is cast twice: as it is, and transposed.
    gradients = N * (2 * D + 2 * KV + 2 * F + D)
    assert count_casts(shared=True) == [inputs + weights, inputs + weights + 2 * gradients]
    # Without the pass, Inductor writes two casts of inputs more.
    forward, _ = count_casts(shared=False)
    assert forward == inputs + weights + 2 * N * D


def test_shared_casts_change_no_result() -> None:
    x = torch.randn(32, 64).bfloat16()
    one = torch.ones(())
    weights = [torch.randn(48, 64).to(torch.float8_e4m3fn).t() for _ in range(2)]

    def multiply(x: torch.Tensor) -> list[torch.Tensor]:
        cast = (x * 2).to(torch.float8_e4m3fn)
        return [
            torch._scaled_mm(cast, weight, one, one, out_dtype=torch.bfloat16) for weight in weights
        ]

    expected = multiply(x)
    torch._dynamo.reset()
    with config.patch(post_grad_custom_post_pass=None):  # restores it for the other tests
        add_passes(["post_grad_custom_post_pass"])
        found = torch.compile(multiply, fullgraph=True)(x)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
