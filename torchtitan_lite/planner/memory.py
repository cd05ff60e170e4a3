"""Estimate a rank's memory at each moment of a training step, in bytes, from shapes alone.

The estimate excludes temporary copies of float8 casts. On CPU it also excludes packed weights and
operands of emulated matmuls. On a GPU it excludes the CUDA context, buffers of cuBLAS and NCCL, and
memory that the allocator reserves but does not use.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from torchtitan_lite.catalog.flavors import OUTPUT, block_linear_shapes
from torchtitan_lite.catalog.schedules import SCHEDULES
from torchtitan_lite.config.job import Job
from torchtitan_lite.models import loss

from .attention import FLOAT32
from .orders import in_flight, pipeline_orders
from .rank import EMBEDDING, Group, Rank, rank_shares


@dataclass(frozen=True)
class Moment:
    """Memory of a rank at one moment of a step, in bytes by part."""

    name: str
    parameters: int
    gradients: int
    optimizer_states: int
    activations: int = 0
    logits: int = 0
    buffers: int = 0  # rotary tables; FSDP's gathers and scatters; the optimizer's copies

    @property
    def total(self) -> int:
        """Sum of all parts."""
        states = self.parameters + self.gradients + self.optimizer_states
        return states + self.activations + self.logits + self.buffers


def _moment(rank: Rank, name: str, *, gradients: int, buffers: int = 0, **parts: int) -> Moment:
    """Return a moment with the rank's shards of weights and optimizer states."""
    parameters = rank.sharded(rank.weights)
    rotary_tables = FLOAT32 * rank.model.max_seq_len * rank.model.head_dim
    return Moment(
        name,
        parameters,
        gradients,
        optimizer_states=parameters * rank.state_width // rank.weight_width,
        buffers=rotary_tables + buffers,
        **parts,
    )


def step_memory(rank: Rank) -> list[Moment]:
    """Return the moments of a step at which memory can peak, in order: the loss; for each FSDP
    group, the peak of its backward and the reduce-scatter of its gradients at the end; the
    optimizer's update. The moment with the largest total is the peak of the step.

    Assumes the last microbatch of a step after the first one, so that optimizer states exist. What
    an earlier one keeps for it is added: weights that stay gathered through its backward."""
    groups, last = rank.groups, len(rank.groups) - 1
    # The first group whose weights are still gathered at the loss, which uses the last group's.
    kept_from = 0 if rank.reshard == "never" else last
    stays = rank.reshard == "never" and rank.accum_steps > 1
    in_block = max(out * in_ for out, in_ in block_linear_shapes(rank.model).values())

    kept, whole = sum(group.saved for group in groups), rank.weights
    moments = [_loss(rank, kept_from, activations=kept, gradients=_added_up(rank, whole))]
    for i in range(last, -1, -1):
        group, kept = groups[i], kept - groups[i].saved
        # Meanwhile FSDP prefetches the weights of the next group in the backward, and scatters the
        # gradients of the previous one, i + 1.
        next_up = max(i - 1, 0) if rank.degrees.fsdp > 1 else i
        ahead = rank.gathered(min(kept_from, next_up), i)
        stay = sum(each.gathered for each in groups[i + 1 :]) if stays else 0
        in_flight = () if rank.without_fsdp else groups[i + 1 : i + 2]
        scattering = rank.reduce_width * sum(each.weights for each in in_flight)

        largest = in_block if 0 < i < last else group.weights
        moments += _backward(
            rank,
            group,
            kept=kept,
            gradients=_added_up(rank, whole),
            during=ahead + group.gathered + stay + scattering,
            after=ahead + _gradients(rank, group, largest, scattering),
        )
        whole -= group.weights
    return [*moments, _update(rank)]


def _backward(
    rank: Rank, group: Group, *, kept: int, gradients: int, during: int, after: int
) -> list[Moment]:
    """Return the peak of a group's backward, and its end, with the buffers `during` it and `after`
    it. The other groups keep activations of `kept` bytes."""
    has_logits = group.name == OUTPUT and not rank.fuses_loss
    logits = rank.width * rank.logits if has_logits else 0
    peak = {"activations": kept + group.working, "logits": logits}
    end = {"activations": kept + rank.residual}
    return [
        _moment(rank, f"backward of {group.name}", gradients=gradients, buffers=during, **peak),
        _moment(rank, f"gradients of {group.name}", gradients=gradients, buffers=after, **end),
    ]


def _added_up(rank: Rank, whole: int) -> int:
    """Bytes of gradients when those of `whole` weights have not been scattered yet. Their sums over
    microbatches are sharded if each is reduced, else whole until the last backward."""
    if rank.reductions > 1:
        whole = 0
    width = rank.reduce_width if rank.accum_steps > 1 else 0
    return rank.sharded(rank.weights - whole) + width * whole


def _update(rank: Rank) -> Moment:
    """The moment of the optimizer's step, of which "foreach" copies the parameters."""
    shards = rank.sharded(rank.weights)
    copied = shards if rank.config.optimizer.implementation == "foreach" else 0
    return _moment(rank, "optimizer step", gradients=shards, buffers=copied)


