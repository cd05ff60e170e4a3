"""Estimate a rank's memory at the moments of a step at which it can peak, in bytes, from shapes.

In the backward pass activations fall from block to block and gradients grow, so that the peak is at
one of its ends, at the loss before it, or at the optimizer's update after it. RESERVED_RATIO is for
what is not counted (docs/plan.md, Memory).

Shapes: N tokens of a microbatch, D dim, V vocab_size.
"""

from dataclasses import dataclass

from torchtitan_lite.catalog.schedules import INTERLEAVED
from torchtitan_lite.models import loss

from .share import Share

RESERVED_RATIO = 1.26
"""Reserved memory over the estimated peak: the highest of eight measurements that torchtitan
published for Llama 3 8B and 70B on 8 to 256 GPUs. It is not a bound."""
RESERVED_RATIO_WITHOUT_FSDP = 1.1
"""Without FSDP, counted on a fake H100: 1.095 for layers of 8B, 1.11 for two stages with TP."""
FLOAT32 = 4


@dataclass(frozen=True)
class Moment:
    """Memory of a rank at one moment of a step, in bytes by part."""

    name: str
    parameters: int
    gradients: int
    optimizer_states: int
    activations: int = 0
    logits: int = 0
    buffers: int = 0  # rotary tables; FSDP's gathers and scatters; a pipeline's receives

    @property
    def total(self) -> int:
        """Sum of all parts."""
        states = self.parameters + self.gradients + self.optimizer_states
        return states + self.activations + self.logits + self.buffers


def step_memory(share: Share) -> list[Moment]:
    """Return the moments of a step at which a rank's memory can peak, in order.

    Assumes the last microbatch of a step after the first one, so that optimizer states exist, and
    that the most microbatches are in flight."""
    # In a pipeline a stage's input is where it was received, and its output is kept for its
    # gradient.
    tensors = _block_tensors(share)
    each = _kept_by_blocks(share, tensors)
    each += share.residual * (share.has_embedding - share.has_output)
    waiting = round((_in_flight(share) - 1) * each)  # of other microbatches
    moments = [_loss(share, waiting + each)] if share.has_output else []

    # Memory can peak at the last block, beside which FSDP scatters the output's gradients, at the
    # one before it, beside which it scatters the last block's, and at the first.
    for name, before, behind in (
        ("last block", share.blocks - 1, share.output),
        ("second to last block", max(0, share.blocks - 2), share.block),
        ("first block", 0, share.block),
    ):
        scattered, new = _new_gradients(share, behind)
        kept, there = waiting + each * before // share.blocks, _gathered(share, before)
        left = (before + 1) * share.block + share.embedding
        for part, working, buffers in (
            ("backward", _working(share, tensors), scattered),
            ("gradients", share.residual, new),
        ):
            parts = {"activations": kept + working, "buffers": there + buffers}
            moments.append(_moment(share, f"{part} of the {name}", left, **parts))

    return [*moments, _moment(share, "optimizer step", None)]


def _moment(share: Share, name: str, left: int | None, *, buffers: int = 0, **parts: int) -> Moment:
    """Return a moment with the rank's shards of weights and optimizer states, in a backward pass
    with the gradients of all but the `left` weights."""
    parameters = _sharded(share, share.weights)
    rotary_tables = FLOAT32 * share.model.max_seq_len * share.model.head_dim

    # Each microbatch that a stage receives is in a buffer of its own. What an interleaved schedule
    # has sent, it keeps too.
    sides = 2 * len(share.job.stages) // share.job.degrees.pp
    received = (sides - share.has_embedding - share.has_output) * share.residual
    sent = share.microbatches - _in_flight(share) if share.schedule == INTERLEAVED else 0
    received = round(received * (share.microbatches + sent))
    return Moment(
        name,
        parameters,
        gradients=parameters if left is None else _whole_gradients(share, left),
        optimizer_states=round(parameters * share.state_width / share.weight_width),
        buffers=rotary_tables + buffers + received,
        **parts,
    )


# ----- Weights and gradients -----


