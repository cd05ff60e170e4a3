"""Predict the time of an optimizer step: compute, exposed communication, and the host.

FSDP gathers the weights of the next block, and reduces the gradients of the previous one, while a
block computes: what takes longer than the computation is exposed, and so are the first gather and
the last reduction. The collectives of tensor parallelism wait for computation and are waited for.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torchtitan_lite.float8.selection import LinearChoice
from torchtitan_lite.models.flavors import BLOCK_LINEARS, OUTPUT

from .communication import Network, Ring, replicate_ring, shard_ring, tp_ring
from .constants import Rates, move_constants
from .memory import Group, Rank
from .roofline import Cost, Passes, Roofline

BLOCK_PARAMETERS, END_PARAMETERS = len(BLOCK_LINEARS) + 2, 3  # with two norms; embedding to output
RESOLUTION = 0.05  # a smaller relative difference is reported as none


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step on one device."""

    step_s: float  # the slower of device and host
    host_s: float
    device_parts_s: Mapping[str, float]
    exposed_s: Mapping[str, float]  # communication that the device waits for, by kind
    slowed_s: Mapping[str, float]  # longer computation, by what slows it
    hidden_s: Mapping[str, float]  # communication beside computation, by kind


@dataclass(frozen=True)
class Prediction:
    """What float8 gains over bf16. A band is as wide as the constants are uncertain: each moves the
    prediction by itself, and the moves, as ratios, add up as squares."""

    recipe: str
    step_speedup: float  # time in bf16 over time in float8: above 1 float8 pays
    speedup_band: tuple[float, float]
    float8_s_band: tuple[float, float]  # seconds of the step in float8, fast and slow
    converted: list[str]  # kinds of linears in float8
    better_kept: list[str]  # those of them that bf16 would make faster
    bf16: StepTime
    float8: StepTime
    float8_s_ends: Mapping[str, Sequence[float]]
    """Seconds of the step in float8 at the slow and the fast end of each uncertain constant."""


def predict(roofline: Roofline, linears: Sequence[LinearChoice]) -> Prediction:
    """Predict a step in bf16, and in float8 with those `linears` that are converted."""
    in_float8 = [linear for linear in linears if linear.converted]
    chosen = roofline.choose(in_float8)
    converted = [linear.kind for linear in in_float8]
    better_kept = [linear.kind for linear in in_float8 if linear not in chosen]

    def times(rates: Rates) -> tuple[StepTime, StepTime]:
        at = replace(roofline, rates=rates)
        return time_step(at, linears, []), time_step(at, linears, in_float8)

    # Once by the constants as they are, and with each uncertain one at either end.
    bf16, float8 = times(roofline.rates)
    speedup = bf16.step_s / float8.step_s
    ends = move_constants(roofline.device, roofline.rates)
    moved = {name: [times(rates) for rates in each] for name, each in ends.items()}
    speedups = [[one.step_s / other.step_s for one, other in each] for each in moved.values()]
    float8_s_ends = {name: [other.step_s for _, other in each] for name, each in moved.items()}
    return Prediction(
        recipe=roofline.job.config.float8.recipe_name,
        step_speedup=speedup,
        speedup_band=_band(speedup, speedups),
        float8_s_band=_band(float8.step_s, float8_s_ends.values()),
        converted=converted,
        better_kept=better_kept,
        bf16=bf16,
        float8=float8,
        float8_s_ends=float8_s_ends,
    )


def _band(value: float, moved: Iterable[Sequence[float]]) -> tuple[float, float]:
    """Return the ends around `value`, which each uncertain constant moves to two others."""
    moves = [[math.log(each / value) for each in ends] for ends in moved]
    down, up = (math.hypot(*(pick((0.0, *ends)) for ends in moves)) for pick in (min, max))
    return value * math.exp(-down), value * math.exp(up)


