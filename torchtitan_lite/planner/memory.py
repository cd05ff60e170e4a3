"""Where a rank's memory goes: what it holds at each moment of a training step, in bytes, from
shapes alone.

Counted are a step's tensors. Left out are the temporary copies of a cast to float8, and what comes
with a device: on CPU the packed weights of a matmul, and the float32 operands of an emulated float8
one; on a GPU the CUDA context, the buffers of cuBLAS and NCCL, and what the allocator holds without
using it.

Shapes: N tokens of a microbatch, D dim, H heads, K key-value heads, Q head_dim, F ffn_dim, V
vocab_size.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torchtitan_lite.config import (
    ActivationCheckpointConfig,
    CompileConfig,
    Float8Config,
    OptimizerConfig,
    ParallelDegrees,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan_lite.metrics.dimensions import Dimensions

FLOAT32 = 4
WIDTHS = {"bfloat16": 2, "float32": FLOAT32}
"""Bytes of an element."""
MOMENT_WIDTHS = {
    "float32": FLOAT32,
    "bfloat16": 2,
    "int8": 1 + FLOAT32 / 128,
    "float8": 1 + FLOAT32 / 128,
}
"""Bytes that each of AdamW's moments takes of a weight, with its share of their scale."""
RESERVED_RATIO = 1.26
"""Memory that a GPU reserves over the peak counted here, at most: 1.18 to 1.26 in eight readings
that torchtitan published of Llama 3 8B and 70B on 8 to 256 GPUs. What one of FSDP's streams has
freed is of no use to the others."""
LINEAR_INPUTS = {
    "attention_norm": ("attention.wq", "attention.wk", "attention.wv"),
    "ffn_norm": ("feed_forward.w1", "feed_forward.w3"),
    "gated": ("feed_forward.w2",),
}
"""The tensors of a block that are saved for linears alone, and those linears. Attention saves wo's
input itself."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What decides the memory of a rank: all ranks are alike."""

    model: Dimensions
    degrees: ParallelDegrees
    training: TrainingConfig
    parallelism: ParallelismConfig
    activation_checkpoint: ActivationCheckpointConfig
    compile: CompileConfig
    optimizer: OptimizerConfig
    float8: Float8Config
    float8_linears: Collection[str]
    """Names within a block of the linears that train in float8, such as attention.wq."""
    grad_accum_steps: int
    chunk_logits: int
    """Logits that the loss makes at once, at most, where it is fused with the projection to the
    vocabulary."""
    piece_logits: int
    """Logits that it has in float32 at once where it is not compiled."""
    float32_attention: bool = False
    """Whether attention computes in float32, and its output is cast."""
    on_cpu: bool

    @property
    def tokens(self) -> int:
        """N."""
        return self.training.microbatch_tokens

    @property
    def width(self) -> int:
        """Bytes of an element of the compute type."""
        return WIDTHS[self.training.mixed_precision_param]

    @property
    def reduce_width(self) -> int:
        """Bytes of an element of a gradient that is being reduced."""
        return WIDTHS[self.training.mixed_precision_reduce]

    @property
    def gathers_logits(self) -> bool:
        """Whether tensor parallelism gathers the logits for the loss."""
        return self.degrees.tp > 1 and self.parallelism.disable_loss_parallel

    @property
    def fuses_loss(self) -> bool:
        """Whether the loss is fused with the projection to the vocabulary."""
        return not (
            self.gathers_logits or (self.float8.enable_float8_linear and self.float8.convert_output)
        )

    @property
    def logits(self) -> int:
        """How many logits the rank has, of N * V."""
        return (
            self.tokens * self.model.vocab_size // (1 if self.gathers_logits else self.degrees.tp)
        )

    @property
    def compiled(self) -> bool:
        """Whether the blocks are compiled."""
        return self.compile.covers("model")

    @property
    def residual(self) -> int:
        """Bytes of the residual stream [N, D], which tensor parallelism splits along the
        sequence."""
        return self.width * self.tokens * self.model.dim // self.degrees.tp

    def norm_input(self, *, compiled: bool) -> int:
        """Bytes that a norm saves: its input. Eager on CPU, where it is no single kernel, that and
        the normalised one, in float32."""
        return (
            2 * FLOAT32 * self.residual // self.width
            if self.on_cpu and not compiled
            else self.residual
        )

    def gathers_float8(self, linears: Collection[str]) -> bool:
        """Whether tensor parallelism hands `linears` an input that is float8 already, which they
        then save."""
        tensorwise = self.float8.recipe_name == "tensorwise"
        return self.degrees.tp > 1 and tensorwise and set(linears) <= set(self.float8_linears)