def _sharded(share: Share, weights: int) -> int:
    """Bytes of this rank's shards of that many weights."""
    if share.config.training.enable_cpu_offload:
        return 0
    return share.weight_width * weights // share.job.degrees.fsdp


def _gathered(share: Share, before: int) -> int:
    """Bytes of gathered weights in the backward of a block with `before` blocks before it: its own
    and the next one's, or all that stay. Tied ones stay beside their gradient."""
    width, blocks = share.gathered_width, min(before + 1, 2)
    ends = (width + share.width) * share.embedding if share.tied else 0
    if share.stays:
        keeps = not share.without_fsdp and (share.pipelined or share.microbatches > 1)
        blocks = share.blocks if keeps else before + 1
        ends += 0 if share.tied or share.without_fsdp else width * share.embedding
        ends += width * share.output if keeps else 0
    return share.kept_block * blocks + ends


def _new_gradients(share: Share, behind: int) -> tuple[int, int]:
    """Bytes of gradients at a block: those of the weights `behind` it, which FSDP scatters, with
    what it then adds to the sums of earlier microbatches; and new ones, in the compute type and, in
    place of the gathered weights and of what is scattered, in the reduced one."""
    gradients, reduced = share.width * share.block, share.reduce_width * share.block
    if share.without_fsdp:
        return 0, max(gradients, reduced - share.gathered_width * share.block)
    added = _sharded(share, behind) if share.reductions > 1 else 0
    scattered = 0 if share.pipelined else share.reduce_width * behind + added
    return scattered, gradients + max(scattered, reduced - gradients)


def _whole_gradients(share: Share, weights: int) -> int:
    """Bytes of gradients of which those of `weights` have not been scattered yet. Their sums over
    microbatches are sharded if each is reduced, else whole until the last backward."""
    if share.pipelined:
        return share.reduce_width * share.weights
    weights = 0 if share.reductions > 1 else weights
    width = share.reduce_width if share.microbatches > 1 else 0
    return _sharded(share, share.weights - weights) + width * weights


# ----- Activations -----


def _in_flight(share: Share) -> float:
    """Microbatches whose activations a rank holds at the most, as the orders of
    torch/distributed/pipelining/schedules.py make them; 1 without a pipeline."""
    p, n = share.job.degrees.pp, share.microbatches
    if p == 1:
        return 1
    if share.schedule == "GPipe":
        return n
    if share.schedule == INTERLEAVED:
        # It warms up with a round of microbatches for each stage but one, then with as many as the
        # ranks behind need.
        stages = len(share.job.stages) / p
        return min(n, ((stages - 1) * min(n, p) + 2 * (p - 1 - share.rank) + 1) / stages)
    return min(n, p - share.rank)


def _block_tensors(share: Share) -> dict[str, int]:
    """Bytes of each tensor that a block's backward needs, by the name of its producer."""
    model, cp, width = share.model, share.job.degrees.cp, share.width
    local = share.job.microbatch_tokens // share.tp  # tokens, or the same part of heads and ffn_dim
    heads, keys, ffn = (local * size for size in (model.q_dim, model.kv_dim, model.ffn_dim))

    def read(tensor: str, elements: int) -> int:
        """Bytes of a tensor that only linears save."""
        return elements * (1 if share.gathers_float8(tensor) else width)

    # Context parallelism keeps keys and values of whole sequences, and puts two chunks together.
    return {
        "input": share.residual,
        "attention_norm": read("attention_norm", local * share.tp * model.dim),
        "q": heads * width,
        "k": cp * keys * width,
        "v": cp * keys * width,
        "attention": heads * width * (2 if cp > 1 else 1),
        "log_sum_exp": local * model.n_heads * FLOAT32,
        "residual": share.residual,
        "ffn_norm": read("ffn_norm", local * share.tp * model.dim),
        "w1": ffn * width,
        "silu": ffn * width,
        "w3": ffn * width,
        "gated": read("gated", ffn),
    }


