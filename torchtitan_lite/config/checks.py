"""Rules that hold between keys. A config is judged here before any process starts."""

import math
from collections.abc import Callable, Collection, Iterator
from importlib.metadata import version
from pathlib import PurePosixPath

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.float8.recipes import RECIPES, Recipe
from torchtitan_lite.models.flavors import FLAVORS, find_flavor

from .arithmetic import multiples_near, resolve_batch, resolve_degrees, resolve_shares
from .keys import did_you_mean, show
from .sections import Config, LRSchedulerConfig

RUN_FILES = (
    ".lock",
    "config.toml",
    "logs",
    "metrics.jsonl",
    "numerics.jsonl",
    "peaks.json",
    "previous",
    "status.json",
    "wandb",
)
"""Names in the run folder that every run uses and that no key can choose."""

Rule = Callable[[Config], Iterator[str]]
RULES: dict[Rule, tuple[str, ...]] = {}
"""Each rule with the tables it reads. A rule yields one message per violation."""


def rule(*tables: str) -> Callable[[Rule], Rule]:
    """Register a rule that reads `tables`."""

    def register(check: Rule) -> Rule:
        RULES[check] = tables
        return check

    return register


def check_config(config: Config, *, world_size: int, unsound: Collection[str] = ()) -> list[str]:
    """Return a message for each rule that the config breaks.

    Rules that read a table in `unsound`, one with invalid values, are skipped.
    """
    messages: list[str] = []
    if not {"parallelism", "training"} & set(unsound):
        messages += _check_layout(config, world_size)
    for check, tables in RULES.items():
        if not set(tables) & set(unsound):
            messages += check(config)
    return messages


def _check_layout(config: Config, world_size: int) -> Iterator[str]:
    for kind in ("context", "pipeline"):
        degree = getattr(config.parallelism, f"{kind}_parallel_degree")
        if degree != 1:
            yield (
                f"[parallelism] {kind}_parallel_degree = {degree}: {kind} parallelism is not "
                "implemented; set it to 1"
            )
    try:
        degrees = resolve_degrees(config.parallelism, world_size=world_size)
        resolve_batch(config.training, dp_degree=degrees.dp)
    except ConfigError as error:
        yield str(error)


@rule("model")
def _check_flavor(config: Config) -> Iterator[str]:
    flavor = config.model.flavor
    if find_flavor(flavor) is None:
        hint = did_you_mean(flavor, FLAVORS)
        choices = ", ".join(map(show, FLAVORS))
        yield f"[model] flavor = {show(flavor)} must be one of {choices}{hint}"


@rule("model", "parallelism")
def _check_widths(config: Config) -> Iterator[str]:
    tp, args = config.parallelism.tensor_parallel_degree, find_flavor(config.model.flavor)
    if args is None:
        return
    common = math.gcd(args.n_heads, args.n_kv_heads, args.dim, args.ffn_dim)
    if common % tp:
        fitting = [str(degree) for degree in range(1, common + 1) if common % degree == 0]
        yield (
            f"[parallelism] tensor_parallel_degree = {tp} must divide n_heads = {args.n_heads}, "
            f"n_kv_heads = {args.n_kv_heads}, dim = {args.dim} and ffn_dim = {args.ffn_dim} of "
            f"[model] flavor = {show(config.model.flavor)}; use one of {', '.join(fitting)}"
        )


@rule("model", "training", "parallelism")
def _check_seq_len(config: Config) -> Iterator[str]:
    seq_len, tp = config.training.seq_len, config.parallelism.tensor_parallel_degree
    if seq_len % tp:
        yield (
            f"[training] seq_len = {seq_len} is not a multiple of [parallelism] "
            f"tensor_parallel_degree = {tp}, which shards the sequence too; "
            f"use {multiples_near(seq_len, tp)}"
        )
    args = find_flavor(config.model.flavor)
    if args and seq_len > args.max_seq_len:
        yield (
            f"[training] seq_len = {seq_len} is above max_seq_len = {args.max_seq_len} of [model] "
            f"flavor = {show(config.model.flavor)}; use at most {args.max_seq_len}"
        )


