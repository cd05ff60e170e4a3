"""Tensor parallelism with sequence parallelism: the plan as data, and its float8 variant.

Between blocks the residual stream is split along the sequence. A block gathers it once before its
column-split linears and scatters the sum of its row-split ones. What only tensorwise Float8Linears
read is cast before it is gathered: activations, and gradients of outputs of row-split linears.
"""

import warnings
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.torchao_types import has_one_scale
from torchtitan_lite.catalog.flavors import COLUMN_SPLIT, ROW_SPLIT
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.patches import gather_float8_as_bytes


class _WaitingRowwiseParallel(RowwiseParallel):
    """RowwiseParallel that waits for the sum of its outputs.

    A compiled block loses the gradient of an input whose collective is still running, and the
    embedding would not be trained (pytorch/pytorch#179849)."""

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, mesh: DeviceMesh
    ) -> torch.Tensor:
        return outputs.redistribute(placements=output_layouts).to_local()


class _HeadParallel(ColwiseParallel):
    """ColwiseParallel for the projection to the vocabulary, called with or without a `head`."""

    @staticmethod
    def _prepare_input_fn(
        layouts: Any, desired_layouts: Any, mod: nn.Module, inputs: Any, mesh: DeviceMesh
    ) -> Any:
        x = ColwiseParallel._prepare_input_fn(layouts, desired_layouts, mod, inputs, mesh)
        return x, *inputs[1:]

    @staticmethod
    def _prepare_output_fn(
        layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, mesh: DeviceMesh
    ) -> Any:
        if not isinstance(outputs, DTensor):
            return outputs  # the loss that a head returned, the same on all ranks
        return ColwiseParallel._prepare_output_fn(layouts, use_local_output, mod, outputs, mesh)


def apply_tensor_parallel(model: Transformer, tp_mesh: DeviceMesh, *, loss_parallel: bool) -> None:
    """Split `model` over `tp_mesh` in place. With `loss_parallel` the logits stay DTensors that are
    split over the vocabulary; without it each rank gathers all of them."""
    # gloo cannot send float8 tensors.
    if tp_mesh.device_type == "cpu" and any(map(has_one_scale, model.modules())):
        gather_float8_as_bytes()

    # The ends of the model: the embedding scatters, the projection to the vocabulary gathers.
    plan: dict[str, Any] = {}
    if model.tok_embeddings is not None:
        plan["tok_embeddings"] = _WaitingRowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1)
        )
    if model.output is not None:
        plan["norm"] = SequenceParallel()
        plan["output"] = _style(_HeadParallel, float8=has_one_scale(model.output))(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        )
    parallelize_module(model, tp_mesh, plan)
    model.tie_weights()  # both ends split the vocabulary

    for block in model.layers.values():
        parallelize_module(block, tp_mesh, _block_plan(block))


def _block_plan(block: nn.Module) -> dict[str, Any]:
    """Return the style of each module of `block` by its name."""
    plan: dict[str, Any] = {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
    for part, names in COLUMN_SPLIT.items():
        summed = ROW_SPLIT[part]
        float8 = {
            name: has_one_scale(block.get_submodule(f"{part}.{name}")) for name in (*names, summed)
        }

        # One gather serves all column-split linears. The rotary tables and the mask, which
        # attention also receives, are whole on every rank.
        gather = _style(PrepareModuleInput, float8=all(float8[name] for name in names))
        others = (None, None, None) if part == "attention" else ()
        plan[part] = gather(
            input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others)
        )

        for name in names:
            plan[f"{part}.{name}"] = _style(ColwiseParallel, float8=float8[name])()
        scatter = _style(RowwiseParallel, float8=float8[summed])
        plan[f"{part}.{summed}"] = scatter(output_layouts=Shard(1))
    return plan


def _style(plain: type[ParallelStyle], *, float8: bool) -> Any:
    """Return `plain`, or torchao's style that replaces it and gathers in float8."""
    if not float8:
        return plain
    from torchao.float8 import float8_tensor_parallel as styles  # slow to import

    return {
        PrepareModuleInput: styles.PrepareFloat8ModuleInput,
        ColwiseParallel: styles.Float8ColwiseParallel,
        RowwiseParallel: styles.Float8RowwiseParallel,
        _HeadParallel: styles.Float8ColwiseParallel,
    }[plain]


def float8_gathers(tensorwise: Collection[str]) -> int:
    """Count the activations and gradients that a microbatch gathers in float8, not recomputed ones.
    `tensorwise` are the names of the linears that have one scale per tensor."""
    gathers = 1 if "output" in tensorwise else 0
    for path in {name.rpartition(".")[0] for name in tensorwise} - {""}:
        part = path.rpartition(".")[2]
        if all(f"{path}.{name}" in tensorwise for name in COLUMN_SPLIT[part]):
            gathers += 1
        if f"{path}.{ROW_SPLIT[part]}" in tensorwise:
            gathers += 1
    return gathers


def enable_async_tensor_parallel(tp_mesh: DeviceMesh) -> None:
    """Let the compiler overlap gathers and scatters over `tp_mesh` with matmuls, piece by piece.

    Raises ConfigError if the GPUs of the ranks do not share symmetric memory."""
    group = tp_mesh.get_group()
    try:
        if tp_mesh.device_type != "cuda":
            raise RuntimeError(f"there is none on {tp_mesh.device_type}")
        probe = symmetric_memory.empty(1, device=torch.device("cuda", torch.cuda.current_device()))
        symmetric_memory.rendezvous(probe, group)
    except RuntimeError as error:
        raise ConfigError(
            "[parallelism] enable_async_tensor_parallel = true needs symmetric memory between the "
            f"{group.size()} GPUs of tensor_parallel_degree, as NVLink within a node provides it: "
            f"{error}; set it to false."
        ) from error

    torch._inductor.config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # Deprecated for eager code, but the compiler fuses only in groups that are enabled
        # (pytorch/pytorch#193115).
        warnings.simplefilter("ignore", FutureWarning)
        symmetric_memory.enable_symm_mem_for_group(group.group_name)
