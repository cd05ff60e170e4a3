"""Sizes of a rank's weights and activations in bytes, from shapes alone.

A pipeline rank trains a share of the job's model: a job whose model has the blocks of its stages
only. Memory and time of a rank are those of its share, computed like any job's.

Shapes: N tokens of a microbatch, D dim, H heads, K key-value heads, F ffn_dim, V vocab_size.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from torchtitan_lite.catalog.flavors import BLOCK_LINEARS, OUTPUT, block_linear_shapes
from torchtitan_lite.config import Config, Stages
from torchtitan_lite.config.job import Job
from torchtitan_lite.parallel.one_rank import needs_no_fsdp

from .attention import FLOAT32, AttentionBytes

EMBEDDING = "tok_embeddings"
BEHIND = ("residual", "ffn_norm", "w1", "silu", "w3", "gated")
"""Tensors of a block that are made after its attention."""
WIDTHS = {"bfloat16": 2, "float32": FLOAT32}  # bytes of an element


def share_of(job: Job, stages: Iterable[int]) -> Job:
    """Return the share of `job` that has those of its pipeline stages."""
    own = tuple(job.stages[i] for i in stages)
    model_args = replace(job.model_args, n_layers=len(blocks_of(own)))
    return replace(job, stages=own, model_args=model_args)


def rank_shares(job: Job) -> list[Job]:
    """Return the share of each pipeline rank; `job` alone without pipelines."""
    if job.degrees.pp == 1:
        return [job]
    return [share_of(job, job.rank_stages(rank)) for rank in range(job.degrees.pp)]


def blocks_of(stages: Stages) -> list[int]:
    """Return the indices, in the whole model, of the blocks in `stages`."""
    names = (name.partition(".") for stage in stages for name in stage)
    return [int(index) for kind, _, index in names if kind == "layers"]


def checkpointed_blocks(job: Job) -> list[int]:
    """Return those of the blocks that recompute, apart from the compiler's choices."""
    blocks = blocks_of(job.stages)
    every = job.config.activation_checkpoint.checkpointed_layers(max(blocks, default=0) + 1)
    return [i for i in blocks if i in every]


def has(job: Job, module: str) -> bool:
    """Return whether `module`, EMBEDDING or OUTPUT, is in a job's stages."""
    return any(module in stage for stage in job.stages)


def state_widths(config: Config) -> tuple[int, int]:
    """Return the bytes of an element of weights, and of the optimizer's state of it."""
    dtype, optimizer = config.training.dtype, config.optimizer
    return WIDTHS[dtype], 2 * WIDTHS[optimizer.state_dtype or dtype]  # AdamW's two moments


@dataclass(frozen=True)
class Group:
    """Weights that FSDP gathers and scatters together, and the activations of their modules. On one
    rank the gathered weights are the copies in the compute type."""

    name: str
    weights: int = 0  # number of gathered elements: this rank's share under tensor parallelism
    in_float8: int = 0  # those of them that are gathered in float8, 1 byte each
    gathered: int = 0  # bytes of the weights when gathered for the loss or the backward
    saved: int = 0  # bytes of activations kept from the forward to the backward
    working: int = 0  # bytes of activations at the peak of the backward, including `saved`


def without_fsdp(job: Job) -> bool:
    """Return whether `job` trains without FSDP: if no two of its ranks have the same weights."""
    config, data_ranks = job.config, job.degrees.dp * job.degrees.cp
    return needs_no_fsdp(config.training, data_ranks=data_ranks)