@dataclass(frozen=True)
class Group:
    """The weights that FSDP gathers and scatters together, and the activations of their modules, in
    bytes."""

    name: str
    weights: int
    """Elements, once gathered: this rank's share under tensor parallelism."""
    gathered: int
    """The weights gathered for the loss or the backward."""
    saved: int
    """Kept from the forward to the backward."""
    working: int
    """Held at the height of the backward, with what was saved."""


@dataclass(frozen=True)
class Moment:
    """What a rank holds at one moment of a step, in bytes by part."""

    name: str
    parameters: int
    gradients: int
    optimizer_states: int
    activations: int = 0
    logits: int = 0
    buffers: int = 0
    """Weights that FSDP has gathered, gradients that it is about to scatter, copies that the
    optimizer makes."""

    @property
    def total(self) -> int:
        """All parts together."""
        kept = self.parameters + self.gradients + self.optimizer_states
        return kept + self.activations + self.logits + self.buffers


def reserved_bytes(moments: Iterable[Moment]) -> float:
    """What a GPU reserves at the peak of a step, at most."""
    return RESERVED_RATIO * max(moment.total for moment in moments)


def step_memory(rank: Rank) -> list[Moment]:
    """The moments of a step at which memory can peak, in order: the loss; of each FSDP group the
    height of its backward and its end, where the gradients are scattered; the optimizer's update.
    The peak is the one with the largest total.

    The step is not the first, so that the optimizer has its states, and its microbatch is the
    last."""
    groups = [_embedding(rank), *(_block(rank, i) for i in range(rank.model.n_layers)), _head(rank)]
    # Earlier microbatches' gradients add up unsharded: only the last one's backward scatters.
    accumulated_width = rank.reduce_width if rank.grad_accum_steps > 1 else 0
    # Of the groups, the first one that is not freed after its forward.
    kept_from = {"never": 0, "default": len(groups) - 2, "always": len(groups)}[
        rank.parallelism.fsdp_reshard_after_forward
    ]

    def weights(of: list[Group]) -> int:
        return sum(group.weights for group in of)

    def sharded(of: list[Group]) -> int:
        return (
            0
            if rank.training.enable_cpu_offload
            else FLOAT32 * weights(of) // rank.degrees.dp_shard
        )

    def gathered(of: list[Group]) -> int:
        return sum(group.gathered for group in of)

    def moment(name: str, *, left: int, **parts: int) -> Moment:
        """One at which the first `left` groups have yet to scatter their gradients."""
        return Moment(
            name,
            parameters=sharded(groups),
            gradients=sharded(groups[left:]) + accumulated_width * weights(groups[:left]),
            optimizer_states=round(
                2 * sharded(groups) * MOMENT_WIDTHS[rank.optimizer.state_dtype] / FLOAT32
            ),
            **parts,
        )

    kept, buffers = (
        sum(group.saved for group in groups),
        gathered(groups[min(kept_from, len(groups) - 1) :]),
    )
    if rank.fuses_loss and rank.degrees.dp_shard > 1:
        buffers += gathered(
            groups[-1:]
        )  # what FSDP copied the head's weights from, until it gathers others
    logits = _loss_working(rank)
    moments = [moment("loss", left=len(groups), activations=kept, logits=logits, buffers=buffers)]
    for i, group in reversed(list(enumerate(groups))):
        kept -= group.saved
        # Meanwhile FSDP gathers what the backward needs next, and scatters the gradients that it
        # made before.
        next_up = max(i - 1, 0) if rank.degrees.dp_shard > 1 else i
        ahead = gathered(groups[min(kept_from, next_up) : i])
        scattering = rank.reduce_width * weights(groups[i + 1 : i + 2])
        height = moment(
            f"backward of {group.name}",
            left=i + 1,
            activations=kept + group.working,
            logits=rank.width * rank.logits if group is groups[-1] and not rank.fuses_loss else 0,
            buffers=ahead + group.gathered + scattering,
        )
        # Its own buffer to scatter from then takes the place of its weights and of the buffer
        # before.
        replaced = max(group.gathered + scattering, rank.reduce_width * group.weights)
        end = moment(
            f"gradients of {group.name}",
            left=i + 1,
            activations=kept + rank.residual,
            buffers=ahead + rank.width * group.weights + replaced,
        )
        moments += [height, end]
    copies = sharded(groups) if rank.optimizer.implementation == "foreach" else 0
    return [*moments, moment("optimizer step", left=0, buffers=copies)]


