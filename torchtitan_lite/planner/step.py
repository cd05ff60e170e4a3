"""Predict the time of an optimizer step: compute, exposed communication, and the host.

FSDP gathers the weights of the next block, and reduces the gradients of the previous one, while a
block computes: what takes longer than the computation is exposed, and so are the first gather and
the last reduction. Tensor and context parallelism wait for computation and are waited for.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torchtitan_lite.catalog.flavors import BLOCK_LINEARS, OUTPUT
from torchtitan_lite.float8.selection import LinearChoice

from .communication import CONTEXT, PIPELINE, REPLICAS, SHARDING, TENSOR, Network, Ring, rings_of
from .rank import Group, Rank
from .roofline import Cost, Passes, Roofline

BLOCK_PARAMETERS, NORM_AND_OUTPUT = len(BLOCK_LINEARS) + 2, 2  # with two norms
OTHER_STAGES = "for other stages"


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step on one device."""

    step_s: float  # the slower of device and host
    host_s: float
    device_parts_s: Mapping[str, float]
    exposed_s: Mapping[str, float]  # communication that the device waits for, by kind
    slowed_s: Mapping[str, float]  # longer computation, by what slows it
    hidden_s: Mapping[str, float]  # communication beside computation, by kind
    idle_s: Mapping[str, float] = field(default_factory=lambda: {OTHER_STAGES: 0.0})


