"""The TOML surface: one frozen section per table, one documented field per key.

Table and key names are torchtitan's. The string under a field is its documentation in `--help` and
docs/config.md. run_sections.py has the sections about the run: its folder, checkpoints, reports.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, Strict

from torchtitan_lite.base.outside import check_outside, load_object
from torchtitan_lite.catalog.lr_schedule import DECAYS, lr_factor
from torchtitan_lite.catalog.recipes import DEFAULT_RECIPE, RECIPES, Recipe
from torchtitan_lite.catalog.schedules import DEFAULT_SCHEDULE

from .run_sections import (
    CheckpointConfig,
    CommConfig,
    DebugConfig,
    ExperimentalConfig,
    JobConfig,
    MetricsConfig,
    ProfilingConfig,
    ValidationConfig,
)
from .types import (
    CROSS_ENTROPY,
    AllOrCount,
    Count,
    DecayType,
    Dimension,
    Fraction,
    LossName,
    Name,
    Names,
    OptimizerName,
    OutsideNames,
    PathName,
    PathOrEmpty,
    Positive,
    RecipeName,
    ScheduleName,
    Section,
    Share,
    Text,
    TrainingDataset,
    Whole,
)


class RopeScalingConfig(Section):
    """Llama 3.1's scaling of rotary frequencies, by Hugging Face's names."""

    factor: Annotated[float, Field(ge=1, le=1e6)]
    """How much longer the context is than the original one; 1: no scaling."""
    low_freq_factor: Positive = 1.0
    """Wavelengths above the original context / this are scaled by factor."""
    high_freq_factor: Positive = 4.0
    """Wavelengths below the original context / this are not scaled."""
    original_max_position_embeddings: Count = 8192
    """Length of the original context in tokens."""


class ModelConfig(Section):
    name: Literal["llama3"] = "llama3"
    """Model family."""
    flavor: Text = "debugmodel"
    """debugmodel 150M 350M 1B 3B 8B 70B 405B 3-8B 3-70B, with changes by keys below; "": none."""
    dim: Dimension | None = None
    """Width of the residual stream."""
    n_layers: Annotated[int, Field(ge=1, le=9999)] | None = None
    """Transformer blocks."""
    n_heads: Dimension | None = None
    """Attention heads, dim / n_heads wide."""
    n_kv_heads: Dimension | None = None
    """Key-value heads, which divide n_heads; without a flavor unset: n_heads."""
    ffn_dim: Dimension | None = None
    """Width of the feed-forward layer."""
    vocab_size: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    """Token ids; 0, and without a flavor unset: the tokenizer's."""
    rope_theta: Annotated[float, Field(gt=0, le=1e15)] | None = None
    """Base of the rotary frequencies; without a flavor unset: 500000."""
    rope_scaling: RopeScalingConfig | None = None
    """Llama 3.1's scaling of rotary frequencies; factor = 1, and without a flavor unset: none."""
    tie_embeddings: bool | None = None
    """Share one matrix between the embedding and the projection to the vocabulary."""
    norm_eps: Annotated[float, Field(gt=0, le=1)] | None = None
    """Added to the mean square in each RMSNorm; without a flavor unset: 1e-5."""
    tokenizer_path: PathOrEmpty = ""
    """sentencepiece, tiktoken or tokenizer.json file, or its folder; "": the shipped one."""

    @property
    def overrides(self) -> dict[str, Any]:
        """The keys that are set beside the flavor, by name."""
        return self.model_dump(exclude={"name", "flavor", "tokenizer_path"}, exclude_none=True)