@rule("model", "activation_checkpoint")
def _check_selective(config: Config) -> Iterator[str]:
    checkpointing, args = config.activation_checkpoint, find_flavor(config.model.flavor)
    if args is None or checkpointing.mode != "selective":
        return
    allowed = ("op", *map(str, range(1, args.n_layers + 1)))
    if checkpointing.selective_ac_option not in allowed:
        yield (
            f"[activation_checkpoint] selective_ac_option = "
            f'{show(checkpointing.selective_ac_option)} must be "op", or a number from "1" to '
            f"{show(allowed[-1])}, the n_layers of [model] flavor = {show(config.model.flavor)}"
        )


def check_decay(schedule: LRSchedulerConfig, *, steps: int) -> Iterator[str]:
    """Yield a message if the decay of a run of `steps` begins before its warm-up ends.

    A run shorter than its warm-up only warms up, so that a short trial needs no other schedule.
    """
    total, warmup = schedule.total_steps or steps, schedule.warmup_steps
    decay = round(total * (schedule.decay_ratio or 0.0))
    if warmup < total < warmup + decay:
        most = math.floor((total - warmup) / total * 1000) / 1000
        yield (
            f"[lr_scheduler] decay_ratio = {schedule.decay_ratio} of {total} steps = {decay} "
            f"steps, but warmup_steps = {warmup} leaves {total - warmup}; "
            f"use decay_ratio <= {most} or warmup_steps <= {total - decay}"
        )


@rule("lr_scheduler", "training")
def _check_schedule(config: Config) -> Iterator[str]:
    yield from check_decay(config.lr_scheduler, steps=config.training.steps)


@rule("optimizer")
def _check_optimizer(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.state_dtype != "float32" and optimizer.implementation != "fused":
        yield (
            f"[optimizer] implementation = {show(optimizer.implementation)} keeps its moments in "
            f"float32, and state_dtype = {show(optimizer.state_dtype)}; "
            'set implementation to "fused", or state_dtype to "float32"'
        )


@rule("compile")
def _check_compile(config: Config) -> Iterator[str]:
    if config.compile.enable and not config.compile.components:
        yield (
            "[compile] components = [] leaves nothing to compile; "
            'use ["model", "loss"], or set enable to false'
        )


@rule("model", "parallelism", "activation_checkpoint", "compile")
def _check_memory_budget(config: Config) -> Iterator[str]:
    """Versions seen: torch 2.11 cannot count the FLOPs of grouped-query attention on a GPU, and
    torch 2.12 takes DTensor's mesh for an activation of unknown size."""
    if config.activation_checkpoint.mode != "memory_budget":
        return
    if not config.compile.covers("model"):
        yield (
            '[activation_checkpoint] mode = "memory_budget" is for the compiler; set [compile] '
            'enable = true, with "model" among its components, or the mode to "selective"'
        )

    torch_version = version("torch")
    minor = tuple(int(part) for part in torch_version.split(".")[:2])
    crashes = (
        '[activation_checkpoint] mode = "memory_budget" crashes the compiler of torch '
        f"{torch_version}"
    )
    args, tp = find_flavor(config.model.flavor), config.parallelism.tensor_parallel_degree
    if minor < (2, 12) and args and args.n_kv_heads != args.n_heads:
        yield (
            f"{crashes} where n_kv_heads = {args.n_kv_heads} is not n_heads = {args.n_heads}, "
            f"as in [model] flavor = {show(config.model.flavor)}; "
            'install torch 2.13, or set the mode to "selective"'
        )
    if minor == (2, 12) and tp > 1:
        yield (
            f"{crashes} under [parallelism] tensor_parallel_degree = {tp}; "
            'install torch 2.13, or set the degree to 1 or the mode to "selective"'
        )


@rule("compile", "parallelism")
def _check_async_tensor_parallel(config: Config) -> Iterator[str]:
    if not config.parallelism.enable_async_tensor_parallel:
        return
    if config.parallelism.tensor_parallel_degree == 1:
        yield (
            "[parallelism] enable_async_tensor_parallel = true needs tensor_parallel_degree of 2 "
            "or more, not 1; set that, or set it to false"
        )
    if not config.compile.covers("model"):
        yield (
            "[parallelism] enable_async_tensor_parallel = true is done by the compiler; "
            'set [compile] enable = true, with "model" among its components, or set it to false'
        )


@rule("float8")
def _check_float8(config: Config) -> Iterator[str]:
    float8 = config.float8
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
            f"for a tensor or a row, not those of recipe_name = {name}; "
            "set it to 0, or change the recipe"
        )
    if float8.enable_fsdp_float8_all_gather and not recipe.gathers_float8:
        yield (
            "[float8] enable_fsdp_float8_all_gather = true needs recipe_name = "
            f"{_recipes(lambda other: other.gathers_float8)}, not {name}; "
            "set it to false, or change the recipe"
        )
    if float8.precompute_float8_dynamic_scale_for_fsdp and not float8.enable_fsdp_float8_all_gather:
        yield (
            "[float8] precompute_float8_dynamic_scale_for_fsdp = true needs "
            "enable_fsdp_float8_all_gather = true; set both to the same"
        )


