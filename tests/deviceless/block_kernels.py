"""The kernels that Inductor generates for a block of Llama 3 8B: `block_kernels.py RECIPE CP FILE`,
on the fake GPU. RECIPE is bf16 or a recipe of float8; after "cast " weights are cast before the
block. CP ranks share a sequence of CP * 8192 tokens. FILE gets, for the forward and the backward
pass, the MiB that kernels move by kind of access, their number, and the MiB of tensors that the
pass returns: forward, its output, and what it keeps for backward beside its inputs.
"""

import dataclasses
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import program  # noqa: F401  # prepares the fake GPU
import torch
import torch.distributed as dist
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import NopKernelSchedulerNode, Scheduler
from torch._inductor.virtualized import V
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_lite.catalog.flavors import FLAVORS
from torchtitan_lite.config import (
    ActivationCheckpointConfig,
    CompileConfig,
    Float8Config,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan_lite.config.arithmetic import ParallelDegrees
from torchtitan_lite.float8.convert import convert_linears
from torchtitan_lite.float8.graph_passes import add_passes
from torchtitan_lite.float8.selection import select_linears
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.parallel import parallelize as parallel
from torchtitan_lite.parallel.mesh import build_mesh

TOKENS = 8192
"""Of each rank."""
KERNEL = re.compile(r"(triton_\w+) = async_compile\.triton\('\1', '''(.*?)'''", re.DOTALL)
LAUNCH = re.compile(r"(triton_\w+)\.run\(")
ACCESS = re.compile(r"tl\.(load|store)\(\w+ \+ \((.*?)\), ")
AXES = re.compile(r"\b([xyr])\d*_?\d+")
"""The axes of the tile that an address depends on."""
NEIGHBOURS = re.compile(r"(?<![\w*])([xyr])\d*_?\d+(?! *[*%/])")
"""The axis along which it rises by one element: that of a variable without a factor."""


def kind_of_access(kernel: str) -> str:
    """How a Triton kernel accesses tensors, other than those that are the same along an axis."""
    along: dict[str, set[str]] = {"load": set(), "store": set()}
    for access, address in ACCESS.findall(kernel):
        if len(set(AXES.findall(address))) > 1:
            along[access].update(NEIGHBOURS.findall(address))
    if len(along["store"]) < 2 and along["store"] <= along["load"]:
        return "contiguous"
    return "strided" if "r" in along["load"] | along["store"] else "transposing"


def is_removed(kernel: Any) -> bool:
    """Whether the scheduler has found other ways for all that a kernel was to compute."""
    names = {node.get_name() for node in kernel.get_nodes()}
    return names <= set(kernel.scheduler.removed_ops)


def build(recipe: str, cp: int) -> Transformer:
    args = dataclasses.replace(FLAVORS["8B"], n_layers=1, vocab_size=16, max_seq_len=cp * TOKENS)
    with torch.device("meta"):
        model = Transformer(args)
    if recipe != "bf16":
        if not recipe.startswith("cast "):  # as FSDP that gathers weights anew for each pass
            parallel.cast_weights_once = lambda *_, **__: None
        float8 = Float8Config.model_validate({"recipe_name": recipe.removeprefix("cast ")})
        choices = select_linears(model, float8, tp_degree=1, tokens=TOKENS)
        convert_linears(model, choices, float8=float8, emulate=False)
        add_passes()

    parallel.parallelize(
        [model],
        build_mesh(ParallelDegrees(dp_replicate=1, dp_shard=1, cp=cp, tp=1), device_type="cuda"),
        parallelism=ParallelismConfig(),
        activation_checkpoint=ActivationCheckpointConfig(mode="none"),
        compile=CompileConfig(enable=True),
        training=TrainingConfig(),
        microbatches=2,
        flash=True,
    )
    return model.to_empty(device="cuda")


def main(recipe: str, cp: int, file: str) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cp)
    model = build(recipe, cp)
    moved: list[list[tuple[Any, int]]] = []  # each graph's kernels, with their bytes
    returned: list[int] = []  # bytes
    codes: list[str] = []

    def note_and_generate(scheduler: Scheduler, nodes: list[Any]) -> None:
        names = set(V.graph.get_output_names()) & set(V.graph.name_to_buffer)
        returned.append(
            sum(int(V.graph.get_numel(name)) * V.graph.get_dtype(name).itemsize for name in names)
        )
        moved.append(
            [
                (each, each.get_read_write_buffers_sizes())
                for each in nodes
                if not each.is_extern() and not isinstance(each, NopKernelSchedulerNode)
            ]
        )
        generate(scheduler, nodes)

    # Kernels have their final order only here.
    generate = Scheduler._codegen
    Scheduler._codegen = note_and_generate
    GraphLowering.save_output_code = staticmethod(codes.append)
    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    with uncached, config.patch(fx_graph_cache=False):
        tokens = torch.zeros(1, cp * TOKENS, dtype=torch.long, device="cuda")
        model(tokens).sum().backward()

    passes = []
    for code, kernels, nbytes in zip(codes, moved, returned, strict=True):
        # Without the ends of reductions that another kernel has completed.
        sizes = [size for each, size in kernels if not is_removed(each)]
        kinds = {name: kind_of_access(source) for name, source in KERNEL.findall(code)}
        mib: dict[str, float] = defaultdict(float)
        for name, size in zip(LAUNCH.findall(code), sizes, strict=True):
            mib[kinds[name]] += size / 2**20
        passes.append(({"kernels": len(sizes), **mib}, nbytes / 2**20))
    Path(file).write_text(json.dumps(passes[-2:]))  # not what casts weights


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