class OptimizerConfig(Section):
    name: OptimizerName = "AdamW"
    """Adam has L2 decay. Muon orthogonalizes updates of the blocks' matrices, and is AdamW else."""
    lr: Annotated[float, Field(gt=0, le=10)] = 8e-4
    """Peak learning rate."""
    lr_factors: dict[Name, Annotated[float, Field(ge=0, le=1e4)]] = {}
    """Factors of lr by parts of parameter names, as { tok_embeddings = 0.5, "layers.0.wq" = 2 }."""
    beta1: Share = 0.9
    """Decay of the first moment."""
    beta2: Share = 0.95
    """Decay of the second moment."""
    eps: Annotated[float, Field(ge=1e-20, le=1)] = 1e-8
    """Added to the root of the second moment."""
    momentum: Share = 0.95
    """Decay of Muon's Nesterov momentum of matrices."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.1
    """Weight decay of every parameter: AdamW's is decoupled, Adam's is added to the gradients."""
    no_decay: Names = ()
    """Parts of names of parameters without decay, such as norm (every one), tok_embeddings."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """How PyTorch runs the update; only "fused" never waits for the device to skip a bad one."""
    state_dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of both moments, unset: training.dtype; bfloat16: the second rounded at random."""


class LRSchedulerConfig(Section):
    warmup_steps: Whole = 200
    """Steps of linear warm-up from near 0 to optimizer.lr. A shorter schedule only warms up."""
    total_steps: Count | None = None
    """Length of the schedule in steps; unset: the run, by training.steps or training.epochs."""
    decay_ratio: Fraction | None = None
    """Share of total_steps in the final decay, at most what warm-up leaves; unset: all of that."""
    decay_type: DecayType = "linear"
    """Shape of the decay."""
    min_lr_factor: Fraction = 0.0
    """Learning rate at the end of the decay, as a share of optimizer.lr."""

    @property
    def decay(self) -> Callable[[float], float]:
        """The decay that `decay_type` names: one of DECAYS, or one from outside."""
        if self.decay_type in DECAYS:
            return DECAYS[self.decay_type]
        decay: Callable[[float], float] = load_object("[lr_scheduler] decay_type", self.decay_type)
        return decay

    def factor(self, step: int, *, training_steps: int) -> float:
        """Return the learning rate of `step` (1-based) as a share of its peak."""
        keys = self.model_dump(exclude={"decay_type"})
        return lr_factor(step, training_steps=training_steps, decay=self.decay, **keys)


class DatasetConfig(Section):
    """One of the [[training.datasets]]."""

    path: PathName
    """Text or token store, in a form that training.dataset_path takes."""
    weight: Positive = 1.0
    """Share of the samples, in proportion to the weights of the others."""


class TrainingConfig(Section):
    dataset: TrainingDataset = "pystdlib"
    """If dataset_path is unset: Python's standard library, c4, or batches made by module:name."""
    dataset_path: PathName | None = None
    """Token store, or text: .txt .md .rst .py .jsonl .json (.gz, .zst); unset: dataset."""
    datasets: Annotated[tuple[DatasetConfig, ...], Strict(False)] = ()
    """Instead of dataset_path, several: [[training.datasets]], each a path and a weight (1.0)."""
    text_field: Name = "text"
    """Field of each .jsonl row that holds the text."""
    local_batch_size: Annotated[int, Field(ge=1, le=65_536)] = 8
    """Sequences in one forward pass of one data-parallel rank."""
    global_batch_size: AllOrCount = -1
    """Sequences per step over all ranks; -1: local_batch_size * dp degree, or the checkpoint's."""
    seq_len: Count = 2048
    """Tokens in a sequence."""
    max_norm: Positive = 1.0
    """Gradients are scaled down to this global norm."""
    max_consecutive_skips: Count = 5
    """Consecutive steps without an update (loss or gradient not finite, or a spike) to give up."""
    loss_spike_factor: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Skip the update of a step whose loss is above this times the running mean; 0: off."""
    loss: LossName = CROSS_ENTROPY
    """Sum over the tokens of the loss of logits and labels, in training and validation."""
    steps: Count = 1000
    """Optimizer steps to train."""
    epochs: Positive | None = None
    """Passes over the data (the first dataset done counts), unless training.steps ends first."""
    allow_data_change: bool = False
    """Resume on other data than the checkpoint's, or another order, at the same sample number."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of weights, gradients, moments; bfloat16 loses updates below 1/512 of a weight."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of gathered parameters and of the computation; sharded weights stay in dtype."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Data type in which gradients are reduced."""
    enable_cpu_offload: bool = False
    """Keep the sharded parameters, gradients and optimizer states in CPU memory (GPU runs)."""
    gc_freq: Count = 50
    """Steps between runs of Python's garbage collector, at the same step on every rank."""
    document_mask: bool = False
    """Attention does not cross documents, and positions restart at each."""
    after_step: OutsideNames = ()
    """Functions of your own to call on every rank after each step, with the Trainer and values."""

    @property
    def has_outside_data(self) -> bool:
        """Whether `dataset` makes the batches, by code from outside."""
        return not (self.dataset_path or self.datasets) and ":" in self.dataset


