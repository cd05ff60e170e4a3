"""Estimate a rank's memory at each moment of a training step, in bytes, from shapes alone.

Not counted are temporary copies of a cast to float8, packed weights and operands of emulated
matmuls on CPU, and on a GPU the CUDA context, cuBLAS's and NCCL's buffers, and the allocator's
unused memory.

Shapes: N tokens of a microbatch, D dim, H heads, K key-value heads, F ffn_dim, V vocab_size.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from torchtitan_lite.config import Config, ParallelDegrees, resolve_batch
from torchtitan_lite.models import loss
from torchtitan_lite.models.flavors import BLOCK_LINEARS, ModelArgs, block_linear_shapes
from torchtitan_lite.models.llama3 import CPU_FLOAT32_HEAD_DIM

FLOAT32 = 4
WIDTHS = {"bfloat16": 2, "float32": FLOAT32}
"""Bytes of an element."""
MOMENT_WIDTHS = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / 128, "float8": 1 + 4 / 128}
"""Bytes per weight of each of AdamW's moments, with its share of the scales."""
RESERVED_RATIO = 1.26
"""Upper bound of the memory that a GPU reserves over the peak counted here: 1.18 to 1.26 in eight
readings that torchtitan published for Llama 3 8B and 70B on 8 to 256 GPUs. Memory freed by one of
FSDP's streams cannot be used by the others."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """The settings that decide a rank's memory, which is alike on all ranks."""

    config: Config
    model: ModelArgs
    degrees: ParallelDegrees
    float8_linears: frozenset[str]
    """Names within a block of the linears that train in float8, such as attention.wq."""
    on_cpu: bool

    @property
    def tokens(self) -> int:
        """N."""
        return self.config.training.microbatch_tokens

    @property
    def width(self) -> int:
        """Bytes of an element of the compute type."""
        return WIDTHS[self.config.training.mixed_precision_param]

    @property
    def reduce_width(self) -> int:
        """Bytes of an element of a gradient that is being reduced."""
        return WIDTHS[self.config.training.mixed_precision_reduce]

    @property
    def gathers_logits(self) -> bool:
        """Whether tensor parallelism gathers the logits for the loss."""
        return self.degrees.tp > 1 and self.config.parallelism.disable_loss_parallel

    @property
    def fuses_loss(self) -> bool:
        """Whether the loss is fused with the projection to the vocabulary."""
        float8 = self.config.float8
        return not (self.gathers_logits or (float8.enable_float8_linear and float8.convert_output))

    @property
    def logits(self) -> int:
        """Number of logits on this rank, out of N * V."""
        ranks = 1 if self.gathers_logits else self.degrees.tp
        return self.tokens * self.model.vocab_size // ranks

    @property
    def hidden(self) -> int:
        """Bytes of activations [N, D], gathered along the sequence."""
        return self.width * self.tokens * self.model.dim

    @property
    def residual(self) -> int:
        """Bytes of the residual stream [N, D], split along the sequence."""
        return self.hidden // self.degrees.tp

    @property
    def output_weights(self) -> int:
        """Elements of this rank's share of the embedding [V, D], or of the projection."""
        return self.model.vocab_size * self.model.dim // self.degrees.tp

    def norm_input(self, *, compiled: bool) -> int:
        """Bytes that a norm saves: its input; eager on CPU also its output, both in float32."""
        several = self.on_cpu and not compiled
        return 2 * FLOAT32 * self.residual // self.width if several else self.residual

    def gathers_float8(self, linears: Collection[str]) -> bool:
        """Whether tensor parallelism gathers the input of `linears` in float8, which they save."""
        possible = self.degrees.tp > 1 and self.config.float8.recipe.gathers_activations
        return possible and self.float8_linears.issuperset(linears)