def format_verdict(gain: Prediction, *, on: bool = True) -> str:
    """Return the prediction in one sentence, of float8 that is `on` or could be."""
    if not gain.converted and on:
        return f"{gain.recipe} float8 is on, but filter_fqns keeps every linear in bf16."
    if not gain.converted:
        return (
            f"{gain.recipe} float8 would gain nothing: no linear would be faster in it, but "
            "--search compares the other recipes."
        )

    # A sign is claimed where the whole band has it.
    low, high = gain.speedup_band
    near = abs(gain.step_speedup - 1) <= RESOLUTION
    if near and max(1 - low, high - 1) <= 2 * RESOLUTION:
        effect = "is neutral" if on else "would be neutral"
    elif low > 1:
        effect = "helps" if on else "would help"
    elif high < 1:
        effect = "hurts" if on else "would hurt"
    else:
        effect = "may help or hurt"
    keep = f"keep {', '.join(gain.better_kept)}" if gain.better_kept else "no linear is better kept"
    return (
        f"{gain.recipe} float8 {effect}: a step {'runs' if on else 'would run'} at "
        f"{gain.step_speedup:.2f}x the speed of bf16 ({low:.2f} to {high:.2f}); {keep} in bf16."
    )


def time_step(
    roofline: Roofline, linears: Sequence[LinearChoice], in_float8: Collection[LinearChoice]
) -> StepTime:
    """Time a step of a model of `linears`, of which some train `in_float8`."""
    return _Step(roofline, linears, in_float8).time()