def _kept_by_blocks(share: Share, tensors: dict[str, int]) -> int:
    """Bytes that the rank's blocks keep of a microbatch from the forward to the backward pass."""
    ac, dropped = share.config.activation_checkpoint, _recomputed_by_compiler(share)
    plain = sum(size for name, size in tensors.items() if name not in dropped)
    if ac.mode == "memory_budget":  # the input is kept with any budget
        plain = share.residual + round(ac.memory_budget * (plain - share.residual))

    # The "op" policy keeps attention, every second matmul, and the sums that tensor parallelism
    # scatters. Eager, it also keeps w2's output, which nothing needs.
    kept = share.residual
    if ac.keeps_by_op:
        kept += sum(tensors[name] for name in ("q", "attention", "log_sum_exp", "w1"))
        kept += tensors["v"] // share.job.degrees.cp
        scattered = share.residual if share.tp > 1 else 0
        eager = not share.config.compile.covers("model")
        kept += scattered + (share.tp * share.residual + scattered if eager else 0)
    return (share.blocks - share.checkpointed) * plain + share.checkpointed * kept


def _recomputed_by_compiler(share: Share) -> set[str]:
    """Tensors that torch.compile recomputes because that is cheap: silu, and inputs that are only
    cast to float8, unless tensor parallelism gathers them."""
    if not share.config.compile.covers("model"):
        return set()
    if not share.config.float8.recipe.divides_tokens:
        return {"silu"}  # the weight gradient reads the uncast input
    inputs = ("attention_norm", "ffn_norm", "gated") if share.tp == 1 else ()
    return {"silu", *filter(share.only_in_float8, inputs)}


def _working(share: Share, tensors: dict[str, int]) -> int:
    """Bytes of a block's activations at the peak of its backward: with the gradients of SwiGLU's
    factors and of the residual stream, or under context parallelism, in attention's, with those of
    whole keys and values for each query head."""
    every, cp = sum(tensors.values()), share.job.degrees.cp
    swiglu = every + 2 * tensors["w1"] + share.residual
    behind = ("residual", "ffn_norm", "w1", "silu", "w3", "gated")
    before = every - sum(tensors[name] for name in behind)
    attention = before + 2 * (cp + 1) * tensors["q"] + tensors["k"] + tensors["v"]
    return max(swiglu, attention if cp > 1 else 0)


# ----- The loss -----


def _loss(share: Share, held: int) -> Moment:
    """The moment of the loss, beside activations `held` by blocks. Its gradient replaces the logits
    [N, V]. An eager loss also has a piece of them in float32."""
    width, float8, hidden = share.width, share.config.float8, share.tp * share.residual
    whole = share.tp > 1 and share.config.parallelism.disable_loss_parallel
    logits = share.job.microbatch_tokens * share.model.vocab_size // (1 if whole else share.tp)
    piece = 0
    if not share.config.compile.covers("loss"):
        piece = loss.FLOAT32_COPIES * FLOAT32 * min(loss.PIECE_LOGITS, logits)

    # The last norm and the projection keep their inputs. The loss is fused with the projection,
    # unless that is in float8, or its logits are gathered: it keeps the weight's gradient, in whose
    # memory the piece was. That accumulates in float32 over chunks of logits.
    kept, working = share.residual + hidden, 2 * width * logits + piece
    fused = not whole and not (float8.enable_float8_linear and float8.convert_output)
    if fused:
        kept += width * share.matrix
        added_up = FLOAT32 * share.matrix if logits > loss.CHUNK_LOGITS else 0
        working = hidden + width * min(logits, loss.CHUNK_LOGITS) + added_up
        working += max(0, piece - width * share.matrix)
    if share.pipelined and share.schedule == "GPipe":
        kept *= share.microbatches

    # Gathered weights: the projection's, twice while FSDP copies them, and what stays.
    copied = fused and not share.tied and share.job.degrees.fsdp > 1
    gathered = share.gathered_width * (share.output or share.embedding) * (2 if copied else 1)
    if share.stays:
        gathered += share.kept_block * share.blocks
        gathered += 0 if share.without_fsdp or share.tied else share.width * share.embedding
    parts = {"activations": held + kept, "logits": working, "buffers": gathered}
    return _moment(share, "loss", share.weights, **parts)