def _output_weights(rank: Rank) -> int:
    """Elements of this rank's share of the projection to the vocabulary."""
    return rank.model.vocab_size * rank.model.dim // rank.degrees.tp


def _loss_working(rank: Rank) -> int:
    """Held at the height of the loss, with what is saved for the backward. Its gradient takes the
    place of the logits; eager, a piece of them is in float32 meanwhile."""
    in_float32 = 0 if rank.compile.covers("loss") else FLOAT32 * min(rank.piece_logits, rank.logits)
    if not rank.fuses_loss:
        return 2 * rank.width * rank.logits + in_float32  # the logits themselves are kept
    # The gradient of the weight comes last, or adds up in float32, on CPU by way of a copy; until
    # then there is room for the piece.
    several = rank.logits > rank.chunk_logits
    added_up = several * (2 if rank.on_cpu else 1) * FLOAT32 * _output_weights(rank)
    normed = rank.width * rank.tokens * rank.model.dim
    logits = rank.width * min(rank.logits, rank.chunk_logits)
    return normed + logits + added_up + max(0, in_float32 - rank.width * _output_weights(rank))


def _embedding(rank: Rank) -> Group:
    weights = _output_weights(rank)  # as many
    gradient = rank.width * rank.tokens * rank.model.dim
    # For its backward pass FSDP gathers nothing.
    gathered = rank.width * weights if rank.parallelism.fsdp_reshard_after_forward == "never" else 0
    return Group("tok_embeddings", weights, gathered, saved=0, working=gradient)


def _head(rank: Rank) -> Group:
    """The last norm and the projection to the vocabulary."""
    weights = _output_weights(rank) + rank.model.dim
    normed = rank.width * rank.tokens * rank.model.dim
    saved = rank.norm_input(compiled=False) + normed  # or its gradient, where the loss is fused
    if rank.fuses_loss:
        saved += rank.width * _output_weights(rank)  # the weight's gradient
    return Group("output", weights, rank.width * weights, saved=saved, working=saved + normed)


def _block(rank: Rank, index: int) -> Group:
    tensors, checkpoint = _block_tensors(rank), rank.activation_checkpoint
    if index in checkpoint.checkpointed_layers(rank.model.n_layers):
        kept = {"input": rank.residual} | (
            _kept_by_op(rank, tensors) if checkpoint.keeps_by_op else {}
        )
    else:
        kept = {
            name: size
            for name, size in tensors.items()
            if name not in _recomputed_by_compiler(rank)
        }
        if (
            checkpoint.mode == "memory_budget"
        ):  # of what is more than the input, which a block keeps at the least
            more = sum(kept.values()) - rank.residual
            kept = {"input": rank.residual, "budget": round(checkpoint.memory_budget * more)}
    # SwiGLU's backward is the height: the gradients of its two factors, and the residual stream's.
    working = sum((tensors | kept).values()) + 2 * tensors["w1"] + rank.residual
    weights, in_float8 = _block_weights(rank)
    gathered = rank.width * (weights - in_float8) + in_float8
    return Group(f"layers.{index}", weights, gathered, saved=sum(kept.values()), working=working)


