"""What the compiler makes of a block besides matmuls and attention: kernels, the bytes that they
move, and the float8 that they write, beside the least that the matmuls need. A hub.

Counted are the kernels of Inductor's scheduler as it has fused them, before code is generated: on
CPU by nearly the same rules as on a GPU. Shapes: N tokens, D dim, F ffn_dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from torchtitan_lite.config import Float8Config
from torchtitan_lite.float8.convert import convert_linears
from torchtitan_lite.float8.selection import select_linears
from torchtitan_lite.float8.shared_casts import keep_shared_casts
from torchtitan_lite.models.flavors import FLAVORS, ModelArgs, block_linear_shapes
from torchtitan_lite.models.llama3 import Transformer

SCALE = 16
"""By which the dimensions of Llama 3 8B, and its 8192 tokens, are divided: all traffic in
proportion."""
ARGS = replace(
    FLAVORS["8B"],
    dim=256,
    n_heads=2,
    n_kv_heads=1,
    ffn_dim=896,
    n_layers=1,
    vocab_size=16,
    max_seq_len=8192 // SCALE,
)
FLOAT8_TYPES = {torch.float8_e4m3fn, torch.float8_e5m2}
LARGE = 4096
"""Elements of the least tensor that counts: scales and amax are not worth it."""


@dataclass(frozen=True)
class Passes:
    """The kernels of a pass through a block, its forward or its backward, but for matmuls and
    attention."""

    kernels: int
    """That read or write something large."""
    mib: float
    """Read and written, each tensor once a kernel."""
    float8_elements: int
    """Written in float8."""


@contextmanager
def count_passes() -> Iterator[list[Passes]]:
    """A list that receives the Passes of each graph that is compiled meanwhile."""
    from torch._inductor import config

    found: list[Passes] = []

    def count(nodes: list[Any]) -> list[Any]:
        kernels = moved = written = 0
        for node in nodes:
            if node.is_extern():
                continue
            moved_here = sum(
                node.get_read_write_buffer_accesses(
                    include_reads=True, include_writes=True
                ).values()
            )
            kernels += moved_here >= 2 * LARGE
            moved += moved_here
            sizes = [
                int(out.node.get_numel())
                for out in node.get_outputs()
                if out.node.get_dtype() in FLOAT8_TYPES
            ]
            written += sum(sizes)
        found.append(Passes(kernels, moved / 2**20, written))
        return nodes

    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    with uncached, config.patch(fx_graph_cache=False, _post_fusion_custom_pass=count):
        yield found


def measure_passes(
    recipe: str | None, *, shared: bool, args: ModelArgs = ARGS
) -> tuple[Passes, Passes]:
    """The forward and the backward of a block under a float8 `recipe`, in bf16 if that is None;
    with casts `shared` between matmuls as in training, or as Inductor has it."""
    from torch._inductor import config

    block = build_block(recipe, args=args)
    x = torch.randn(1, args.max_seq_len, args.dim).bfloat16().requires_grad_()
    cos, sin = torch.randn(2, args.max_seq_len, args.head_dim // 2)
    torch._dynamo.reset()
    with config.patch(post_grad_custom_post_pass=None), count_passes() as found:
        if shared:
            keep_shared_casts()
        torch.compile(block, fullgraph=True)(x, cos, sin, None).sum().backward()
    forward, backward = found
    return forward, backward


def build_block(recipe: str | None, *, args: ModelArgs) -> nn.Module:
    """A block on CPU with real float8 matmuls, which PyTorch has there too: not the emulation of
    training."""
    with torch.device("meta"):
        model = Transformer(args)
    if recipe is not None:
        choices = select_linears(model, filter_fqns=(), tp_degree=1, tokens=args.max_seq_len)
        float8 = Float8Config.model_validate({"recipe_name": recipe})
        convert_linears(model, choices, float8=float8, emulate=False)
    block = model.layers[0].to_empty(device="cpu").bfloat16()
    for weight in block.parameters():
        nn.init.normal_(weight, std=0.02)
    return block


def least_float8(args: ModelArgs = ARGS) -> tuple[int, int]:
    """Elements that float8 matmuls of a block need written, forward and backward, if all three of a
    linear are in float8. Hopper's take both operands with the dimension that they sum over last:
    forward each input and weight once; backward the weight and the input transposed, and the
    gradient of each output as it is and transposed."""
    shapes, tokens = block_linear_shapes(args), args.max_seq_len
    weights = sum(rows * columns for rows, columns in shapes.values())
    inputs = tokens * (3 * args.dim + args.ffn_dim)  # of wq, wk and wv; of wo; of w1 and w3; of w2
    gradients = tokens * sum(rows for rows, _ in shapes.values())
    return inputs + weights, inputs + weights + 2 * gradients


def format_passes() -> str:
    """A table of all recipes, before and after sharing casts."""
    least = [count / 1e6 for count in least_float8()]
    lines = [
        f"a block with N {ARGS.max_seq_len}, D {ARGS.dim}, F {ARGS.ffn_dim}: Llama 3 8B at 8192 tokens over {SCALE}",
        "kernels besides matmuls and attention, MiB that they move, and 10^6 float8 elements that they write;",
        f"the least with all three matmuls in float8: {least[0]:.3f} forward, {least[1]:.3f} backward",
        f"{'recipe':<20} {'casts':<9} {'forward':>22} {'backward':>22}",
    ]
    for recipe in (None, "tensorwise", "rowwise", "rowwise_with_gw_hp"):
        for shared in (False, True) if recipe else (False,):
            cells = [
                f"{each.kernels:>3} {each.mib:>8.2f} MiB {each.float8_elements / 1e6:>6.3f}"
                for each in measure_passes(recipe, shared=shared)
            ]
            name = "shared" if shared else "Inductor's" if recipe else "none"
            lines.append(f"{recipe or 'bf16':<20} {name:<9} {cells[0]:>22} {cells[1]:>22}")
    return "\n".join(lines)