def _gradients(rank: Rank, group: Group, largest: int, scattering: int) -> int:
    """Bytes of a group's weights and gradients at its end, `largest` elements in one matrix."""
    gradients, reduced = rank.width * group.weights, rank.reduce_width * group.weights
    if not rank.without_fsdp:
        # The scatter buffer replaces the weights and the previous buffer.
        return gradients + max(group.gathered + scattering, reduced)
    # Gradients are cast one by one, the last beside the others' casts; on CPU also to add.
    casts = rank.width != rank.weight_width and (rank.accum_steps == 1 or rank.on_cpu)
    cast = max(reduced, rank.weight_width * group.weights)
    cast += rank.width * largest if casts else 0
    return max(gradients + group.gathered, cast)


def _loss(rank: Rank, kept_from: int, **parts: int) -> Moment:
    """The moment of the loss, with its parts other than logits and buffers."""
    # FSDP keeps the all-gather buffer of the head's weights until the next all-gather.
    buffers = rank.gathered(kept_from, len(rank.groups))
    if rank.fuses_loss and rank.degrees.fsdp > 1:
        buffers += rank.groups[-1].gathered

    # The gradient replaces the logits. An eager loss also has a piece of them in float32.
    in_float32 = 0
    if not rank.config.compile.covers("loss"):
        in_float32 = loss.FLOAT32_COPIES * FLOAT32 * min(loss.PIECE_LOGITS, rank.logits)
    if rank.fuses_loss:
        # The weight's gradient is computed last, or accumulates in float32 (on CPU with a copy).
        # Until then the float32 piece can use its memory, and larger pieces use no more.
        added_up = 0
        if rank.logits > loss.CHUNK_LOGITS:
            added_up = (2 if rank.on_cpu else 1) * FLOAT32 * rank.output_weights
        logits = rank.width * min(rank.logits, loss.CHUNK_LOGITS)
        piece = max(0, in_float32 - rank.width * rank.output_weights)
        working = rank.hidden + logits + added_up + piece
    else:
        working = 2 * rank.width * rank.logits + in_float32  # the logits stay beside their gradient

    return _moment(rank, "loss", logits=working, buffers=buffers, **parts)


# ----- Pipelines -----


def rank_moments(job: Job, float8_linears: Collection[str], *, on_cpu: bool) -> list[list[Moment]]:
    """Return for each rank of a pipeline, or one without, the moments at which memory can peak."""
    ranks = [Rank(share, float8_linears, on_cpu=on_cpu) for share in rank_shares(job)]
    if job.degrees.pp == 1:
        return [step_memory(ranks[0])]
    looped = SCHEDULES[job.config.parallelism.pipeline_parallel_schedule].looped
    moments = []
    for index, (rank, order) in enumerate(zip(ranks, pipeline_orders(job), strict=True)):
        # torch has a buffer for each microbatch that a stage receives from either side. The first
        # block saves its input there, and the last one's output is kept until it has a gradient.
        # Looped schedules keep what a stage sends, also a gradient, until the step's end.
        saved = {group.name: group.saved for group in rank.groups}
        kept, freed, received = {}, {}, 0
        for stage in job.rank_stages(index):
            names = job.stages[stage]
            kept[stage] = sum(saved.get(name, 0) for name in names)
            transferred = 2 * rank.residual
            if EMBEDDING in names:
                kept[stage] += rank.residual
                transferred -= rank.residual
            if OUTPUT in names:
                kept[stage] -= rank.residual
                transferred -= rank.residual
            freed[stage] = kept[stage] - transferred if looped else kept[stage]
            received += job.batch.grad_accum_steps * transferred
        moments.append(_pipeline_memory(rank, in_flight(order, kept, freed), received))
    return moments


def _pipeline_memory(rank: Rank, flight: tuple[int, int], received: int) -> list[Moment]:
    """Return the moments of a rank that holds so many bytes of activations, before it has gradients
    and with them, and of buffers to receive. Gradients are whole until all are reduced."""
    groups, stays = [group for group in rank.groups if group.working], rank.reshard != "always"
    gathered = sum(group.gathered for group in groups) if stays else 0
    whole, moments = rank.reduce_width * rank.weights, []
    for held, gradients in zip(flight, (0, whole), strict=True):
        if rank.has_output:
            kept_from = 0 if stays else len(rank.groups) - 1
            moments.append(_loss(rank, kept_from, activations=held, gradients=gradients))
        for i, group in reversed(list(enumerate(groups))):
            held -= group.saved
            # Weights that were freed are gathered again, and those of the next group ahead.
            there = gathered or sum(each.gathered for each in groups[max(i - 1, 0) : i + 1])
            # New gradients are beside the sums, which the first microbatch makes of them.
            width = rank.width if gradients else rank.width + rank.reduce_width
            new = width * group.weights
            if rank.without_fsdp:
                new = _gradients(rank, group, group.weights, 0) - group.gathered
            moments += _backward(
                rank, group, kept=held, gradients=gradients, during=there, after=there + new
            )

    # FSDP scatters the sums group by group, from a copy.
    if not rank.without_fsdp:
        copy = rank.reduce_width * max(group.weights for group in groups)
        moments.append(
            _moment(rank, "reduction of gradients", gradients=whole, buffers=gathered + copy)
        )
    moments.append(_update(rank))
    return [replace(each, buffers=each.buffers + received) for each in moments]
