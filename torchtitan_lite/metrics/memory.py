"""Where a rank's memory goes: what it holds at each moment of a training step, in bytes, from shapes alone.

Not counted is what comes with a device. On a GPU that is the CUDA context, buffers of cuBLAS and NCCL, and blocks that
the allocator cannot fill; on CPU the float32 copies of emulated float8. Nor are the temporary copies of an eager cast
to float8, one tensor at a time, counted.

Shapes: N tokens of a microbatch, D dim, H heads, K key-value heads, Q head_dim, F ffn_dim, V vocab_size.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from torchtitan_lite.config import (
    ActivationCheckpointConfig,
    CompileConfig,
    Float8Config,
    OptimizerConfig,
    ParallelDegrees,
    ParallelismConfig,
    TrainingConfig,
)

FLOAT32 = 4
WIDTHS = {"bfloat16": 2, "float32": FLOAT32}


class Dimensions(Protocol):
    """The sizes of a model, as its ModelArgs have them."""

    @property
    def dim(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What decides a rank's memory."""

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
    on_cpu: bool

    @property
    def tokens(self) -> int:
        """N."""
        return self.training.local_batch_size * self.training.seq_len

    @property
    def width(self) -> int:
        """Bytes of an element of the compute type."""
        return WIDTHS[self.training.mixed_precision_param]

    @property
    def compiled(self) -> bool:
        """Whether the blocks are compiled."""
        return self.compile.enable and "model" in self.compile.components

    @property
    def residual(self) -> int:
        """Bytes of the residual stream [N, D], which tensor parallelism splits along the sequence."""
        return self.width * self.tokens * self.model.dim // self.degrees.tp

    def norm_input(self, *, fused: bool) -> int:
        """Bytes that a norm saves: its input. Where it is not one kernel that and the normalised one, in float32."""
        return self.residual if fused else 2 * FLOAT32 * self.residual // self.width

    def linear_input(self, elements: int, *, readers: Collection[str]) -> int:
        """Bytes saved of the input that linears read. Where all of them cast it to float8, tensor parallelism keeps
        the cast that it gathered; and the compiler keeps nothing, as casting again is cheap."""
        cast = all(reader in self.float8_linears for reader in readers)
        if cast and self.degrees.tp > 1 and self.float8.recipe_name == "tensorwise":
            return elements
        if cast and self.compiled and self.float8.recipe_name != "rowwise_with_gw_hp":
            return 0
        return self.width * elements


@dataclass(frozen=True)
class Group:
    """The weights that FSDP gathers and scatters together, and the activations of their modules, in bytes."""

    name: str
    weights: int
    """Elements, once gathered: this rank's share under tensor parallelism."""
    gathered: int
    """The gathered weights."""
    saved: int
    """Kept from the forward to the backward."""
    working: int
    """Held at the height of the backward, what was saved included."""


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
    """Weights that FSDP has gathered, and gradients that it is about to scatter."""

    @property
    def total(self) -> int:
        """All parts together."""
        sharded = self.parameters + self.gradients + self.optimizer_states
        return sharded + self.activations + self.logits + self.buffers


def step_memory(rank: Rank) -> list[Moment]:
    """The moments of a step at which memory can peak, in order: the loss, the backward of each FSDP group and the
    scattering of its gradients, the optimizer's update. The peak is the one with the largest `total`."""
    groups = [_embedding(rank), *(_block(rank, i) for i in range(rank.model.n_layers)), _head(rank)]
    shards, tp = rank.degrees.dp_shard, rank.degrees.tp
    reduce_width = WIDTHS[rank.training.mixed_precision_reduce]
    never = rank.parallelism.fsdp_reshard_after_forward == "never"
    # Without the last microbatch's scattering, gradients add up unsharded.
    accumulated_width = reduce_width if rank.grad_accum_steps > 1 else 0
    per_weight = 0 if rank.training.enable_cpu_offload else FLOAT32

    def sharded(of: list[Group]) -> int:
        return per_weight * sum(group.weights for group in of) // shards

    def moment(name: str, done: int, **parts: int) -> Moment:
        """With the gradients of all but the first `done` groups scattered."""
        accumulated = accumulated_width * sum(group.weights for group in groups[:done])
        return Moment(
            name,
            parameters=sharded(groups),
            gradients=sharded(groups[done:]) + accumulated,
            optimizer_states=2 * sharded(groups),
            **parts,
        )

    def unsharded(of: list[Group]) -> int:
        return sum(group.gathered for group in of)

    split_loss = tp > 1 and not rank.parallelism.disable_loss_parallel
    logits = rank.tokens * rank.model.vocab_size // (tp if split_loss else 1)
    moments = [
        moment(
            "loss",
            len(groups),
            activations=sum(group.saved for group in groups),
            logits=logits * _bytes_per_logit(rank, split=split_loss),
            buffers=unsharded(groups if never else groups[-1:]),
        )
    ]
    for i, group in reversed(list(enumerate(groups))):
        saved = sum(earlier.saved for earlier in groups[:i])
        # FSDP gathers the next group during the backward of one, and scatters the previous one's gradients.
        ahead = groups[:i] if never else groups[max(i - 1, 0) : i] if shards > 1 else []
        scattering = reduce_width * sum(later.weights for later in groups[i + 1 : i + 2])
        moments += [
            moment(
                f"backward of {group.name}",
                i + 1,
                activations=saved + group.working,
                logits=rank.width * logits if group is groups[-1] else 0,
                buffers=group.gathered + unsharded(ahead) + scattering,
            ),
            moment(
                f"scatter of {group.name}",
                i + 1,
                activations=saved + rank.residual,
                buffers=unsharded(ahead)
                + rank.width * group.weights
                + max(group.gathered + scattering, reduce_width * group.weights),
            ),
        ]
    temporary = sharded(groups) if rank.optimizer.implementation == "foreach" else 0
    return [*moments, moment("optimizer step", 0, buffers=temporary)]