class Step:
    """Times of one step of a job, or of a share of it, in float8 or with all linears in bf16. They
    do not include the time in which a pipeline's ranks wait for each other."""

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
        self.rings = rings_of(self.job.degrees)

    def time(self) -> StepTime:
        """Time the step."""
        accum, blocks = self.job.batch.grad_accum_steps, self._blocks

        # Computation: all but the optimizer runs once in each microbatch.
        parts = {name: part.both * accum for name, part in blocks.items()}
        parts |= {name: cost * accum for name, cost in self._head.items()}
        parts["optimizer"] = self.roofline.optimizer(self.rank.weights // self.job.degrees.fsdp)
        device_parts_s = {name: cost.seconds for name, cost in parts.items()}

        # Tensor parallelism, and what of it asynchronous collectives hide.
        parallel, whole = self._tensor_parallel(), self._tensor_parallel(hides=False)
        waited = parallel.both * accum
        hidden_by_matmuls = whole.both.seconds * accum - waited.seconds

        # The blocks and what they wait for hide FSDP. Replicas have what they add to it.
        context = self._context_parallel()
        between, compute = context.both * accum, sum(blocks.values(), parallel + context)
        exposed, hidden = self._sharded(Ring(1, 1), compute)
        exposed_with, hidden_with = self._sharded(self.rings[REPLICAS], compute)
        exposed_s = {
            TENSOR: waited.seconds,
            CONTEXT: between.seconds,
            SHARDING: exposed,
            REPLICAS: max(0.0, exposed_with - exposed),
            PIPELINE: 0.0,
        }
        slowed_s = {
            "beside communication": hidden_with * self.roofline.rates.overlap_slowdown,
            "by the slowest device": self.late * sum(device_parts_s.values()),
        }
        hidden_s = {
            TENSOR: hidden_by_matmuls,
            CONTEXT: 0.0,
            SHARDING: hidden,
            REPLICAS: max(0.0, hidden_with - hidden),  # whatever the rounding
            PIPELINE: 0.0,
        }

        host_s = self._host_s(sum(each.kernels for each in [*parts.values(), waited, between]))
        device_s = sum(sum(each.values()) for each in (device_parts_s, exposed_s, slowed_s))
        step_s = max(device_s, host_s)
        return StepTime(step_s, host_s, device_parts_s, exposed_s, slowed_s, hidden_s)

    def actions_s(self) -> dict[str, float]:
        """Seconds of a microbatch's forward F and backward B, with what they wait for but FSDP, and
        of the two parts of B: W for gradients of weights, half of its matmuls, and I for others."""
        blocks, loss = self._blocks, sum(self._head.values(), Cost())
        compute = sum(blocks.values(), Passes(loss))
        waits = self._tensor_parallel() + self._context_parallel()
        slow = 1 + self.late
        backward = compute.backward.seconds * slow + waits.backward.seconds
        weights = blocks["linears"].backward.seconds * slow / 2
        return {
            "F": compute.forward.seconds * slow + waits.forward.seconds,
            "B": backward,
            "I": backward - weights,
            "W": weights,
        }

    @property
    def late(self) -> float:
        """By how much all wait for the slowest device, relative to computation."""
        several = self.job.degrees.world_size > 1
        return self.roofline.rates.slowest_device - 1 if several else 0.0

    def _host_s(self, kernels: float) -> float:
        """Seconds in which the host launches that many kernels, runs the blocks' hooks and updates
        parameters that are split."""
        rates, n_layers = self.roofline.rates, self.job.model_args.n_layers
        tensors = 0
        if self.job.degrees.tp > 1 or not self.rank.without_fsdp:
            tensors = BLOCK_PARAMETERS * n_layers
            tensors += 1 if self.rank.has_embedding else 0
            tensors += NORM_AND_OUTPUT if self.rank.has_output else 0
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

    @cached_property
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
        (embedding, *_, head), block = self.rank.groups, self.rank.block
        copies = self.roofline.gather_copies
        all_weights = copies(embedding) + copies(block) * len(self.rank.blocks) + copies(head)
        again = copies(block) * blocks + copies(self._last_weights) * heads
        gradients = self.roofline.gradient_copies(self.rank.weights, self.rank.reductions)
        return Passes(all_weights * (forward / accum), (again + gradients) * (1 / accum))

    @cached_property
    def _head(self) -> dict[str, Cost]:
        """Computation between the two passes: the projection to the vocabulary and the loss."""
        output = [linear for linear in self.linears if linear.kind == OUTPUT]
        costs = self.roofline.linears(output, self.in_float8)
        loss = self.roofline.loss() if self.rank.has_output else Cost()
        return {"output": sum(costs, Passes()).both, "loss": loss}

    def _sharded(self, replicas: Ring, compute: Passes) -> tuple[float, float]:
        """Seconds of FSDP's collectives, and of the sums over `replicas`, in a step: those that the
        device waits for, and those that `compute` of a microbatch hides."""
        rank, network, degrees = self.rank, self.network, self.job.degrees
        shards, accum = self.rings[SHARDING], self.job.batch.grad_accum_steps
        (embedding, *_, head), block = rank.groups, rank.block
        n_layers, (forwards, again_blocks, again_heads) = len(rank.blocks), self._gathers

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
        # A pipeline reduces when all its microbatches are done.
        beside = again + (0.0 if rank.pipelined else reductions - last)
        hidden += reducing * min(beside, backward)
        total = forwards * (first + ahead) + accum * again + reducing * reductions
        return total - hidden, hidden

    def _tensor_parallel(self, *, hides: bool = True) -> Passes:
        """Collectives of tensor parallelism in a microbatch, as counted in compiled blocks. If it
        `hides` what it can, asynchronous ones hide a part behind the matmul beside them, unless a
        cast or the rescaling of rows stands between."""
        degrees, rank, args = self.job.degrees, self.rank, self.job.model_args
        if degrees.tp == 1:
            return Passes()
        ring, elements = self.rings[TENSOR], rank.tokens * args.dim
        hides = hides and self.job.config.parallelism.enable_async_tensor_parallel
        left = 1 - self.roofline.rates.async_tensor_parallel if hides else 1

        def gather(tensor: str) -> Cost:
            in_float8 = rank.gathers_float8(tensor)
            nbytes = elements * (1 if in_float8 else rank.width)
            # One sequence is gathered in place; of several the pieces are put together.
            cost = Cost(self.network.gather_s(nbytes, ring), 1)
            if self.job.batch.local_batch_size > 1:
                cost += self.roofline.move(2 * nbytes, 1)
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
        ac, checkpointed = self.job.config.activation_checkpoint, len(rank.checkpointed)
        kept = ac.keeps_by_op and self.roofline.compiled and rank.gathers_float8("ffn_norm")
        again = (Cost() if kept else inputs) + (Cost() if ac.keeps_by_op else scatter)

        # A scale over a split dimension is the maximum of all ranks: a small all-reduce.
        scales = self.roofline.costs.scale_reductions if self.in_float8 else (0, 0, 0, 0)
        in_forward, in_backward, by_op, whole = scales
        scale = Cost(self.roofline.rates.small_reduction_seconds, 1)
        again += scale * (by_op if ac.keeps_by_op else whole)

        forward = inputs + scatter * 2 + scale * in_forward
        backward = gradients + scatter_back * 2 + scale * in_backward
        # Around the projection, and of the embedding: the backward does the reverse.
        first, back, logits = Cost(), Cost(), Cost()
        if rank.has_output:
            first += gather("norm")
            back += scatter
            logits = self._gathered_logits(ring)
        if rank.has_embedding:
            first += scatter
            back += gather("norm")
        return Passes(
            forward * args.n_layers + first + logits,
            backward * args.n_layers + again * checkpointed + back,
        )

    def _context_parallel(self) -> Passes:
        """Gathers of keys and values in a microbatch, and reductions of their gradients, with the
        copies around them as counted in compiled blocks."""
        degrees, sizes, move = self.job.degrees, self.rank.attention, self.roofline.move
        if degrees.cp == 1:
            return Passes()
        whole, chunks = sizes.gathered, 2 if sizes.in_chunks else 1
        collective = Cost(self.network.gather_s(whole, self.rings[CONTEXT]), 1)

        # Keys and values are put together, and the gathered ones into the order of the sequence.
        # Gradients take the same way back, those of two chunks added up. So does the output.
        output = 2 * sizes.width * sizes.heads if sizes.in_chunks else 0
        forward = collective + move((2 / degrees.cp + 2) * whole + output, 1 + chunks)
        backward = collective + move((1 + chunks) * whole + output, chunks)

        n_layers = self.job.model_args.n_layers  # activation checkpointing keeps none of them
        again = len(self.rank.checkpointed)
        return Passes(forward * n_layers, backward * n_layers + forward * again)

    def _gathered_logits(self, ring: Ring) -> Cost:
        """Gather of the logits, whose pieces are put together, where the loss is not parallel.
        Backward, each rank takes its part of their gradient."""
        if not self.rank.gathers_logits:
            return Cost()
        nbytes = self.rank.width * self.rank.logits
        return Cost(self.network.gather_s(nbytes, ring), 1) + self.roofline.move(2 * nbytes, 1)
