"""Rules between tables, and the numbers that follow from them: pure arithmetic, so that a config is
judged before any process starts."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib.metadata import version
from pathlib import PurePosixPath

from torchtitan_lite.config.keys import did_you_mean, show
from torchtitan_lite.config.sections import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    CompileConfig,
    Config,
    DatasetConfig,
    Float8Config,
    LRSchedulerConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
    ValidationConfig,
)
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.float8.recipes import RECIPES, Recipe
from torchtitan_lite.models.flavors import FLAVORS

RUN_FILES = (
    ".lock", "config.toml", "logs", "metrics.jsonl", "numerics.jsonl", "peaks.json", "previous", "status.json", "wandb"
)  # fmt: skip
"""What a run puts into its folder under names that cannot be chosen."""
MAX_PERIOD = 100_000
"""Samples after which a mix of datasets repeats the order of its turns, at most."""


@dataclass(frozen=True)
class ParallelDegrees:
    """How the processes of a run are shared out: replicas, times shards, times tensor
    parallelism."""

    dp_replicate: int
    dp_shard: int
    tp: int

    @property
    def dp(self) -> int:
        """Data-parallel ranks: each sees other samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """All processes."""
        return self.dp * self.tp


@dataclass(frozen=True)
class BatchSizes:
    """Sequences in a forward pass of one rank and in an optimizer step, and the passes a rank makes
    in that step."""

    local_batch_size: int
    global_batch_size: int
    grad_accum_steps: int


def resolve_degrees(parallelism: ParallelismConfig, *, world_size: int) -> ParallelDegrees:
    """The degrees, -1 replaced by what is left. Raises ConfigError unless their product is the
    number of processes."""
    replicate, shard = (
        parallelism.data_parallel_replicate_degree,
        parallelism.data_parallel_shard_degree,
    )
    tp = parallelism.tensor_parallel_degree
    others = replicate * tp
    if world_size % others:
        raise ConfigError(
            "[parallelism] data_parallel_replicate_degree * tensor_parallel_degree = "
            f"{replicate} * {tp} = {others} does not divide the world size, {world_size}; "
            f"run {multiples_near(world_size, others)} processes"
        )
    left = world_size // others
    if shard not in (-1, left):
        raise ConfigError(
            "[parallelism] data_parallel_replicate_degree * data_parallel_shard_degree * tensor_parallel_degree = "
            f"{replicate} * {shard} * {tp} = {replicate * shard * tp}, but the run has {world_size} processes; "
            f"set data_parallel_shard_degree to {left} or -1"
        )
    return ParallelDegrees(replicate, left, tp)


