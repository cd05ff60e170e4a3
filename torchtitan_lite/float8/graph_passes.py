"""Changes of the graphs of compiled blocks that save casts to float8, documented as in patches.py.

None is reported upstream; all were seen with torch 2.13 and torchao 0.18.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten


def keep_shared_casts(graph: Graph) -> None:
    """Compute a cast to float8 once for all matmuls of a compiled graph that read it.

    Why: Inductor computes a cast that several matmuls read, as wq, wk and wv do, once for each of
    them. Marked to be stored in the layout that matmuls take, it is computed once.
    Remove: once Inductor stores it itself.
    """
    scaled_mm = aten._scaled_mm.default
    for matmul in graph.find_nodes(op="call_function", target=scaled_mm):
        for operand in cast(list[Node], matmul.args[:2]):
            # Stored for one reader, a cast of another layout would only be copied.
            if sum(reader.target is scaled_mm for reader in operand.users) > 1:
                operand.meta["inductor_realize_to_strides"] = True


def keep_input_amax(graph: Graph) -> None:
    """Cast a linear's input backward by the scale of the forward pass, if the tensor has one.

    Why: torchao casts [batch, tokens, dim] forward, and its view [batch * tokens, dim] backward.
    The compiler takes the amax of the view for another one, and reads the tensor again for it.
    Remove: once torchao casts the same view in both passes.
    """
    for magnitude in graph.find_nodes(op="call_function", target=aten.abs.default):
        if any(reader.target is not aten.max.default for reader in magnitude.users):
            continue
        while (view := magnitude.args[0]).target is aten.view.default:
            magnitude.replace_input_with(view, view.args[0])
            magnitude.meta["val"] = view.args[0].meta["val"].abs()


def recompute_transposed_casts(graph: Graph) -> None:
    """Transpose tensors in float8 in the backward pass, where they are multiplied.

    Why: parameters are free to keep. But the partitioner finds them by their places among the
    inputs before a float8 tensor becomes two, data and scale. Without activation checkpointing it
    takes gathered w1, w2 and w3 for activations, and keeps the transposed copies.
    Remove: once the partitioner gets the places of unwrapped parameters.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    for copy in graph.find_nodes(op="call_function", target=aten.clone.default):
        dtype = copy.meta["val"].dtype
        if dtype.is_floating_point and dtype.itemsize == 1:
            copy.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


PASSES = {
    "joint_custom_pre_pass": keep_input_amax,
    "joint_custom_post_pass": recompute_transposed_casts,
    "post_grad_custom_post_pass": keep_shared_casts,
}
"""Each pass by the option of `torch._inductor.config` that runs it."""


def add_passes(options: Iterable[str] = PASSES) -> None:
    """Set the `options` of Inductor's config, for graphs that are compiled from then on."""
    from torch._inductor import config  # slow to import
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Pass(CustomGraphPass):
        def __init__(self, option: str) -> None:
            self._option = option

        def __call__(self, graph: Graph) -> None:
            PASSES[self._option](graph)

        def uuid(self) -> object:
            return get_hash_for_files((__file__,))  # part of the key of the compiler's cache

    for option in options:
        setattr(config, option, Pass(option))