class Rank:
    """Settings and sizes that determine the memory of a rank that trains a job, or a share of one.
    All ranks with the same share need the same amount."""

    def __init__(self, job: Job, float8_linears: Collection[str], *, on_cpu: bool) -> None:
        """`float8_linears` are kinds of linears, such as attention.wq. `output` is always estimated
        in high precision, which needs slightly more memory than float8."""
        config, model, tp = job.config, job.model_args, job.degrees.tp
        self.config, self.model, self.degrees, self.on_cpu = config, model, job.degrees, on_cpu
        self.accum_steps = job.batch.grad_accum_steps
        self.blocks, self.checkpointed = blocks_of(job.stages), checkpointed_blocks(job)
        self.has_embedding, self.has_output = has(job, EMBEDDING), has(job, OUTPUT)
        self.float8_linears = BLOCK_LINEARS.keys() & float8_linears
        self.float8_output = OUTPUT in float8_linears

        # Bytes of an element of weights, their state, the compute type, and reduced gradients.
        self.weight_width, self.state_width = state_widths(config)
        self.width = WIDTHS[config.training.mixed_precision_param]
        self.reduce_width = WIDTHS[config.training.mixed_precision_reduce]

        # Bytes of an element of a gathered weight. Without FSDP masters can have the compute type.
        self.without_fsdp = without_fsdp(job)
        uses_masters = self.without_fsdp and self.width == self.weight_width
        self.gathered_width = 0 if uses_masters else self.width
        reshard = config.parallelism.fsdp_reshard_after_forward
        self.pipelined = job.degrees.pp > 1
        stays = self.without_fsdp or (self.pipelined and reshard != "always")
        self.reshard = "never" if stays else reshard

        # How often a step reduces all gradients.
        each = config.parallelism.fsdp_reduce_gradients == "each" and not self.without_fsdp
        self.reductions = self.accum_steps if each else 1

        # Bytes of activations [N, D], gathered along the sequence, and of the residual stream,
        # split along it.
        self.tokens = job.microbatch_tokens  # N
        self.hidden = self.width * self.tokens * model.dim
        self.residual = self.hidden // tp

        float8 = self.gathers_float8("attention")
        self.attention = AttentionBytes(job, width=self.width, on_cpu=on_cpu, float8=float8)

        # The loss is fused with the projection to the vocabulary, unless that is in float8 or
        # tensor parallelism gathers the logits.
        self.gathers_logits = tp > 1 and config.parallelism.disable_loss_parallel
        in_float8 = config.float8.enable_float8_linear and config.float8.convert_output
        self.fuses_loss = not (self.gathers_logits or in_float8)
        self.logits = self.tokens * model.vocab_size // (1 if self.gathers_logits else tp)
        self.output_weights = model.vocab_size * model.dim // tp  # elements

    def norm_input(self, *, compiled: bool) -> int:
        """Bytes that a norm saves: its input or, eager on CPU, input and output in float32."""
        several = self.on_cpu and not compiled
        return 2 * FLOAT32 * self.residual // self.width if several else self.residual

    def only_cast(self, tensor: str) -> bool:
        """Whether linears of a block read `tensor`, and all that do are in float8."""
        readers = {name for name, linear in BLOCK_LINEARS.items() if linear.reads == tensor}
        return bool(readers) and readers <= self.float8_linears

    def gathers_float8(self, tensor: str) -> bool:
        """Whether tensor parallelism gathers `tensor` in float8; its linears then save that."""
        gathers = self.degrees.tp > 1 and self.config.float8.recipe.gathers_float8
        return gathers and self.only_cast(tensor)

    @cached_property
    def groups(self) -> list[Group]:
        """The embedding, the blocks, and the last norm with the projection to the vocabulary. An
        end that the rank does not have is empty."""
        matrix, last = self.output_weights, self.output_weights + self.model.dim
        # The projection saves its input; with a fused loss, the gradients of input and weight.
        saved = self.norm_input(compiled=False) + self.hidden

        if self.model.tie_embeddings:
            # The first group has the last one's weights too. From the loss to the end of the
            # backward they stay gathered, beside their gradient.
            gathered = self.gathered_width * last + self.width * matrix
            first = Group(EMBEDDING, last, gathered=gathered, working=self.hidden)
            head = Group(OUTPUT, saved=saved, working=saved + self.hidden)
        else:
            # The embedding's backward does not need it. The last microbatch without FSDP frees it.
            stays = self.reshard == "never" and (not self.without_fsdp or self.accum_steps > 2)
            gathered = self.gathered_width * matrix if stays else 0
            first = Group(EMBEDDING, matrix, gathered=gathered, working=self.hidden)
            saved += self.width * matrix if self.fuses_loss else 0
            all_gather = self.config.float8.enable_fsdp_float8_all_gather and self.float8_output
            in_float8, gathered = matrix if all_gather else 0, self.gathered_width * last
            head = Group(OUTPUT, last, in_float8, gathered, saved, saved + self.hidden)

        # A stage of a pipeline can lack the ends.
        first = first if self.has_embedding else Group(EMBEDDING)
        head = head if self.has_output else Group(OUTPUT)
        plain, checkpointed = _block(self, checkpointed=False), _block(self, checkpointed=True)
        blocks = [
            replace(checkpointed if i in self.checkpointed else plain, name=f"layers.{i}")
            for i in self.blocks
        ]
        return [first, *blocks, head]

    @property
    def block(self) -> Group:
        """One of its blocks; an empty one for a rank without."""
        return self.groups[1] if self.blocks else Group("block")

    @cached_property
    def weights(self) -> int:
        """Number of gathered elements of all groups."""
        return sum(group.weights for group in self.groups)

    def gathered(self, start: int, stop: int) -> int:
        """Bytes of the gathered weights of groups[start:stop], and of tied ones before them."""
        tied = self.groups[: min(start, 1)] if self.model.tie_embeddings else []
        return sum(group.gathered for group in [*tied, *self.groups[start:stop]])

    def sharded(self, weights: int) -> int:
        """Bytes of this rank's shards of that many weights."""
        if self.config.training.enable_cpu_offload:
            return 0
        return self.weight_width * weights // self.degrees.fsdp