@dataclass(frozen=True)
class Group:
    """Weights that FSDP gathers and scatters together, and their modules' activations in bytes."""

    name: str
    weights: int
    """Elements once gathered: this rank's share under tensor parallelism."""
    gathered: int
    """Bytes of the weights gathered for the loss or the backward."""
    saved: int
    """Kept from the forward to the backward."""
    working: int
    """Held at the height of the backward, including what was saved."""


@dataclass(frozen=True)
class Moment:
    """Memory of a rank at one moment of a step, in bytes by part."""

    name: str
    parameters: int
    gradients: int
    optimizer_states: int
    activations: int = 0
    logits: int = 0
    buffers: int = 0
    """Weights that FSDP has gathered, gradients that it is about to scatter, and copies that the
    optimizer makes."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        kept = self.parameters + self.gradients + self.optimizer_states
        return kept + self.activations + self.logits + self.buffers


def reserved_bytes(moments: Iterable[Moment]) -> float:
    """Return the most that a GPU reserves at the peak of a step."""
    return RESERVED_RATIO * max(moment.total for moment in moments)


def step_memory(rank: Rank) -> list[Moment]:
    """Return the moments of a step at which memory can peak, in order: the loss; for each FSDP
    group the height of its backward, and its end, when the gradients are scattered; the optimizer's
    update. The peak is the one with the largest total.

    The step is not the first, so the optimizer has its states; its microbatch is the last one."""
    groups = [_embedding(rank), *(_block(rank, i) for i in range(rank.model.n_layers)), _head(rank)]
    last = len(groups) - 1
    # The first group whose weights are not freed after its forward.
    reshard = rank.config.parallelism.fsdp_reshard_after_forward
    kept_from = {"never": 0, "default": last - 1, "always": last}[reshard]

    # In the loss all activations are kept. FSDP holds the buffer that it copied the head's weights
    # from until it gathers others.
    kept = sum(group.saved for group in groups)
    buffers = sum(group.gathered for group in groups[kept_from:])
    if rank.fuses_loss and rank.degrees.dp_shard > 1:
        buffers += groups[-1].gathered
    working = _loss_working(rank)
    loss_moment = _moment(rank, groups, "loss", activations=kept, logits=working, buffers=buffers)

    backward: list[Moment] = []
    for i in range(last, -1, -1):
        kept -= groups[i].saved
        backward += _backward_moments(rank, groups, i, kept=kept, kept_from=kept_from)

    # The "foreach" optimizer copies the parameters.
    foreach = rank.config.optimizer.implementation == "foreach"
    copies = _sharded(rank, groups) if foreach else 0
    return [loss_moment, *backward, _moment(rank, groups, "optimizer step", left=0, buffers=copies)]


def _backward_moments(
    rank: Rank, groups: Sequence[Group], i: int, *, kept: int, kept_from: int
) -> tuple[Moment, Moment]:
    """The height and the end of the backward of group `i`, with `kept` for the groups before it."""
    group, is_head = groups[i], i == len(groups) - 1
    # Meanwhile FSDP gathers the weights that backward needs next, and scatters the gradients of the
    # group after this one, whose backward was before.
    next_up = max(i - 1, 0) if rank.degrees.dp_shard > 1 else i
    ahead = sum(group.gathered for group in groups[min(kept_from, next_up) : i])
    scattering = rank.reduce_width * sum(group.weights for group in groups[i + 1 : i + 2])
    # At the end, the buffer to scatter from replaces the group's weights and the buffer before.
    replaced = max(group.gathered + scattering, rank.reduce_width * group.weights)

    moment = partial(_moment, rank, groups, left=i + 1)
    height = moment(
        name=f"backward of {group.name}",
        activations=kept + group.working,
        logits=rank.width * rank.logits if is_head and not rank.fuses_loss else 0,
        buffers=ahead + group.gathered + scattering,
    )
    end = moment(
        name=f"gradients of {group.name}",
        activations=kept + rank.residual,
        buffers=ahead + rank.width * group.weights + replaced,
    )
    return height, end


def _moment(
    rank: Rank, groups: Sequence[Group], name: str, *, left: int | None = None, **parts: int
) -> Moment:
    """A moment when the first `left` groups (default: all) have yet to scatter their gradients."""
    left = len(groups) if left is None else left
    # Gradients of earlier microbatches add up unsharded: only the last backward scatters them.
    accum_steps = resolve_batch(rank.config.training, dp_degree=rank.degrees.dp).grad_accum_steps
    accumulated_width = rank.reduce_width if accum_steps > 1 else 0
    accumulated = accumulated_width * sum(group.weights for group in groups[:left])
    moment_width = MOMENT_WIDTHS[rank.config.optimizer.state_dtype]
    return Moment(
        name,
        parameters=_sharded(rank, groups),
        gradients=_sharded(rank, groups[left:]) + accumulated,
        optimizer_states=round(2 * _sharded(rank, groups) * moment_width / FLOAT32),
        **parts,
    )


def _sharded(rank: Rank, groups: Sequence[Group]) -> int:
    """Bytes of this rank's float32 shards of the groups' weights."""
    if rank.config.training.enable_cpu_offload:
        return 0
    return FLOAT32 * sum(group.weights for group in groups) // rank.degrees.dp_shard


def _loss_working(rank: Rank) -> int:
    """Bytes held at the height of the loss, including what is saved for the backward. The gradient
    replaces the logits; eager, a piece of them is in float32 meanwhile."""
    eager = not rank.config.compile.covers("loss")
    in_float32 = FLOAT32 * min(loss.PIECE_LOGITS, rank.logits) if eager else 0
    if not rank.fuses_loss:
        return 2 * rank.width * rank.logits + in_float32  # the logits themselves are kept

    # The gradient of the weight comes last, or adds up in float32, on CPU by way of a copy. Until
    # then its memory serves the float32 piece.
    several = rank.logits > loss.CHUNK_LOGITS
    added_up = several * (2 if rank.on_cpu else 1) * FLOAT32 * rank.output_weights
    logits = rank.width * min(rank.logits, loss.CHUNK_LOGITS)
    piece = max(0, in_float32 - rank.width * rank.output_weights)
    return rank.hidden + logits + added_up + piece


def _embedding(rank: Rank) -> Group:
    weights = rank.output_weights
    # FSDP does not gather the embedding again for its backward.
    never = rank.config.parallelism.fsdp_reshard_after_forward == "never"
    gathered = rank.width * weights if never else 0
    return Group("tok_embeddings", weights, gathered, saved=0, working=rank.hidden)


def _head(rank: Rank) -> Group:
    """The last norm and the projection to the vocabulary."""
    weights = rank.output_weights + rank.model.dim
    saved = rank.norm_input(compiled=False) + rank.hidden  # or its gradient, if the loss is fused
    if rank.fuses_loss:
        saved += rank.width * rank.output_weights  # the weight's gradient
    working = saved + rank.hidden
    return Group("output", weights, rank.width * weights, saved=saved, working=working)


def _block(rank: Rank, index: int) -> Group:
    tensors, ac = _block_tensors(rank), rank.config.activation_checkpoint
    if index in ac.checkpointed_layers(rank.model.n_layers):
        by_op = _kept_by_op(rank, tensors) if ac.keeps_by_op else {}
        kept = {"input": rank.residual} | by_op
    else:
        recomputed = _recomputed_by_compiler(rank)
        kept = {name: size for name, size in tensors.items() if name not in recomputed}
        if ac.mode == "memory_budget":  # the input is kept on any budget
            more = sum(kept.values()) - rank.residual
            kept = {"input": rank.residual, "budget": round(ac.memory_budget * more)}
    # The height is SwiGLU's backward: the gradients of its two factors and of the residual stream.
    working = sum((tensors | kept).values()) + 2 * tensors["w1"] + rank.residual

    # FSDP gathers some weights in float8, 1 byte each.
    tp = rank.degrees.tp
    sizes = {name: out * in_ for name, (out, in_) in block_linear_shapes(rank.model).items()}
    weights = sum(sizes.values()) // tp + 2 * rank.model.dim  # and two norms
    all_gather = rank.config.float8.enable_fsdp_float8_all_gather
    in_float8 = sum(sizes[name] for name in rank.float8_linears) // tp if all_gather else 0
    gathered = rank.width * (weights - in_float8) + in_float8
    return Group(f"layers.{index}", weights, gathered, saved=sum(kept.values()), working=working)


def _readers(tensor: str) -> set[str]:
    """The linears of a block that read `tensor`."""
    return {name for name, linear in BLOCK_LINEARS.items() if linear.reads == tensor}


def _block_tensors(rank: Rank) -> dict[str, int]:
    """Bytes of each tensor that a block's backward needs, by the name of what computed it."""
    model, tp, width = rank.model, rank.degrees.tp, rank.width
    heads = rank.tokens * model.q_dim // tp
    kv_heads = rank.tokens * model.kv_dim // tp
    ffn = rank.tokens * model.ffn_dim // tp

    def read(tensor: str, elements: int) -> int:
        """Bytes of a tensor that is saved only for the linears that read it."""
        return elements * (1 if rank.gathers_float8(_readers(tensor)) else width)

    # Attention saves its operands and its output; wo saves a cast of it.
    float32_attention = rank.on_cpu and model.head_dim <= CPU_FLOAT32_HEAD_DIM
    attention_width = FLOAT32 if float32_attention else width
    float8_attention = rank.gathers_float8(_readers("attention"))
    no_cast = attention_width == width or float8_attention
    norm_input = rank.norm_input(compiled=rank.config.compile.covers("model"))
    return {
        "input" if norm_input == rank.residual else "input in float32": norm_input,
        "attention_norm": read("attention_norm", rank.tokens * model.dim),
        "q": heads * attention_width,
        "k": kv_heads * attention_width,
        "v": kv_heads * attention_width,
        "attention": heads * attention_width,
        "attention cast": 0 if no_cast else heads * width,
        "log_sum_exp": FLOAT32 * rank.tokens * model.n_heads // tp,
        "attention in float8": heads if float8_attention else 0,
        "residual": norm_input,
        "ffn_norm": read("ffn_norm", rank.tokens * model.dim),
        "w1": ffn * width,
        "silu": ffn * width,
        "w3": ffn * width,
        "gated": read("gated", ffn),
    }