class ParallelismConfig(Section):
    data_parallel_replicate_degree: Count = 1
    """Replicas of the sharded model (HSDP); 1: none."""
    data_parallel_shard_degree: AllOrCount = -1
    """Ranks that share one copy of the parameters (FSDP2); -1: all ranks left."""
    fsdp_reshard_after_forward: Literal["default", "always", "never", "auto"] = "default"
    """Free weights after use: always, never; default: never the output's, no pipeline's; auto."""
    fsdp_reduce_gradients: Literal["auto", "each", "last"] = "auto"
    """Microbatches of a step that end with a reduction of gradients over ranks; auto: planned."""
    tensor_parallel_degree: Count = 1
    """Ranks that share each matrix multiplication; 1: none."""
    disable_loss_parallel: bool = False
    """Gather the logits before the loss instead of computing it on vocabulary shards."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel collectives with matmuls (compiled; GPUs of one node)."""
    context_parallel_degree: Count = 1
    """Ranks that share each sequence, and gather its keys and values; 1: none."""
    pipeline_parallel_degree: Count = 1
    """Ranks that share the layers: each has a stage of the pipeline, or several; 1: none."""
    pipeline_parallel_schedule: ScheduleName = DEFAULT_SCHEDULE
    """The order of forward and backward passes on the stages; interleaved: several per rank."""
    pipeline_parallel_microbatch_size: Count = 1
    """Sequences of a pipeline's microbatch; divides local_batch_size."""
    pipeline_parallel_layers_per_stage: Count | None = None
    """Blocks per stage, rounded up; unset: one stage per rank, two if interleaved."""
    pipeline_parallel_first_stage_less_layers: Whole = 1
    """Blocks that the first stage has less, for its embedding."""
    pipeline_parallel_last_stage_less_layers: Whole = 1
    """Blocks that the last stage has less, for its output projection and loss."""
    pipeline_parallel_split_points: Names = ()
    """Modules with which stages begin after the first one, such as "layers.4"."""
    module_fqns_per_model_part: Annotated[tuple[Names, ...], Strict(False)] = ()
    """All modules of each stage, such as [["tok_embeddings", "layers.0"], ...]."""


class ActivationCheckpointConfig(Section):
    mode: Literal["selective", "full", "none", "memory_budget", "auto"] = "selective"
    """Recompute by selective_ac_option, all, none, or by memory_budget; auto: fastest that fits."""
    selective_ac_option: Name = "op"
    """selective: "op" keeps attention and every second matmul; "2" recomputes every 2nd block."""
    memory_budget: Fraction = 0.5
    """memory_budget: share of the activations that the compiler keeps, the costliest first."""
    early_stop: bool = True
    """End a block's recomputation with the last tensor that the backward pass needs."""

    @property
    def keeps_by_op(self) -> bool:
        """Whether blocks keep the outputs of some operators, by the "op" policy."""
        return self.mode == "selective" and self.selective_ac_option == "op"

    @property
    def label(self) -> str:
        """The mode, and the option where it is the number of a block."""
        by_number = self.mode == "selective" and not self.keeps_by_op
        return f"{self.mode} {self.selective_ac_option}" if by_number else self.mode

    def checkpointed_layers(self, n_layers: int) -> range:
        """Return the indices of the blocks that recompute, apart from the compiler's choices."""
        if self.mode in ("none", "memory_budget"):
            return range(0)
        by_number = self.mode == "selective" and not self.keeps_by_op
        return range(0, n_layers, int(self.selective_ac_option) if by_number else 1)