def _block_weights(rank: Rank) -> tuple[int, int]:
    """Elements of a block's weights, and how many of them FSDP gathers in float8, 1 byte each."""
    model, tp = rank.model, rank.degrees.tp
    heads, kv_heads = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    widths = {
        "attention.wq": heads,
        "attention.wk": kv_heads,
        "attention.wv": kv_heads,
        "attention.wo": heads,
    }
    widths |= dict.fromkeys(
        ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"), model.ffn_dim
    )
    cast = rank.float8_linears if rank.float8.enable_fsdp_float8_all_gather else ()
    norms = 2 * model.dim
    return model.dim * sum(widths.values()) // tp + norms, model.dim * sum(
        widths[name] for name in cast
    ) // tp


def _block_tensors(rank: Rank) -> dict[str, int]:
    """Bytes of each tensor that a block's backward needs, by the name of what made it."""
    model, tp, width = rank.model, rank.degrees.tp, rank.width
    whole = rank.tokens * model.dim  # [N, D], gathered along the sequence
    heads = rank.tokens * model.n_heads * model.head_dim // tp
    kv_heads = rank.tokens * model.n_kv_heads * model.head_dim // tp
    hidden = rank.tokens * model.ffn_dim // tp
    norm_input = rank.norm_input(compiled=rank.compiled)
    attention_width = FLOAT32 if rank.float32_attention else width
    input_widths = {
        name: 1 if rank.gathers_float8(linears) else width
        for name, linears in LINEAR_INPUTS.items()
    }
    return {
        "input" if norm_input == rank.residual else "input in float32": norm_input,
        "attention_norm": whole * input_widths["attention_norm"],
        "q": heads * attention_width,
        "k": kv_heads * attention_width,
        "v": kv_heads * attention_width,
        "attention": heads * attention_width,
        "attention cast": 0
        if attention_width == width or rank.gathers_float8(("attention.wo",))
        else heads * width,
        "log_sum_exp": FLOAT32 * rank.tokens * model.n_heads // tp,
        "attention in float8": heads if rank.gathers_float8(("attention.wo",)) else 0,
        "residual": norm_input,
        "ffn_norm": whole * input_widths["ffn_norm"],
        "w1": hidden * width,
        "silu": hidden * width,
        "w3": hidden * width,
        "gated": hidden * input_widths["gated"],
    }


def _recomputed_by_compiler(rank: Rank) -> set[str]:
    """What torch.compile does not keep, as it is cheap to compute again: silu, and what linears
    only read to cast to float8, unless tensor parallelism gathered it."""
    if not rank.compiled:
        return set()
    if rank.float8.recipe_name == "rowwise_with_gw_hp":
        return {"silu"}
    cheap = {"silu", "attention cast"}
    if rank.degrees.tp > 1:
        return cheap
    return cheap | {
        name for name, linears in LINEAR_INPUTS.items() if set(linears) <= set(rank.float8_linears)
    }


def _kept_by_op(rank: Rank, tensors: dict[str, int]) -> dict[str, int]:
    """What the "op" policy keeps: attention, every second matmul, and the sums that tensor
    parallelism scatters. Of w2 it is kept in vain, as no recomputation needs it; the compiler sees
    that."""
    kept = {name: tensors[name] for name in ("attention", "log_sum_exp", "w1")}
    for name in ("q", "v"):  # the outputs of wq and wv
        kept[name] = (
            tensors[name] * rank.width // FLOAT32 if rank.float32_attention else tensors[name]
        )
    scattered = rank.residual if rank.degrees.tp > 1 else 0
    kept["wo scattered"] = scattered
    if not rank.compiled:
        kept |= {"w2": rank.width * rank.tokens * rank.model.dim, "w2 scattered": scattered}
    return kept