def _recomputed_by_compiler(rank: Rank) -> set[str]:
    """Tensors that torch.compile recomputes, since that is cheap: silu, and the inputs that linears
    only cast to float8, unless tensor parallelism gathered them."""
    if not rank.config.compile.covers("model"):
        return set()
    if not rank.config.float8.recipe.divides_tokens:
        return {"silu"}  # the weight gradient reads the uncast input
    cheap = {"silu", "attention cast"}
    if rank.degrees.tp > 1:
        return cheap
    inputs = ("attention_norm", "ffn_norm", "gated")
    return cheap | {name for name in inputs if _readers(name) <= rank.float8_linears}


def _kept_by_op(rank: Rank, tensors: dict[str, int]) -> dict[str, int]:
    """Tensors that the "op" policy keeps: attention, every second matmul, and the sums that tensor
    parallelism scatters. w2's output is kept although no recomputation needs it; the compiler drops
    it."""
    kept = {name: tensors[name] for name in ("attention", "log_sum_exp", "w1")}
    for output, of_matmul in (("q", rank.model.q_dim), ("v", rank.model.kv_dim)):
        kept[output] = rank.tokens * of_matmul // rank.degrees.tp * rank.width
    kept["wo scattered"] = scattered = rank.residual if rank.degrees.tp > 1 else 0
    if not rank.config.compile.covers("model"):
        kept |= {"w2": rank.hidden, "w2 scattered": scattered}
    return kept
