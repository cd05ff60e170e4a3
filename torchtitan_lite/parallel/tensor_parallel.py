"""Tensor parallelism with sequence parallelism: the plan as data, and its float8 variant.

Between blocks the residual stream is split along the sequence; a block gathers it once before its
column-split linears and scatters the sum after the row-split ones. Where all linears that read a
gathered activation are tensorwise Float8Linears, it is cast before the gather, which then moves 1
byte an element; so is the gradient of what such a row-split linear scattered.
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

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models.flavors import COLUMN_SPLIT, ROW_SPLIT
from torchtitan_lite.torchao_types import is_float8_linear


class _WaitingRowwiseParallel(RowwiseParallel):
    """Hands on its sum once that is there. A compiled block loses the gradient of an input that is
    still on its way, and the embedding would not learn (pytorch/pytorch#179849)."""

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any,
        use_local_output: bool,
        mod: nn.Module,
        outputs: Any,
        device_mesh: DeviceMesh,
    ) -> torch.Tensor:
        return outputs.redistribute(placements=output_layouts).to_local()


class _HeadParallel(ColwiseParallel):
    """Splits the projection to the vocabulary; what it is to be fused with gets its gathered input
    and its shard."""

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any,
        desired_input_layouts: Any,
        mod: nn.Module,
        inputs: Any,
        device_mesh: DeviceMesh,
    ) -> Any:
        x = ColwiseParallel._prepare_input_fn(
            input_layouts, desired_input_layouts, mod, inputs, device_mesh
        )
        return x, *inputs[1:]

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any,
        use_local_output: bool,
        mod: nn.Module,
        outputs: Any,
        device_mesh: DeviceMesh,
    ) -> Any:
        if not isinstance(outputs, DTensor):
            return outputs  # a loss, the same on all ranks
        return ColwiseParallel._prepare_output_fn(
            output_layouts, use_local_output, mod, outputs, device_mesh
        )


def gathers_float8(module: nn.Module) -> bool:
    """True for a Float8Linear whose input has one scale a tensor, so that shards of it can be
    gathered."""
    if not is_float8_linear(module):
        return False
    from torchao.float8.config import ScalingGranularity

    return module.config.cast_config_input.scaling_granularity is ScalingGranularity.TENSORWISE


def apply_tensor_parallel(model: nn.Module, tp_mesh: DeviceMesh, *, loss_parallel: bool) -> None:
    """Split `model` over `tp_mesh` in place. With `loss_parallel` the logits stay DTensors, split
    over the vocabulary; without, each rank gets all of them."""
    if tp_mesh.device_type == "cpu" and any(map(gathers_float8, model.modules())):
        _gather_float8_as_bytes()
    float8_output = gathers_float8(model.get_submodule("output"))
    parallelize_module(
        model,
        tp_mesh,
        {
            "tok_embeddings": _WaitingRowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1)
            ),
            "norm": SequenceParallel(),
            "output": _style(_HeadParallel, float8=float8_output)(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if loss_parallel else Replicate(),
                use_local_output=not loss_parallel,
            ),
        },
    )
    for block in model.get_submodule("layers").children():
        parallelize_module(block, tp_mesh, _block_plan(block))


def float8_gathers(tensorwise: Collection[str]) -> int:
    """How many activations and gradients are gathered in float8 for a microbatch, if nothing is
    recomputed, where the linears of these names scale a tensor at a time."""
    parts = {name.rpartition(".")[0] for name in tensorwise} - {""}
    linears = {path: path.rpartition(".")[2] for path in parts}
    inputs = sum(
        all(f"{path}.{name}" in tensorwise for name in COLUMN_SPLIT[part])
        for path, part in linears.items()
    )
    gradients = sum(f"{path}.{ROW_SPLIT[part]}" in tensorwise for path, part in linears.items())
    return inputs + gradients + ("output" in tensorwise)


def enable_async_tensor_parallel(tp_mesh: DeviceMesh) -> None:
    """Have the compiler split each gather and scatter over `tp_mesh` into pieces, and multiply one
    while the next is on its way. Raises ConfigError on ranks whose GPUs do not share symmetric
    memory."""
    group = tp_mesh.get_group()
    try:
        if tp_mesh.device_type != "cuda":
            raise RuntimeError(f"there is none on {tp_mesh.device_type}")
        probe = symmetric_memory.empty(1, device=torch.device("cuda", torch.cuda.current_device()))
        symmetric_memory.rendezvous(probe, group)
    except RuntimeError as error:
        raise ConfigError(
            f"[parallelism] enable_async_tensor_parallel = true needs symmetric memory between the {group.size()} GPUs "
            f"of tensor_parallel_degree, as NVLink within a node gives it: {error}; set it to false."
        ) from error
    torch._inductor.config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # Deprecated for eager code; the compiler still fuses in enabled groups only
        # (pytorch/pytorch#193115).
        warnings.simplefilter("ignore", FutureWarning)
        symmetric_memory.enable_symm_mem_for_group(group.group_name)


def _block_plan(block: nn.Module) -> dict[str, Any]:
    plan: dict[str, Any] = {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
    for part, names in COLUMN_SPLIT.items():
        float8 = {
            name: gathers_float8(block.get_submodule(f"{part}.{name}"))
            for name in (*names, ROW_SPLIT[part])
        }
        prepare = _style(PrepareModuleInput, float8=all(float8[name] for name in names))
        # Attention is also handed the rotary tables and the mask, which every rank has whole.
        others = (None, None, None) if part == "attention" else ()
        plan[part] = prepare(
            input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others)
        )
        for name in names:
            plan[f"{part}.{name}"] = _style(ColwiseParallel, float8=float8[name])()
        summed = ROW_SPLIT[part]
        plan[f"{part}.{summed}"] = _style(RowwiseParallel, float8=float8[summed])(
            output_layouts=Shard(1)
        )
    return plan


def _style(plain: type[ParallelStyle], *, float8: bool) -> Any:
    """`plain`, or torchao's style in its place, which gathers in float8."""
    if not float8:
        return plain
    from torchao.float8 import float8_tensor_parallel as styles

    return {
        PrepareModuleInput: styles.PrepareFloat8ModuleInput,
        ColwiseParallel: styles.Float8ColwiseParallel,
        RowwiseParallel: styles.Float8RowwiseParallel,
        _HeadParallel: styles.Float8ColwiseParallel,
    }[plain]


def _gather_float8_as_bytes() -> None:
    """Make torchao's all-gather of a float8 activation move its bytes as uint8: gloo has no float8
    type."""
    from torchao.float8 import float8_ops
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    ops = (
        torch.ops.c10d_functional.all_gather_into_tensor.default,
        torch.ops._c10d_functional.all_gather_into_tensor.default,
    )

    def gather(
        op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Float8TrainingTensor:
        shard: Float8TrainingTensor = args[0]
        gathered = op(shard._data.contiguous().view(torch.uint8), *args[1:], **(kwargs or {}))
        return Float8TrainingTensor(
            gathered.view(shard._data.dtype),
            shard._scale,
            shard._orig_dtype,
            shard._linear_mm_config,
            shard._gemm_input_role,
        )

    float8_ops.FLOAT8_OPS_TABLE.update(dict.fromkeys(ops, gather))