class CompileConfig(Section):
    enable: bool = False
    """Use torch.compile."""
    components: Annotated[tuple[Literal["model", "loss"], ...], Strict(False)] = ("model", "loss")
    """What is compiled: the transformer blocks (one full graph each), the loss."""
    backend: Name = "inductor"
    """torch.compile's; to debug: "eager", "aot_eager". Plans and hfu assume Inductor."""

    def covers(self, component: Literal["model", "loss"]) -> bool:
        """Whether `component` is compiled."""
        return self.enable and component in self.components


class Float8Config(Section):
    enable_float8_linear: bool = False
    """Train wq, wk, wv, wo, w1, w2 and w3 in float8; it pays from about 1B parameters on."""
    recipe_name: RecipeName = DEFAULT_RECIPE
    """Scale per tensor; per row; per row, weight gradient in bf16; per 32 elements (Blackwell); per
    128 elements, of weights per 128 x 128 (Hopper)."""
    enable_fsdp_float8_all_gather: bool = False
    """FSDP gathers float8 weights, 1 byte an element (tensorwise only); one rank, which gathers
    none, casts the float32 weights as FSDP would, not the bf16 ones."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """One all-reduce a step for all weight scales; needs enable_fsdp_float8_all_gather."""
    filter_fqns: Names = ()
    """Linears to keep in bf16: parts of names, such as "wk", "layers.0"; "auto": by the planner."""
    emulate: bool = False
    """Emulate float8 matmuls, for GPUs without them; automatic on CPU."""
    convert_output: bool = False
    """Train `output`, the projection to the vocabulary, in float8 too."""
    use_fast_accum_in_backward: bool = False
    """Add up gradients' matmuls in less than float32, faster on Hopper, as PyTorch does outputs."""
    pad_inner_dim: bool = False
    """Pad a microbatch's tokens with zeros to the multiple that float8 weight gradients need."""
    log_numerics_freq: Whole = 0
    """Steps between measurements of the casts' error, each in an eager, slower step; 0: none."""

    @property
    def recipe(self) -> Recipe:
        """The recipe that `recipe_name` names: a row of RECIPES, or one from outside."""
        if self.recipe_name in RECIPES:
            return RECIPES[self.recipe_name]
        recipe = load_object("[float8] recipe_name", self.recipe_name)
        rule = "must be a Recipe"
        check_outside("[float8] recipe_name", self.recipe_name, isinstance(recipe, Recipe), rule)
        return recipe


class Config(Section):
    """A whole run, resolved: what the TOML file, its bases and the command line say, defaults
    filled in."""

    job: JobConfig = JobConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_scheduler: LRSchedulerConfig = LRSchedulerConfig()
    training: TrainingConfig = TrainingConfig()
    parallelism: ParallelismConfig = ParallelismConfig()
    activation_checkpoint: ActivationCheckpointConfig = ActivationCheckpointConfig()
    compile: CompileConfig = CompileConfig()
    float8: Float8Config = Float8Config()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    metrics: MetricsConfig = MetricsConfig()
    profiling: ProfilingConfig = ProfilingConfig()
    comm: CommConfig = CommConfig()
    debug: DebugConfig = DebugConfig()
    experimental: ExperimentalConfig = ExperimentalConfig()

    def to_toml(self) -> str:
        """Return the config as TOML that loads to an equal Config. Unset keys are left out."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))
