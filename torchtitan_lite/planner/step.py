"""Predict the time of an optimizer step: computation, communication that it waits for, the host.

All but the optimizer runs once in each of a step's microbatches. Blocks are equal, so that a step
takes n blocks' time on the rank that computes longest. docs/plan.md says what communication is
waited for.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torchtitan_lite.catalog.flavors import BLOCK_LINEARS, OUTPUT, block_linear_shapes
from torchtitan_lite.float8.selection import LinearChoice

from .roofline import Roofline
from .share import Share

TENSOR, CONTEXT, SHARDING = "tensor parallelism", "context parallelism", "FSDP"
PIPELINE, HOST = "pipeline", "host"


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step on the device that computes longest."""

    compute_s: Mapping[str, float]  # by part
    waits_s: Mapping[str, float]  # in which the device computes nothing, by what it waits for
    hidden_s: float  # FSDP's collectives beside computation, which take no time themselves

    @property
    def step_s(self) -> float:
        """Seconds of the step: all that is computed and waited for."""
        return sum(self.compute_s.values()) + sum(self.waits_s.values())


def time_step(
    roofline: Roofline, linears: Sequence[LinearChoice], in_float8: Collection[LinearChoice]
) -> StepTime:
    """Time a step of a model of `linears`, of which some train `in_float8`."""
    job, rates, n_layers = roofline.job, roofline.rates, roofline.job.model_args.n_layers
    kinds = {each.kind for each in in_float8}
    shares = [Share(job, kinds, rank=rank) for rank in range(job.degrees.pp)]
    n, slow = shares[0].microbatches, rates.in_training

    # Seconds of a microbatch in all blocks, and of the projection and the loss.
    in_blocks = [each for each in linears if each.kind != OUTPUT]
    compute = {
        "linears": slow * roofline.linears_s(in_blocks, in_float8),
        "attention": slow * roofline.attention_s(),
        "pointwise": slow * roofline.pointwise_s(),
    }
    waits = {
        TENSOR: _tensor_parallel_s(roofline, shares[0]),
        CONTEXT: _context_parallel_s(roofline),
    }
    blocks_s = sum(compute.values()) + sum(waits.values())
    output = [each for each in linears if each.kind == OUTPUT]
    head_s = slow * (roofline.linears_s(output, in_float8) + roofline.loss_s())

    # The rank that computes longest, and its part of the blocks.
    def microbatch_s(share: Share) -> float:
        return share.blocks / n_layers * blocks_s + (head_s if share.has_output else 0.0)

    share = max(shares, key=microbatch_s)
    part = share.blocks / n_layers
    compute_s = {name: n * part * each for name, each in compute.items()}
    compute_s["output and loss"] = n * head_s if share.has_output else 0.0
    compute_s["weights and optimizer"] = slow * _update_s(roofline, share)
    if job.config.optimizer.name == "Muon":
        compute_s["Newton-Schulz"] = slow * _newton_schulz_s(roofline, share)
    exposed, hidden = _sharded_s(roofline, share, part * blocks_s)
    late = rates.slowest_device - 1 if job.degrees.world_size > 1 else 0.0
    compute_s["slowest device"] = late * sum(compute_s.values())
    compute_s["beside communication"] = rates.overlap_slowdown * hidden

    # What it waits for. Each of p ranks with v stages pauses for (p - 1) / v microbatches (arXiv
    # 2104.04473, section 2.2).
    waits_s = {name: n * part * each for name, each in waits.items()} | {SHARDING: exposed}
    pauses = (len(shares) - 1) / len(job.stages)
    waits_s[PIPELINE] = pauses * sum(map(microbatch_s, shares))
    host_s = (n + 1) * share.blocks * rates.host_seconds_per_block  # the update is as long as one
    waits_s[HOST] = max(0.0, host_s - sum(compute_s.values()) - sum(waits_s.values()))
    return StepTime(compute_s, waits_s, hidden)


# ----- FSDP -----


def _update_s(roofline: Roofline, share: Share) -> float:
    """Seconds of clipping and AdamW, and of a step's copies of weights and gradients.

    For each weight of a shard the update reads and writes it and its state, reads its gradient
    three times and writes it once. For each weight, copies take 4 bytes to gather it, or 2 in
    float8, and 10 of its shard; 6 to cast a gradient; 10 to add it to another, 8 to reduce the
    sum."""
    n, gathers, weights = share.microbatches, sum(share.gathers), share.weights
    shards, added = weights / roofline.job.degrees.fsdp, n - share.reductions
    updated = (6 * share.weight_width + 2 * share.state_width) * shards
    gathered = 4 * weights + 10 * shards - 2 * share.blocks * share.in_float8
    gradients = (6 * share.reductions + 10 * added) * weights
    summed = 8 * weights if added and not share.without_fsdp else 0
    return roofline.move_s(updated + gathers * gathered + gradients + summed, 20 * n * share.blocks)