def _bytes_per_logit(rank: Rank, *, split: bool) -> int:
    """Held at once for each logit by the loss or its backward: eager, the log-probabilities, their gradient and the
    logits' in float32; compiled, the logits and their gradient. A split loss makes copies of its own."""
    if rank.compile.enable and "loss" in rank.compile.components:
        return rank.width + 2 * FLOAT32 if split else 2 * rank.width
    return 4 * FLOAT32 if split else 3 * FLOAT32


def _embedding(rank: Rank) -> Group:
    weights = rank.model.vocab_size * rank.model.dim // rank.degrees.tp
    gradient = rank.width * rank.tokens * rank.model.dim
    return Group("tok_embeddings", weights, rank.width * weights, saved=0, working=gradient)


def _head(rank: Rank) -> Group:
    """The last norm and the projection to the vocabulary."""
    weights = rank.model.vocab_size * rank.model.dim // rank.degrees.tp + rank.model.dim
    normed = rank.width * rank.tokens * rank.model.dim
    saved = rank.norm_input(fused=not rank.on_cpu) + normed
    return Group("output", weights, rank.width * weights, saved=saved, working=saved + normed)


def _block(rank: Rank, index: int) -> Group:
    tensors, checkpoint = _block_tensors(rank), rank.activation_checkpoint
    by_op = checkpoint.mode == "selective" and checkpoint.selective_ac_option == "op"
    every = int(checkpoint.selective_ac_option) if checkpoint.mode == "selective" and not by_op else 1
    if checkpoint.mode == "none" or index % every:
        kept = tensors
    else:
        kept = {"input": rank.residual} | (_kept_by_op(rank, tensors) if by_op else {})
    # SwiGLU's backward is the height: the gradients of both its factors, and the residual stream's.
    hidden = rank.width * rank.tokens * rank.model.ffn_dim // rank.degrees.tp
    working = sum((tensors | kept).values()) + 2 * hidden + rank.residual
    weights, in_float8 = _block_weights(rank)
    gathered = rank.width * (weights - in_float8) + in_float8
    return Group(f"layers.{index}", weights, gathered, saved=sum(kept.values()), working=working)


def _block_weights(rank: Rank) -> tuple[int, int]:
    """Elements of a block's weights, and how many of them FSDP gathers in float8, 1 byte each."""
    model = rank.model
    heads, kv_heads = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    attention = {"wq": heads, "wk": kv_heads, "wv": kv_heads, "wo": heads}
    linears = {f"attention.{name}": model.dim * width for name, width in attention.items()}
    linears |= {f"feed_forward.{name}": model.dim * model.ffn_dim for name in ("w1", "w2", "w3")}
    in_float8 = sum(linears[name] for name in rank.float8_linears) if rank.float8.enable_fsdp_float8_all_gather else 0
    return sum(linears.values()) // rank.degrees.tp + 2 * model.dim, in_float8 // rank.degrees.tp


def _block_tensors(rank: Rank) -> dict[str, int]:
    """Bytes of each tensor that a block's backward needs, by the name of what made it."""
    model, tp = rank.model, rank.degrees.tp
    whole = rank.tokens * model.dim  # gathered along the sequence
    heads = rank.tokens * model.n_heads * model.head_dim // tp
    kv_heads = rank.tokens * model.n_kv_heads * model.head_dim // tp
    hidden = rank.tokens * model.ffn_dim // tp
    fused_norm = rank.compiled or not rank.on_cpu
    return {
        "input" if fused_norm else "input, float32": rank.norm_input(fused=fused_norm),
        "attention_norm": rank.linear_input(whole, readers=("attention.wq", "attention.wk", "attention.wv")),
        "q": rank.width * heads,
        "k": rank.width * kv_heads,
        "v": rank.width * kv_heads,
        "attention": rank.width * heads + FLOAT32 * rank.tokens * model.n_heads // tp,  # with its log-sum-exp
        "residual": rank.norm_input(fused=fused_norm),
        "ffn_norm": rank.linear_input(whole, readers=("feed_forward.w1", "feed_forward.w3")),
        "w1": rank.width * hidden,
        "silu": 0 if rank.compiled else rank.width * hidden,  # the compiler computes it again
        "w3": rank.width * hidden,
        "gated": rank.linear_input(hidden, readers=("feed_forward.w2",)),
    }


def _kept_by_op(rank: Rank, tensors: dict[str, int]) -> dict[str, int]:
    """What the "op" policy keeps: attention, every second matmul, and what tensor parallelism scattered. The compiler
    leaves out what comes last, the sum that w2 makes, as no recomputation needs it."""
    kept = {name: tensors[name] for name in ("q", "v", "attention", "w1")}
    scattered = rank.residual if rank.degrees.tp > 1 else 0
    kept["wo, scattered"] = scattered
    if not rank.compiled:
        kept |= {"w2": rank.width * rank.tokens * rank.model.dim, "w2, scattered": scattered}
    return kept
