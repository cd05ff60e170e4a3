"""FSDP2: what is sharded, when weights are gathered, and when gradients are reduced."""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from torchtitan_lite import patches
from torchtitan_lite.base.torchao_types import data_of, is_gathered_in_float8, refill
from torchtitan_lite.config import ParallelismConfig, TrainingConfig
from torchtitan_lite.models.init import local_part
from torchtitan_lite.models.llama3 import Transformer

from .one_rank import MixedPrecisionTransformer


def resharding(parallelism: ParallelismConfig, *, pipelined: bool) -> str:
    """Return fsdp_reshard_after_forward. A pipeline, which uses weights again for each microbatch,
    has "never" by "default"."""
    reshard = parallelism.fsdp_reshard_after_forward
    return "never" if pipelined and reshard == "default" else reshard


def apply_fsdp(
    model: Transformer, mesh: DeviceMesh, *, training: TrainingConfig, reshard_after_forward: str
) -> None:
    """Shard `model` in place over dp_shard and cp of `mesh`, replicated over dp_replicate.

    FSDP gathers the embedding, each block, and the last norm with the output projection as a group
    each; a tied embedding is in the last group, which is gathered before the first block.
    `reshard_after_forward`: "always" and "never" free all groups, or none, after their forward.
    "default" keeps the last group, which backward needs first."""
    # The floating-point inputs of a block are the residual stream, which already has the compute
    # type, and the rotary tables, which stay float32.
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        cast_forward_inputs=False,
    )
    # To FSDP, ranks that share sequences are data-parallel ranks: they shard the weights and
    # average gradients.
    fsdp_mesh = mesh["dp_shard"]
    if mesh["cp"].size() > 1:
        fsdp_mesh = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    if mesh["dp_replicate"].size() > 1:
        fsdp_mesh = DeviceMesh._concatenate([mesh["dp_replicate"], fsdp_mesh])
    shard = partial(fully_shard, mesh=fsdp_mesh, mp_policy=precision)
    if training.enable_cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        shard = partial(shard, offload_policy=offload)

    # A scale of a float8 all-gather covers all shards of a weight, also across tensor parallelism.
    if any(is_gathered_in_float8(local_part(weight)) for weight in model.parameters()):
        is_split = mesh["tp"].size() > 1
        shards = mesh["dp_shard", "cp", "tp"]._flatten("dp_shard_cp_tp") if is_split else None
        patches.scale_gathered_weights_over(shards)

    reshard, reshard_last = reshard_after_forward != "never", reshard_after_forward == "always"
    for block in model.layers.values():
        shard(block, reshard_after_forward=reshard)

    # FSDP forms the last group of what is left when it shards the model: of both ends if they share
    # a weight. An embedding's gradient does not depend on its weight: backward does not gather it.
    tied = model.args.tie_embeddings
    if model.tok_embeddings is not None and not tied:
        shard(model.tok_embeddings, reshard_after_forward=reshard)
        cast(FSDPModule, model.tok_embeddings).set_unshard_in_backward(False)
    if model.output is not None and not tied:
        shard([model.norm, model.output], reshard_after_forward=reshard_last)
    shard(model, reshard_after_forward=reshard_last)
    gloo = dist.get_backend(mesh["dp_shard"].get_group()) == "gloo"
    for module in model.modules():
        if isinstance(module, FSDPModule):
            patches.replace_gathered(module, _cast_weight)
            if gloo:
                module.set_custom_reduce_scatter(HostReduceScatter())


def _cast_weight(linear: Any, weight: Tensor, held: Any) -> tuple[Any, list[Tensor]]:
    """Return the gathered `weight` of `linear` in float8, in `held` if that is not None, and the
    data of its casts."""
    (cast,) = linear.weight_caster.of([linear], [weight], [None], weight.dtype)
    if held is None:
        return cast, data_of(cast)
    refill(held, cast)
    return held, data_of(held)


def free_gathered(model: nn.Module) -> None:
    """Free the weights that FSDP has gathered for passes that no backward pass follows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class HostReduceScatter(ReduceScatter):
    """FSDP's reduce-scatter on gloo, whose own sends all sums to all ranks: here each rank gets the
    parts of its own, and adds them in the order of the ranks. Half the time with two ranks."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an empty tensor, for the input or the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Set `output_tensor` [n] to the sum, or mean, of this rank's [n] of the `input_tensor`s
        [ranks * n]."""
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), -1), 0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


def start_microbatch(model: Transformer, parallelism: ParallelismConfig, *, last: bool) -> None:
    """Prepare for a microbatch's forward and backward pass, the `last` one of its step or not.

    With fsdp_reduce_gradients = "each" it reduces its gradients, whose sums are sharded. Else the
    last one reduces the sums of all, which each rank holds whole. With fsdp_reshard_after_forward =
    "never", the weights of the first one serve all, and the last one frees them."""
    if isinstance(model, MixedPrecisionTransformer):
        model.copies.last_microbatch = last
        return
    module = cast(FSDPModule, model)
    module.set_requires_gradient_sync(last or parallelism.fsdp_reduce_gradients == "each")
    module.set_reshard_after_backward(last or parallelism.fsdp_reshard_after_forward != "never")