def _newton_schulz_s(roofline: Roofline, share: Share) -> float:
    """Seconds of Muon's iterations in bf16, and of the exchanges around them, whatever the recipe.

    Each of five iterations on [M, N], M <= N, has 2 (2 M^2 N + M^3) FLOPs. In a round each of the
    ranks that shard a matrix takes one."""
    seconds, n = 0.0, share.blocks * len(BLOCK_LINEARS)
    for sizes in block_linear_shapes(share.model).values():
        few, many = sorted(sizes)
        matmuls = (few, few, many), (few, few, few), (few, many, few)
        seconds += 5 * share.blocks * sum(roofline.gemm_s(*matmul) for matmul in matmuls)
    ranks = roofline.job.degrees.fsdp * share.tp
    exchanged = 2 * roofline.gather_s(2 * share.matrices / roofline.job.degrees.fsdp, ranks)
    return seconds * math.ceil(n / ranks) / n + exchanged


def _sharded_s(roofline: Roofline, share: Share, blocks_s: float) -> tuple[float, float]:
    """Seconds of FSDP's collectives in a step, with the sums over replicas: those that the device
    waits for, and those beside the blocks' passes of a microbatch, `blocks_s` of computation."""
    degrees, n = roofline.job.degrees, share.microbatches
    replicas = degrees.dp_replicate, degrees.tp * degrees.fsdp

    def gather(nbytes: float) -> float:
        return roofline.gather_s(nbytes, degrees.fsdp, degrees.tp)

    def reduce(weights: int) -> float:
        nbytes = share.reduce_width * weights
        return gather(nbytes) + 2 * roofline.gather_s(nbytes / degrees.fsdp, *replicas)

    # Nothing hides the first gathers and the last reductions; a pipeline reduces when all its
    # microbatches are done.
    (forwards, backwards), block = share.gathers, gather(share.gathered_block)
    first = gather(share.width * share.embedding) + block
    ahead = (share.blocks - 1) * block + gather(share.width * share.output)
    gathers = (forwards * ahead + backwards * share.blocks * block) / n  # of a microbatch
    last = reduce(share.block) + reduce(share.embedding)
    others = (share.blocks - 1) * reduce(share.block) + reduce(share.output)

    total = forwards * first + n * gathers + share.reductions * (last + others)
    beside = gathers + (0.0 if share.pipelined else others)
    hidden = share.reductions * min(beside, blocks_s)
    hidden += (n - share.reductions) * min(gathers, blocks_s)
    return total - hidden, hidden


# ----- Tensor and context parallelism, in a microbatch -----


def _tensor_parallel_s(roofline: Roofline, share: Share) -> float:
    """Seconds in which all blocks gather two inputs of their linears [N, D] and scatter two sums,
    and the reverse in the backward pass."""
    tp, config = share.tp, share.config
    if tp == 1:
        return 0.0

    def gather(tensor: str) -> float:
        nbytes = share.residual * tp / (share.width if share.gathers_float8(tensor) else 1)
        # Of several sequences the pieces are put together.
        copy_s = roofline.move_s(2 * nbytes) if share.job.batch.local_batch_size > 1 else 0.0
        return roofline.gather_s(nbytes, tp) + copy_s

    # Sums are scattered from a copy that is ordered by ranks. Asynchronous collectives hide a part
    # behind the matmul beside them, unless a cast or the rescaling of rows stands between.
    scatter = roofline.gather_s(share.residual * tp, tp) + roofline.move_s(2 * share.residual * tp)
    asynchronous = config.parallelism.enable_async_tensor_parallel
    left = 1 - (roofline.rates.async_tensor_parallel if asynchronous else 0.0)
    rescaled = share.float8_linears and not config.float8.recipe.gathers_float8
    left_cast = 1 if rescaled else left
    inputs = left_cast * (gather("attention_norm") + gather("ffn_norm"))
    gradients = left_cast * (gather("attention") + gather("gated"))
    scattered = 2 * left * scatter + 2 * left_cast * scatter  # sums, then gradients of inputs

    # Activation checkpointing repeats gathers, unless the compiler keeps the float8 inputs.
    by_op = config.activation_checkpoint.keeps_by_op
    kept = by_op and roofline.compiled and share.gathers_float8("ffn_norm")
    again = (0.0 if kept else inputs) + (0.0 if by_op else left * scatter)
    n_layers = share.model.n_layers
    return n_layers * (inputs + gradients + scattered) + roofline.checkpointed * again


def _context_parallel_s(roofline: Roofline) -> float:
    """Seconds in which keys and values of whole sequences are gathered and their gradients reduced,
    with the copies around them. Activation checkpointing keeps none of them."""
    job, cp, tp = roofline.job, roofline.job.degrees.cp, roofline.job.degrees.tp
    if cp == 1:
        return 0.0
    whole = 2 * 2 * cp * roofline.tokens * job.model_args.kv_dim // tp  # bytes
    collective = roofline.gather_s(whole, cp, tp)
    forward = collective + roofline.move_s((2 / cp + 2) * whole, 3)
    backward = collective + roofline.move_s(3 * whole, 2)
    n_layers = job.model_args.n_layers
    return n_layers * (forward + backward) + roofline.checkpointed * forward
