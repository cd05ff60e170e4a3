"""A rank's share of a job's model: numbers of weights, and the bytes of an element.

FSDP gathers and scatters the weights of a block together, those of the embedding, and those of the
last norm with the projection to the vocabulary. Tensor parallelism splits matrices, not norms.
"""

from collections.abc import Collection

from torchtitan_lite.catalog.flavors import BLOCK_LINEARS, OUTPUT, block_linear_shapes
from torchtitan_lite.config import Config
from torchtitan_lite.config.job import Job
from torchtitan_lite.parallel.fsdp import resharding
from torchtitan_lite.parallel.one_rank import needs_no_fsdp

EMBEDDING = "tok_embeddings"
WIDTHS = {"bfloat16": 2, "float32": 4}  # bytes of an element


def state_widths(config: Config, matrices: float) -> tuple[int, float]:
    """Return the bytes of an element of weights, and of the optimizer's state of it: two moments,
    but one for Muon's `matrices`, the share of weights in the blocks' linears."""
    dtype, optimizer = config.training.dtype, config.optimizer
    moments = 2 - matrices if optimizer.name == "Muon" else 2
    return WIDTHS[dtype], moments * WIDTHS[optimizer.state_dtype or dtype]


def without_fsdp(job: Job) -> bool:
    """Return whether `job` trains without FSDP: if no two of its ranks have the same weights."""
    return needs_no_fsdp(job.config.training, data_ranks=job.degrees.dp * job.degrees.cp)


class Share:
    """What a rank of a job's pipeline has; without a pipeline the whole model."""

    def __init__(self, job: Job, float8_linears: Collection[str], *, rank: int = 0) -> None:
        """`float8_linears` are kinds of linears, such as attention.wq."""
        config, model = job.config, job.model_args
        self.job, self.config, self.model, self.rank = job, config, model, rank
        self.tp, self.microbatches = job.degrees.tp, job.batch.grad_accum_steps
        self.float8_linears = BLOCK_LINEARS.keys() & float8_linears

        # The modules of its stages.
        names = [name for stage in job.rank_stages(rank) for name in job.stages[stage]]
        indices = {int(name.partition(".")[2]) for name in names if name.startswith("layers.")}
        self.has_embedding, self.has_output = EMBEDDING in names, OUTPUT in names
        every = config.activation_checkpoint.checkpointed_layers(model.n_layers)
        self.blocks, self.checkpointed = len(indices), len(indices & {*every})

        # Bytes of an element of the compute type, and of reduced gradients.
        self.width = WIDTHS[config.training.mixed_precision_param]
        self.reduce_width = WIDTHS[config.training.mixed_precision_reduce]

        # Bytes of the residual stream [N, D], which tensor parallelism splits over the ranks.
        self.residual = self.width * job.microbatch_tokens * model.dim // self.tp

        # Numbers of weights. Tied ones are in the embedding's group.
        sizes = {name: out * in_ for name, (out, in_) in block_linear_shapes(model).items()}
        self.matrix = model.vocab_size * model.dim // self.tp
        self.tied = model.tie_embeddings
        self.block = sum(sizes.values()) // self.tp + 2 * model.dim
        self.embedding = (self.matrix + model.dim * self.tied) * self.has_embedding
        self.output = (self.matrix + model.dim) * (self.has_output and not self.tied)
        self.weights = self.blocks * self.block + self.embedding + self.output
        self.matrices = self.blocks * sum(sizes.values()) // self.tp
        self.weight_width, self.state_width = state_widths(config, self.matrices / self.weights)

        # Whether weights stay gathered from the forward to the backward pass, and how often a step
        # casts them to float8 after they were gathered.
        self.without_fsdp, self.pipelined = without_fsdp(job), job.degrees.pp > 1
        reshard = resharding(config.parallelism, pipelined=self.pipelined)
        self.stays = self.without_fsdp or reshard == "never"
        recipe, all_gather = config.float8.recipe, config.float8.enable_fsdp_float8_all_gather
        several = self.microbatches > 1 or recipe.gathers_float8
        once = self.stays and several and (self.without_fsdp or not all_gather)
        self.weight_casts = 1 if once else 0 if all_gather else self.microbatches

        # Bytes of an element of a gathered weight, and of a block, as it is gathered and as it is
        # kept: float8 has one for each of a weight's casts, two if each matmul has its own. Without
        # FSDP masters can have the compute type: nothing else is gathered.
        is_master = self.without_fsdp and self.width == self.weight_width
        self.gathered_width = 0 if is_master else self.width
        in_float8 = sum(sizes[name] for name in self.float8_linears) // self.tp
        uncast, casts = self.gathered_width * self.block, 1 if recipe.gathers_float8 else 2
        cast = uncast + (casts - self.gathered_width) * in_float8
        self.gathered_block = cast if all_gather else uncast
        self.kept_block = cast if once or all_gather else uncast

        # How often a step reduces all gradients.
        self.schedule = config.parallelism.pipeline_parallel_schedule
        each = config.parallelism.fsdp_reduce_gradients == "each" and not self.without_fsdp
        self.reductions = self.microbatches if each else 1

        # How often it gathers weights: for forward and for backward passes. Bytes of all of them.
        self.gathers = 1 if self.stays else 2 * self.microbatches
        ends = self.gathered_width * (self.embedding + self.output)
        self.gathered = self.blocks * self.gathered_block + ends

    def only_in_float8(self, tensor: str) -> bool:
        """Whether all linears of a block that read `tensor` are in float8."""
        readers = {name for name, linear in BLOCK_LINEARS.items() if linear.reads == tensor}
        return readers <= self.float8_linears

    def gathers_float8(self, tensor: str) -> bool:
        """Whether tensor parallelism gathers `tensor` in float8; its linears then save that."""
        gathers = self.tp > 1 and self.config.float8.recipe.gathers_float8
        return gathers and self.only_in_float8(tensor)