def _block(rank: Rank, *, checkpointed: bool) -> Group:
    tensors, ac = _block_tensors(rank), rank.config.activation_checkpoint
    if checkpointed:
        by_op = _kept_by_op(rank, tensors) if ac.keeps_by_op else {}
        kept = {"input": rank.residual} | by_op
    else:
        recomputed = _recomputed_by_compiler(rank)
        kept = {name: size for name, size in tensors.items() if name not in recomputed}
        if ac.mode == "memory_budget":  # the input is kept with any budget
            more = sum(kept.values()) - rank.residual
            kept = {"input": rank.residual, "budget": round(ac.memory_budget * more)}
    # The peak is SwiGLU's backward: the gradients of its two factors and of the residual stream.
    working = sum((tensors | kept).values()) + 2 * tensors["w1"] + rank.residual

    tp = rank.degrees.tp
    sizes = {name: out * in_ for name, (out, in_) in block_linear_shapes(rank.model).items()}
    if rank.degrees.cp > 1:
        # The peak can be in attention's backward: it has gradients of whole keys and values, and
        # the weights after it already have theirs.
        before = sum(size for name, size in tensors.items() if name not in BEHIND)
        behind = sum(sizes[each] for each in sizes if BLOCK_LINEARS[each].reads != "attention_norm")
        gradients = rank.width * behind // tp + rank.residual
        working = max(working, before + rank.attention.backward() + gradients)
    weights = sum(sizes.values()) // tp + 2 * rank.model.dim  # and two norms
    all_gather = rank.config.float8.enable_fsdp_float8_all_gather
    in_float8 = sum(sizes[name] for name in rank.float8_linears) // tp if all_gather else 0
    gathered = rank.gathered_width * (weights - in_float8) + in_float8
    return Group("block", weights, in_float8, gathered, sum(kept.values()), working)


def _block_tensors(rank: Rank) -> dict[str, int]:
    """Bytes of each tensor that a block's backward needs, by the name of its producer."""
    model, tp, width = rank.model, rank.degrees.tp, rank.width
    ffn = rank.tokens * model.ffn_dim // tp

    def read(tensor: str, elements: int) -> int:
        """Bytes of a tensor that only linears save."""
        return elements * (1 if rank.gathers_float8(tensor) else width)

    norm_input = rank.norm_input(compiled=rank.config.compile.covers("model"))
    return {
        "input" if norm_input == rank.residual else "input in float32": norm_input,
        "attention_norm": read("attention_norm", rank.tokens * model.dim),
        **rank.attention.saved(),
        "residual": norm_input,
        "ffn_norm": read("ffn_norm", rank.tokens * model.dim),
        "w1": ffn * width,
        "silu": ffn * width,
        "w3": ffn * width,
        "gated": read("gated", ffn),
    }


def _recomputed_by_compiler(rank: Rank) -> set[str]:
    """Tensors that torch.compile recomputes because that is cheap: silu, and inputs that are only
    cast to float8, unless tensor parallelism gathers them."""
    if not rank.config.compile.covers("model"):
        return set()
    if not rank.config.float8.recipe.divides_tokens:
        return {"silu"}  # the weight gradient reads the uncast input
    cheap = {"silu", "attention cast"}
    if rank.degrees.tp > 1:
        return cheap
    inputs = ("attention_norm", "ffn_norm", "gated")
    return cheap | {name for name in inputs if rank.only_cast(name)}


def _kept_by_op(rank: Rank, tensors: dict[str, int]) -> dict[str, int]:
    """Bytes of the tensors that the "op" policy keeps: attention, every second matmul, and the sums
    that tensor parallelism scatters. Eager, it also keeps w2's output, which nothing needs."""
    kept = {name: tensors[name] for name in ("attention", "log_sum_exp", "w1")}
    for output, of_matmul in (("q", rank.model.q_dim), ("v", rank.model.kv_dim)):
        kept[output] = rank.tokens * of_matmul // rank.degrees.tp * rank.width
    kept["wo scattered"] = scattered = rank.residual if rank.degrees.tp > 1 else 0
    if not rank.config.compile.covers("model"):
        kept |= {"w2": rank.hidden, "w2 scattered": scattered}
    return kept
