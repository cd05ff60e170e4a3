"""One cast of a tensor for all float8 matmuls that read it, in compiled code.

Inductor hands a matmul its operand in memory of a given layout. It computes a cast that several
matmuls read, as wq, wk and wv do, once for each of them, unless it is told that the result is to be
kept: then the others read it from memory.
"""

import torch

MATMUL = torch.ops.aten._scaled_mm.default


def keep_shared_casts() -> None:
    """Have the compiler keep what several float8 matmuls of a graph read, from now on in this
    process."""
    # Seconds to load, and loaded anyway by what compiles.
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class KeepSharedCasts(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for matmul in graph.find_nodes(op="call_function", target=MATMUL):
                for operand in matmul.args[:2]:
                    # Kept for one reader it would only be copied, where its layout is not the one
                    # that is asked for.
                    if sum(reader.target is MATMUL for reader in operand.users) > 1:
                        operand.meta["inductor_realize_to_strides"] = True

        def uuid(self) -> object:
            return get_hash_for_files((__file__,))  # of the code, which decides what is compiled

    config.post_grad_custom_post_pass = KeepSharedCasts()