def _recipes(having: Callable[[Recipe], bool]) -> str:
    """List the recipes with a property: `"tensorwise" or "rowwise"`."""
    return " or ".join(show(name) for name, recipe in RECIPES.items() if having(recipe))


@rule("float8", "training")
def _check_float8_training(config: Config) -> Iterator[str]:
    float8, training = config.float8, config.training
    if not float8.enable_float8_linear:
        return
    if float8.precompute_float8_dynamic_scale_for_fsdp and training.enable_cpu_offload:
        yield (
            "[float8] precompute_float8_dynamic_scale_for_fsdp = true has no effect with "
            "[training] enable_cpu_offload = true: a weight comes to the GPU without its scale; "
            "set one of them to false"
        )
    dtype = float8.recipe.compute_dtype
    if dtype is not None and training.mixed_precision_param != dtype:
        yield (
            f"[training] mixed_precision_param = {show(training.mixed_precision_param)} cannot be "
            f"cast by the kernels of [float8] recipe_name = {show(float8.recipe_name)}; "
            f"use {show(dtype)}, or another recipe"
        )


@rule("training")
def _check_datasets(config: Config) -> Iterator[str]:
    training = config.training
    if training.datasets and training.dataset_path:
        yield (
            f"[training] dataset_path = {show(training.dataset_path)} is set, and so is datasets, "
            f"a list of {len(training.datasets)}; unset it, or make it one of the list"
        )
    try:
        resolve_shares(training.datasets)
    except ConfigError as error:
        yield str(error)


@rule("training")
def _check_loss_spike(config: Config) -> Iterator[str]:
    factor = config.training.loss_spike_factor
    if 0 < factor <= 1:
        yield (
            f"[training] loss_spike_factor = {factor} makes each loss near the mean of the others "
            "a spike; use a factor above 1, like 3, or 0 for none"
        )


@rule("checkpoint")
def _check_initial_load(config: Config) -> Iterator[str]:
    path = config.checkpoint.initial_load_path
    if path is not None and not config.checkpoint.enable:
        yield (
            f"[checkpoint] initial_load_path = {show(path)} needs enable = true; "
            "set that, or unset it"
        )


@rule("validation")
def _check_validation(config: Config) -> Iterator[str]:
    validation = config.validation
    if validation.dataset and validation.dataset_path:
        yield (
            f"[validation] dataset = {show(validation.dataset)} and dataset_path = "
            f"{show(validation.dataset_path)} are both set; unset one"
        )


@rule("checkpoint", "metrics", "profiling")
def _check_folders(config: Config) -> Iterator[str]:
    """Each part of a run needs a name of its own in the run folder."""
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
            yield f"{name} = {show(value)} is a name that every run uses itself; choose another"
        elif owner != name:
            yield f"{name} = {show(value)} is also the name of {owner}; choose another"