class _Step:
    """Times of one step in float8, or with all linears in bf16."""

    def __init__(
        self,
        roofline: Roofline,
        linears: Sequence[LinearChoice],
        in_float8: Collection[LinearChoice],
    ) -> None:
        self.roofline, self.job = roofline, roofline.job
        self.linears, self.in_float8 = linears, in_float8
        self.rank = Rank(self.job, {each.kind for each in in_float8}, on_cpu=False)
        self.network = Network(roofline.device, roofline.rates)

    def time(self) -> StepTime:
        """Time the step."""
        accum, degrees = self.job.batch.grad_accum_steps, self.job.degrees
        rates = self.roofline.rates

        # Computation: all but the optimizer runs once in each microbatch.
        blocks, head = self._blocks(), self._head()
        parameters = self.rank.cumulative_weights[-1] // degrees.fsdp
        parts = {name: part.both * accum for name, part in blocks.items()}
        parts |= {name: cost * accum for name, cost in head.items()}
        parts["optimizer"] = self.roofline.optimizer(parameters)
        device_parts_s = {name: cost.seconds for name, cost in parts.items()}

        # Tensor parallelism, and what of it asynchronous collectives hide.
        asynchronous = self.job.config.parallelism.enable_async_tensor_parallel
        parallel = self._tensor_parallel(asynchronous=asynchronous)
        waited = parallel.both * accum
        hidden_by_matmuls = self._tensor_parallel().both.seconds * accum - waited.seconds

        # The blocks and tensor parallelism hide FSDP. Replicas have what they add to it.
        compute = sum(blocks.values(), parallel)
        exposed, hidden = self._sharded(Ring(1, 1), compute)
        exposed_with, hidden_with = self._sharded(replicate_ring(degrees), compute)
        late = rates.slowest_device - 1 if degrees.world_size > 1 else 0.0
        exposed_s = {
            "tensor parallelism": waited.seconds,
            "sharding": exposed,
            "replicas": max(0.0, exposed_with - exposed),
        }
        slowed_s = {
            "beside communication": hidden_with * rates.overlap_slowdown,
            "by the slowest device": late * sum(device_parts_s.values()),
        }
        hidden_s = {
            "tensor parallelism": hidden_by_matmuls,
            "sharding": hidden,
            "replicas": max(0.0, hidden_with - hidden),  # whatever the rounding
        }

        host_s = self._host_s(sum(cost.kernels for cost in [*parts.values(), waited]))
        device_s = sum(sum(each.values()) for each in (device_parts_s, exposed_s, slowed_s))
        step_s = max(device_s, host_s)
        return StepTime(step_s, host_s, device_parts_s, exposed_s, slowed_s, hidden_s)

    def _host_s(self, kernels: float) -> float:
        """Seconds in which the host launches that many kernels, runs the blocks' hooks and updates
        parameters that are split."""
        rates, n_layers = self.roofline.rates, self.job.model_args.n_layers
        sharded = self.job.degrees.tp > 1 or not self.rank.without_fsdp
        tensors = sharded * (BLOCK_PARAMETERS * n_layers + END_PARAMETERS)
        return (
            kernels * rates.host_seconds_per_kernel
            + self.job.batch.grad_accum_steps * n_layers * rates.host_seconds_per_block
            + tensors * rates.host_seconds_per_parameter
        )

    @property
    def _gathers(self) -> tuple[int, int, int]:
        """How often a step gathers all weights for a forward, and for their backward a block and
        the head, as counted by its kernels."""
        steps, n_layers = self.job.batch.grad_accum_steps, self.job.model_args.n_layers
        return {
            "never": (1, 0, 0),
            "default": (steps, steps * n_layers, 0),
            "always": (steps, steps * n_layers, steps),
        }[self.rank.reshard]

    @property
    def _last_weights(self) -> Group:
        """The group that the head's backward needs: the embedding's if their weights are tied."""
        embedding, *_, head = self.rank.groups
        return embedding if self.job.model_args.tie_embeddings else head

    def _blocks(self) -> dict[str, Passes]:
        """Computation of the blocks in a microbatch, by part."""
        in_blocks = [linear for linear in self.linears if linear.kind != OUTPUT]
        roofline = self.roofline
        return {
            "linears": sum(roofline.linears(in_blocks, self.in_float8), Passes()),
            "attention": roofline.attention(),
            "pointwise": roofline.pointwise(),
            "fsdp copies": self._fsdp_copies(),
        }

    def _fsdp_copies(self) -> Passes:
        """Copies around FSDP's gathers and reductions, as the mean of a step's microbatches."""
        (forward, blocks, heads), accum = self._gathers, self.job.batch.grad_accum_steps
        embedding, block, *_, head = self.rank.groups
        copies = self.roofline.gather_copies
        all_weights = copies(embedding) + copies(block) * len(self.rank.groups[1:-1]) + copies(head)
        again = copies(block) * blocks + copies(self._last_weights) * heads
        parameters, reductions = self.rank.cumulative_weights[-1], self.rank.reductions
        gradients = self.roofline.gradient_copies(parameters, reductions)
        return Passes(all_weights * (forward / accum), (again + gradients) * (1 / accum))

    def _head(self) -> dict[str, Cost]:
        """Computation between the two passes: the projection to the vocabulary and the loss."""
        output = [linear for linear in self.linears if linear.kind == OUTPUT]
        costs = self.roofline.linears(output, self.in_float8)
        return {"output": sum(costs, Passes()).both, "loss": self.roofline.loss()}

    def _sharded(self, replicas: Ring, compute: Passes) -> tuple[float, float]:
        """Seconds of FSDP's collectives, and of the sums over `replicas`, in a step: those that the
        device waits for, and those that `compute` of a microbatch hides."""
        rank, network, degrees = self.rank, self.network, self.job.degrees
        shards, accum = shard_ring(degrees), self.job.batch.grad_accum_steps
        embedding, block, *_, head = rank.groups
        n_layers, (forwards, again_blocks, again_heads) = len(rank.groups[1:-1]), self._gathers

        def reduce_s(group: Group) -> float:
            nbytes = rank.reduce_width * group.weights
            shard = nbytes / degrees.fsdp
            return network.gather_s(nbytes, shards) + network.all_reduce_s(shard, replicas)

        # Weights may stay gathered from the forward to the backward pass, and between microbatches.
        gather = network.gather_s(block.gathered, shards)
        gather_head = network.gather_s(rank.width * head.weights, shards)
        gather_last = network.gather_s(rank.width * self._last_weights.weights, shards)
        again = (gather * again_blocks + gather_last * again_heads) / accum
        reductions = reduce_s(embedding) + n_layers * reduce_s(block) + reduce_s(head)

        # Nothing hides the first gathers and the last reductions.
        first = network.gather_s(rank.width * embedding.weights, shards) + gather
        ahead = (n_layers - 1) * gather + gather_head
        last = reduce_s(block) + reduce_s(embedding)

        forward, backward = compute.forward.seconds, compute.backward.seconds
        reducing, others = rank.reductions, accum - rank.reductions
        hidden = forwards * min(ahead, forward) + others * min(again, backward)
        hidden += reducing * min(again + reductions - last, backward)
        total = forwards * (first + ahead) + accum * again + reducing * reductions
        return total - hidden, hidden

    def _tensor_parallel(self, *, asynchronous: bool = False) -> Passes:
        """Collectives of tensor parallelism in a microbatch, as counted in compiled blocks, or what
        `asynchronous` ones leave of them. These hide a part behind the matmul beside them, unless
        a cast or the rescaling of rows stands between."""
        degrees, rank, args = self.job.degrees, self.rank, self.job.model_args
        if degrees.tp == 1:
            return Passes()
        ring, elements = tp_ring(degrees), rank.tokens * args.dim
        left = 1 - asynchronous * self.roofline.rates.async_tensor_parallel

        def gather(tensor: str) -> Cost:
            in_float8 = rank.gathers_float8(tensor)
            nbytes = elements * (1 if in_float8 else rank.width)
            # One sequence is gathered in place; of several the pieces are put together.
            copied = self.roofline.move(2 * nbytes, 1) * (self.job.batch.local_batch_size > 1)
            cost = Cost(self.network.gather_s(nbytes, ring), 1) + copied
            return cost * (left if in_float8 or not self.in_float8 else 1)

        # Sums are scattered in the compute type, from a copy that is ordered by ranks.
        nbytes = elements * rank.width
        scatter = Cost(self.network.gather_s(nbytes, ring), 1) + self.roofline.move(2 * nbytes, 1)
        rescaled = self.in_float8 and not self.job.config.float8.recipe.gathers_float8
        scatter_back, scatter = scatter * (1 if rescaled else left), scatter * left

        # A block gathers the inputs of its column-split linears, and the gradients of its row-split
        # ones; it scatters the sums of the others.
        inputs = gather("attention_norm") + gather("ffn_norm")
        gradients = gather("attention") + gather("gated")

        # Activation checkpointing repeats gathers, unless the compiler keeps the float8 inputs.
        ac = self.job.config.activation_checkpoint
        checkpointed = len(ac.checkpointed_layers(args.n_layers))
        kept = ac.keeps_by_op and self.roofline.compiled and rank.gathers_float8("ffn_norm")
        again = (Cost() if kept else inputs) + (Cost() if ac.keeps_by_op else scatter)

        # A scale over a split dimension is the maximum of all ranks: a small all-reduce.
        scales = self.job.config.float8.recipe.scale_reductions if self.in_float8 else (0, 0, 0, 0)
        in_forward, in_backward, by_op, whole = scales
        scale = Cost(self.roofline.rates.small_reduction_seconds, 1)
        again += scale * (by_op if ac.keeps_by_op else whole)

        forward = inputs + scatter * 2 + scale * in_forward
        backward = gradients + scatter_back * 2 + scale * in_backward
        ends = gather("norm") + scatter  # around the projection, and of the embedding
        return Passes(
            forward * args.n_layers + ends + self._gathered_logits(ring),
            backward * args.n_layers + again * checkpointed + ends,
        )

    def _gathered_logits(self, ring: Ring) -> Cost:
        """Gather of the logits, whose pieces are put together, where the loss is not parallel.
        Backward, each rank takes its part of their gradient."""
        if not self.rank.gathers_logits:
            return Cost()
        nbytes = self.rank.width * self.rank.logits
        return Cost(self.network.gather_s(nbytes, ring), 1) + self.roofline.move(2 * nbytes, 1)
