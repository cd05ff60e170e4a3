"""Passes over the graphs of compiled blocks that save casts to float8.

Each function states its change, the reason, the report upstream, the versions in which the fault
was seen, and when to remove it. All of them can be called more than once.
"""

from collections.abc import Callable

import torch
from torch.fx import Graph

from torchtitan_lite import patches


def keep_shared_casts() -> None:
    """Compute a cast to float8 once for all matmuls of a compiled graph that read it.

    Changes: `torch._inductor.config.post_grad_custom_post_pass`.
    Why: Inductor computes a cast that several matmuls read, as wq, wk and wv do, once for each of
    them. Marked to be stored in the layout that matmuls take, it is computed once.
    Upstream: not reported. Seen: torch 2.13, torchao 0.18. Remove: once Inductor stores it itself.
    """
    scaled_mm = torch.ops.aten._scaled_mm.default

    def mark_shared_casts(graph: Graph) -> None:
        for matmul in graph.find_nodes(op="call_function", target=scaled_mm):
            for operand in matmul.args[:2]:
                # Stored for one reader, a cast of another layout would only be copied.
                if sum(reader.target is scaled_mm for reader in operand.users) > 1:
                    operand.meta["inductor_realize_to_strides"] = True

    _add("post_grad_custom_post_pass", mark_shared_casts)


def keep_input_amax() -> None:
    """Cast a linear's input backward by the scale of the forward pass, if the tensor has one.

    Changes: `torch._inductor.config.joint_custom_pre_pass`.
    Why: torchao casts [batch, tokens, dim] forward, and its view [batch * tokens, dim] backward.
    The compiler takes the amax of the view for another one, and reads the tensor again for it.
    Upstream: not reported. Seen: torch 2.13, torchao 0.18.
    Remove: once torchao casts the same view in both passes.
    """
    aten = torch.ops.aten

    def take_from_base(graph: Graph) -> None:
        for magnitude in graph.find_nodes(op="call_function", target=aten.abs.default):
            if any(reader.target is not aten.max.default for reader in magnitude.users):
                continue
            while (view := magnitude.args[0]).target is aten.view.default:
                magnitude.replace_input_with(view, view.args[0])
                magnitude.meta["val"] = view.args[0].meta["val"].abs()

    _add("joint_custom_pre_pass", take_from_base)


def recompute_transposed_casts() -> None:
    """Transpose tensors in float8 in the backward pass, where they are multiplied.

    Changes: `torch._inductor.config.joint_custom_post_pass`.
    Why: parameters are free to keep. But the partitioner finds them by their places among the
    inputs before a float8 tensor becomes two, data and scale. It takes gathered w1, w2 and w3 for
    activations, and keeps the transposed copies that backward needs.
    Upstream: not reported. Seen: torch 2.13, torchao 0.18, without activation checkpointing.
    Remove: once the partitioner gets the places of unwrapped parameters.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    def mark_transposed_casts(graph: Graph) -> None:
        for copy in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
            if copy.meta["val"].dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                copy.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

    _add("joint_custom_post_pass", mark_transposed_casts)


def _add(hook: str, change: Callable[[Graph], None]) -> None:
    """Let Inductor call `change`, which alters a graph in place, at one of its hooks."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Pass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            change(graph)

        def uuid(self) -> object:
            # Part of the key of the compiler's cache, which knows neither these passes nor patches.
            return get_hash_for_files((__file__, patches.__file__))

    setattr(config, hook, Pass())