def resolve_batch(training: TrainingConfig, *, dp_degree: int) -> BatchSizes:
    """The batch sizes, -1 replaced. Raises ConfigError if gradient accumulation would not come out
    even."""
    local = training.local_batch_size
    one_pass = local * dp_degree
    total = one_pass if training.global_batch_size == -1 else training.global_batch_size
    if total < one_pass or total % one_pass:
        raise ConfigError(
            f"[training] global_batch_size = {total} is not a multiple of local_batch_size * dp_degree = "
            f"{local} * {dp_degree} = {one_pass}; use {multiples_near(total, one_pass)}"
        )
    return BatchSizes(local, total, total // one_pass)


def resolve_shares(datasets: Sequence[DatasetConfig]) -> tuple[int, ...]:
    """The weights of the datasets in the least whole numbers; (1,) where no datasets are listed,
    but one is trained on. Raises ConfigError if their sum is above MAX_PERIOD."""
    if not datasets:
        return (1,)
    weights = [Fraction(str(dataset.weight)) for dataset in datasets]  # as written: 0.3 is 3/10
    unit = Fraction(
        math.gcd(*(weight.numerator for weight in weights)),
        math.lcm(*(weight.denominator for weight in weights)),
    )
    shares = tuple(int(weight / unit) for weight in weights)
    if sum(shares) > MAX_PERIOD:
        scale = (MAX_PERIOD - 2 * len(weights)) / sum(weights)
        rounded = ", ".join(str(max(1, round(weight * scale))) for weight in weights)
        raise ConfigError(
            f"[training] datasets: the weights {', '.join(str(dataset.weight) for dataset in datasets)} must be in the "
            f"proportion of whole numbers with a sum of at most {MAX_PERIOD:,}; use {rounded}, which is near"
        )
    return shares


def multiples_near(value: int, step: int) -> str:
    """The two positive multiples of `step` nearest to `value`, in words."""
    below = max(value // step, 1) * step
    return f"{below} or {below + step}"


def check_config(config: Config, *, world_size: int, unsound: Collection[str] = ()) -> list[str]:
    """Every rule between keys that the config breaks, a message each. Rules on a table in `unsound`
    are left out."""
    c = config
    rules = [
        (
            ("parallelism", "training"),
            _check_layout(c.parallelism, c.training, world_size=world_size),
        ),
        (("model",), _check_flavor(c.model)),
        (("model", "parallelism"), _check_widths(c.model, c.parallelism)),
        (("model", "training", "parallelism"), _check_seq_len(c.model, c.training, c.parallelism)),
        (("model", "activation_checkpoint"), _check_selective(c.model, c.activation_checkpoint)),
        (("lr_scheduler", "training"), check_decay(c.lr_scheduler, steps=c.training.steps)),
        (("optimizer",), _check_optimizer(c.optimizer)),
        (("compile",), _check_compile(c.compile)),
        (
            ("compile", "activation_checkpoint"),
            _check_memory_budget(c.compile, c.activation_checkpoint),
        ),
        (
            ("model", "parallelism", "activation_checkpoint"),
            _check_memory_budget_torch(c.model, c.parallelism, c.activation_checkpoint),
        ),
        (("compile", "parallelism"), _check_async_tensor_parallel(c.compile, c.parallelism)),
        (("float8",), _check_float8(c.float8)),
        (("float8", "training"), _check_float8_training(c.float8, c.training)),
        (("training",), _check_datasets(c.training)),
        (("training",), _check_loss_spike(c.training)),
        (("checkpoint",), _check_checkpoint(c.checkpoint)),
        (("validation",), _check_validation(c.validation)),
        (("checkpoint", "metrics", "profiling"), _check_folders(c)),
    ]
    return [
        message
        for tables, messages in rules
        if not set(tables) & set(unsound)
        for message in messages
    ]


def _check_layout(
    parallelism: ParallelismConfig, training: TrainingConfig, *, world_size: int
) -> Iterator[str]:
    for kind in ("context", "pipeline"):
        degree = getattr(parallelism, f"{kind}_parallel_degree")
        if degree != 1:
            yield (
                f"[parallelism] {kind}_parallel_degree = {degree}: {kind} parallelism is not implemented; set it to 1"
            )
    try:
        degrees = resolve_degrees(parallelism, world_size=world_size)
        resolve_batch(training, dp_degree=degrees.dp)
    except ConfigError as error:
        yield str(error)


def _check_flavor(model: ModelConfig) -> Iterator[str]:
    if model.flavor not in FLAVORS:
        hint = did_you_mean(model.flavor, FLAVORS)
        yield f"[model] flavor = {show(model.flavor)} must be one of {', '.join(map(show, FLAVORS))}{hint}"


def _check_widths(model: ModelConfig, parallelism: ParallelismConfig) -> Iterator[str]:
    tp = parallelism.tensor_parallel_degree
    if args := FLAVORS.get(model.flavor):
        common = math.gcd(args.n_heads, args.n_kv_heads, args.dim, args.ffn_dim)
        if common % tp:
            fitting = ", ".join(
                str(degree) for degree in range(1, common + 1) if common % degree == 0
            )
            yield (
                f"[parallelism] tensor_parallel_degree = {tp} must divide n_heads = {args.n_heads}, "
                f"n_kv_heads = {args.n_kv_heads}, dim = {args.dim} and ffn_dim = {args.ffn_dim} of [model] flavor = "
                f"{show(model.flavor)}; use one of {fitting}"
            )


def _check_seq_len(
    model: ModelConfig, training: TrainingConfig, parallelism: ParallelismConfig
) -> Iterator[str]:
    seq_len, tp = training.seq_len, parallelism.tensor_parallel_degree
    if seq_len % tp:
        yield (
            f"[training] seq_len = {seq_len} is not a multiple of [parallelism] tensor_parallel_degree = {tp}, which "
            f"shards the sequence too; use {multiples_near(seq_len, tp)}"
        )
    args = FLAVORS.get(model.flavor)
    if args and seq_len > args.max_seq_len:
        yield (
            f"[training] seq_len = {seq_len} is above max_seq_len = {args.max_seq_len} of [model] flavor = "
            f"{show(model.flavor)}; use at most {args.max_seq_len}"
        )


def _check_selective(
    model: ModelConfig, activation_checkpoint: ActivationCheckpointConfig
) -> Iterator[str]:
    option = activation_checkpoint.selective_ac_option
    args = FLAVORS.get(model.flavor)
    if args and activation_checkpoint.mode == "selective":
        allowed = ("op", *map(str, range(1, args.n_layers + 1)))
        if option not in allowed:
            yield (
                f'[activation_checkpoint] selective_ac_option = {show(option)} must be "op", or a number from "1" to '
                f"{show(allowed[-1])}, the n_layers of [model] flavor = {show(model.flavor)}"
            )


def check_decay(schedule: LRSchedulerConfig, *, steps: int) -> Iterator[str]:
    """What is wrong with the schedule of a run of `steps`. One cut short, below its warm-up, only
    warms up; that must not need a change of the schedule."""
    total, warmup = schedule.total_steps or steps, schedule.warmup_steps
    decay = round(total * (schedule.decay_ratio or 0.0))
    if warmup < total < warmup + decay:
        most = math.floor((total - warmup) / total * 1000) / 1000
        yield (
            f"[lr_scheduler] decay_ratio = {schedule.decay_ratio} of {total} steps = {decay} steps, but warmup_steps = "
            f"{warmup} leaves {total - warmup}; use decay_ratio <= {most} or warmup_steps <= {total - decay}"
        )


def _check_optimizer(optimizer: OptimizerConfig) -> Iterator[str]:
    if optimizer.state_dtype != "float32" and optimizer.implementation != "fused":
        yield (
            f"[optimizer] implementation = {show(optimizer.implementation)} keeps its moments in float32, and "
            f'state_dtype = {show(optimizer.state_dtype)}; set implementation to "fused", or state_dtype to "float32"'
        )


def _check_compile(compile: CompileConfig) -> Iterator[str]:
    if compile.enable and not compile.components:
        yield '[compile] components = [] leaves nothing to compile; use ["model", "loss"], or set enable to false'


def _check_memory_budget(
    compile: CompileConfig, activation_checkpoint: ActivationCheckpointConfig
) -> Iterator[str]:
    if activation_checkpoint.mode == "memory_budget" and not compile.covers("model"):
        yield (
            '[activation_checkpoint] mode = "memory_budget" is for the compiler; set [compile] enable = true, with '
            '"model" among its components, or the mode to "selective"'
        )


def _check_memory_budget_torch(
    model: ModelConfig,
    parallelism: ParallelismConfig,
    activation_checkpoint: ActivationCheckpointConfig,
) -> Iterator[str]:
    """The compiler of torch 2.11 cannot count the FLOPs of grouped-query attention on a GPU, and
    the compiler of torch 2.12 takes DTensor's mesh for an activation of unknown size."""
    if activation_checkpoint.mode != "memory_budget":
        return
    torch_version = version("torch")
    minor = tuple(int(part) for part in torch_version.split(".")[:2])
    rule = f'[activation_checkpoint] mode = "memory_budget" crashes the compiler of torch {torch_version}'
    args, tp = FLAVORS.get(model.flavor), parallelism.tensor_parallel_degree
    if minor < (2, 12) and args and args.n_kv_heads != args.n_heads:
        yield (
            f"{rule} where n_kv_heads = {args.n_kv_heads} is not n_heads = {args.n_heads}, as in [model] flavor = "
            f'{show(model.flavor)}; install torch 2.13, or set the mode to "selective"'
        )
    if minor == (2, 12) and tp > 1:
        yield (
            f"{rule} under [parallelism] tensor_parallel_degree = {tp}; install torch 2.13, or set the degree to 1 or "
            'the mode to "selective"'
        )


def _check_async_tensor_parallel(
    compile: CompileConfig, parallelism: ParallelismConfig
) -> Iterator[str]:
    if not parallelism.enable_async_tensor_parallel:
        return
    if parallelism.tensor_parallel_degree == 1:
        yield (
            "[parallelism] enable_async_tensor_parallel = true needs tensor_parallel_degree of 2 or more, not 1; set "
            "that, or set it to false"
        )
    if not compile.covers("model"):
        yield (
            "[parallelism] enable_async_tensor_parallel = true is done by the compiler; set [compile] enable = true, "
            'with "model" among its components, or set it to false'
        )


def _check_float8(float8: Float8Config) -> Iterator[str]:
    if not float8.enable_float8_linear:
        return
    recipe, name = float8.recipe, show(float8.recipe_name)
    if float8.pad_inner_dim and not recipe.pads_tokens:
        why = "is not offered by torchao" if recipe.divides_tokens else "pads nothing"
        yield (
            f"[float8] pad_inner_dim = true {why} under recipe_name = {name}; set it to false, or "
            f"the recipe to {_recipes(lambda other: other.pads_tokens)}"
        )
    if float8.log_numerics_freq and recipe.torchao_recipe is None:
        yield (
            f"[float8] log_numerics_freq = {float8.log_numerics_freq} measures casts with a scale "
            f"for a tensor or a row, not those of recipe_name = {name}; set it to 0, or change the "
            "recipe"
        )
    if float8.enable_fsdp_float8_all_gather and not recipe.gathers_weights:
        yield (
            "[float8] enable_fsdp_float8_all_gather = true needs recipe_name = "
            f"{_recipes(lambda other: other.gathers_weights)}, not {name}; set it to false, or "
            "change the recipe"
        )
    if float8.precompute_float8_dynamic_scale_for_fsdp and not float8.enable_fsdp_float8_all_gather:
        yield (
            "[float8] precompute_float8_dynamic_scale_for_fsdp = true needs enable_fsdp_float8_all_gather = true; "
            "set both to the same"
        )


def _check_float8_training(float8: Float8Config, training: TrainingConfig) -> Iterator[str]:
    if not float8.enable_float8_linear:
        return
    if float8.precompute_float8_dynamic_scale_for_fsdp and training.enable_cpu_offload:
        yield (
            "[float8] precompute_float8_dynamic_scale_for_fsdp = true has no effect with [training] enable_cpu_offload "
            "= true: a weight comes to the GPU without its scale; set one of them to false"
        )
    dtype = float8.recipe.compute_dtype
    if dtype is not None and training.mixed_precision_param != dtype:
        yield (
            f"[training] mixed_precision_param = {show(training.mixed_precision_param)} cannot be "
            f"cast by the kernels of [float8] recipe_name = {show(float8.recipe_name)}; use "
            f"{show(dtype)}, or another recipe"
        )


def _recipes(having: Callable[[Recipe], bool]) -> str:
    """The recipes with a property, in words."""
    return " or ".join(show(name) for name, recipe in RECIPES.items() if having(recipe))


def _check_datasets(training: TrainingConfig) -> Iterator[str]:
    if training.datasets and training.dataset_path:
        yield (
            f"[training] dataset_path = {show(training.dataset_path)} is set, and so is datasets, a list of "
            f"{len(training.datasets)}; unset it, or make it one of the list"
        )
    try:
        resolve_shares(training.datasets)
    except ConfigError as error:
        yield str(error)


def _check_loss_spike(training: TrainingConfig) -> Iterator[str]:
    if 0 < training.loss_spike_factor <= 1:
        yield (
            f"[training] loss_spike_factor = {training.loss_spike_factor} makes each loss near the mean of the others "
            "a spike; use a factor above 1, like 3, or 0 for none"
        )


def _check_checkpoint(checkpoint: CheckpointConfig) -> Iterator[str]:
    if checkpoint.initial_load_path is not None and not checkpoint.enable:
        yield (
            f"[checkpoint] initial_load_path = {show(checkpoint.initial_load_path)} needs enable = true; set that, or "
            "unset it"
        )


def _check_validation(validation: ValidationConfig) -> Iterator[str]:
    if validation.dataset and validation.dataset_path:
        yield (
            f"[validation] dataset = {show(validation.dataset)} and dataset_path = {show(validation.dataset_path)} are "
            "both set; unset one"
        )


def _check_folders(config: Config) -> Iterator[str]:
    """Each part of a run has a name of its own within the run folder."""
    owners: dict[PurePosixPath, str] = {}
    for name, value in (
        ("[checkpoint] folder", config.checkpoint.folder),
        ("[checkpoint] save_request_file", config.checkpoint.save_request_file),
        ("[metrics] save_tb_folder", config.metrics.save_tb_folder),
        ("[profiling] save_traces_folder", config.profiling.save_traces_folder),
        ("[profiling] save_memory_snapshot_folder", config.profiling.save_memory_snapshot_folder),
    ):
        folder = PurePosixPath(value)
        owner = owners.setdefault(folder, name)
        if folder.is_absolute() or ".." in folder.parts or not folder.parts:
            yield f'{name} = {show(value)} must be a name within [job] dump_folder, like "traces"'
        elif folder.parts[0] in RUN_FILES:
            yield f"{name} = {show(value)} is a name that every run uses for its own; choose another"
        elif owner != name:
            yield f"{name} = {show(value)} is that of {owner} too; choose another"
